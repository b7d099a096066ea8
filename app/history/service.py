"""Histories of the jobs of a running console: exported and imported by a process of its own, deleted in the
background. Jobs that the command line has imported or deleted meanwhile come and go here, too."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.membership import PRESENT
from openrecycle.agent.messages.protocol import WorkerState
from openrecycle.app.history.archive import REST, HistoryError, Imported, abandoned, export, import_history
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.runtime.errors import ConsoleError, named, storing, unknown_job
from openrecycle.app.runtime.processes import Channel, ChildEnded, Children
from openrecycle.db.access import audit_row
from openrecycle.db.job_rows import DELETING, JobRows
from openrecycle.db.session import Database, DatabaseError

log = structlog.get_logger()

MOST_UPLOAD = 2**30
"""Bytes of a file that is sent to the API; the command line takes larger ones."""
CHUNK_SECONDS, DRAIN_SECONDS = 60.0, 15.0
"""For the next bytes of it: others wait for the place. And for which what is refused is thrown away."""
MOST_MEMORY = 8 * 2**30
"""A file that asks for more than any history needs ends the process that reads it, and harms no other."""
FOLLOW_SECONDS = 5.0
_ALIVE = frozenset({*PRESENT, WorkerState.STARTING})


class JobReader(Protocol):
    """What is asked of the console's jobs."""

    def find(self, job_id: str) -> LiveJob:
        """Raises ConsoleError (404)."""

    def follow(self) -> None:
        """Notes jobs that have come into the database, or gone. Raises SQLAlchemyError."""

    def let_go(self, job_id: str) -> None:
        """Of a job that is deleted."""


class Histories:
    """One per console. Thread-safe; export and take_in are called in an event loop."""

    def __init__(self, jobs: JobReader, database: Database) -> None:
        self._jobs, self._database = jobs, database
        self._rows = JobRows(database)
        self._exporting, self._importing = threading.Lock(), threading.Lock()
        self._children = Children(work, name="history")
        self._stop, self._deleted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console-histories", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._deleted.set()
        self._children.close()
        if self._thread.is_alive():
            self._thread.join(5)

    # -- out and in -----------------------------------------------------------------------------

    async def export(self, job_id: str, *, audit: bool) -> Path:
        """A file of the caller's, who deletes it. audit: with what the audit log says of the job. Raises
        ConsoleError."""
        await asyncio.to_thread(self._jobs.find, job_id)
        with _alone(self._exporting, "exported"):
            return await self._exported(job_id, audit)

    async def _exported(self, job_id: str, audit: bool) -> Path:
        out = _temporary()
        try:
            out.unlink()
            if not (await self._run("export", job_id, str(out), *(["audit"] if audit else [])))["found"]:
                raise unknown_job(job_id)
        except BaseException:
            for left in out.parent.glob(f"{out.name}*"):  # of a child that was killed, the part that it had written
                left.unlink(missing_ok=True)
            raise
        return out

    async def take_in(self, chunks: AsyncIterator[bytes], new_id: str | None, actor: str) -> Imported:
        """Imports the job of a file. new_id: instead of its own. Raises ConsoleError."""
        try:
            with _alone(self._importing, "imported"):  # from the first byte on: the folder holds one such file
                return await self._taken_in(chunks, new_id, actor)
        except ConsoleError:
            with suppress(TimeoutError):  # whoever sends it comes to read the answer
                async with asyncio.timeout(DRAIN_SECONDS):
                    async for _ in chunks:
                        pass
            raise

    async def _taken_in(self, chunks: AsyncIterator[bytes], new_id: str | None, actor: str) -> Imported:
        path, size = _temporary(), 0
        try:
            with path.open("wb") as handle:
                while chunk := await _next(chunks):
                    size += len(chunk)
                    if size > MOST_UPLOAD:
                        detail = f"the body: got more than {MOST_UPLOAD:,} bytes, expected at most that"
                        raise ConsoleError(
                            413, "too_large", f"{detail}; `openrecycle history import` takes larger files"
                        )
                    handle.write(chunk)
            done = Imported(**await self._run("import", str(path), actor, *([new_id] if new_id else [])))
        finally:
            path.unlink(missing_ok=True)
        with storing():
            await asyncio.to_thread(self._jobs.follow)
        log.info("job imported", job=done.job_id, rows=done.rows, actor=actor)
        return done

    async def _run(self, *arguments: str) -> Mapping[str, Any]:
        try:
            url = self._database.url.render_as_string(hide_password=False)
            asked = await asyncio.to_thread(self._children.begin, url, *arguments)
            try:
                answer = json.loads(await asyncio.to_thread(lambda: b"".join(asked.messages())))
            finally:
                asked.end()  # whoever asked may have gone
        except ChildEnded as ended:
            log.error("work on a history failed", reason=str(ended))
            raise ConsoleError(503, "unavailable", "work on this history failed; the console's log says why") from None
        if "error" in answer:
            taken = "is there already" in answer["error"]
            raise ConsoleError(409 if taken else 422, "job_exists" if taken else "invalid", answer["error"])
        return answer  # type: ignore[no-any-return]

    # -- away -----------------------------------------------------------------------------------

    def delete(self, job_id: str, actor: str) -> None:
        """From now on there is no such job; its rows are deleted in the background. Raises ConsoleError."""
        job = self._jobs.find(job_id)
        audit = audit_row(named(actor), "delete", job_id, job_id=job_id, detail=job.spec.name)
        with job.lock, storing():  # nobody registers meanwhile
            if why := self.kept_for(job_id):
                raise ConsoleError(409, "job_runs", f"job: {job_id} {why}, expected one that has ended")
            self._rows.hide(job_id, audit)
            self._jobs.let_go(job_id)
        self._deleted.set()
        log.info("job deleted", job=job_id, actor=actor)

    def kept_for(self, job_id: str) -> str:
        """Why it can't be deleted now: `is running (W0_0 lives)`; "" where it can be. Raises ConsoleError."""
        job = self._jobs.find(job_id)
        members = job.state.members.values()
        alive = sorted(m.name for m in members if m.state in _ALIVE and m.incarnation is not None)
        # Of workers that have not been heard for so long nobody knows; whoever deletes the job has looked.
        kept = alive and not job.state.over and not job.state.unheard
        return f"is {job.state.job_state} ({alive[0]} lives)" if kept else ""

    def _follow(self) -> None:
        while True:
            try:
                self._delete_rows()
                self._jobs.follow()
            except SQLAlchemyError as error:
                log.warning("histories wait for the database", reason=type(error).__name__)
            except Exception:
                log.exception("jobs that came or went could not be followed")
            self._deleted.wait(FOLLOW_SECONDS)
            self._deleted.clear()
            if self._stop.is_set():
                return

    def _delete_rows(self) -> None:
        """Of jobs that were deleted, and of imports whose process ended half way."""
        for job in self._rows.hidden():
            if job.state == DELETING or abandoned(job.note):
                while self._rows.delete_some(job):
                    if self._stop.wait(REST):
                        return


def work(channel: Channel, url: str, action: str, *arguments: str) -> None:
    """In a child: `export` JOB OUT [audit], or `import` FILE ACTOR [ID]. Says a line of JSON; refused: with a sentence
    under `error`."""
    database = Database(url)
    try:
        if action == "export":
            made = export(database, arguments[0], Path(arguments[1]), audit="audit" in arguments[2:])
            said: dict[str, Any] = {"found": made is not None}
        else:
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            new_id = arguments[2] if len(arguments) > 2 else None
            said = asdict(import_history(database, Path(arguments[0]), actor=arguments[1], new_id=new_id))
    except (HistoryError, DatabaseError) as error:
        said = {"error": str(error)}
    finally:
        database.close()
    channel.say(json.dumps(said).encode())


@contextmanager
def _alone(place: threading.Lock, done: str) -> Iterator[None]:
    """Raises ConsoleError (409) where the place is taken. done: what with a history, in a word."""
    if not place.acquire(blocking=False):
        raise ConsoleError(409, "busy", f"another history is being {done}; try again when it is done")
    try:
        yield
    finally:
        place.release()


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    """The next bytes; none: that was all. Raises ConsoleError (408)."""
    try:
        async with asyncio.timeout(CHUNK_SECONDS):
            while not (chunk := await anext(chunks, None)):
                if chunk is None:
                    return b""
            return chunk
    except TimeoutError:
        raise ConsoleError(408, "too_slow", f"the body: nothing of it came within {CHUNK_SECONDS:g} s") from None


def _temporary() -> Path:
    handle, name = tempfile.mkstemp(prefix="openrecycle-history-", suffix=".zip")
    os.close(handle)
    return Path(name)
