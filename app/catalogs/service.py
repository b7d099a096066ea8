"""Catalogs in the console: plans that are made ahead, and stored by the question that they answer.

`Catalogs` looks plans up when a worker fails, reports to the Catalog page, and has catalogs filled in the background.
`exported` gives a catalog out as one file, as the command line keeps it.
"""

from __future__ import annotations

import io
import os
import threading
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import structlog
from cachetools import LRUCache, cached
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.app.catalogs.contents import (
    CatalogReport,
    CatalogRequest,
    CatalogSummary,
    Located,
    needed,
    read_stored,
    report,
    serve_filling,
    summary,
)
from openrecycle.app.runtime.errors import ConsoleError, damaged_plan, invalid, storing
from openrecycle.app.runtime.processes import Children, PendingAnswer
from openrecycle.db.store import Store
from openrecycle.planner.catalogs.catalog import CatalogInfo, StoredCatalog, folder_files
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.failures import canonical_pattern
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.jobs.words import percent
from openrecycle.planner.plans.packed import (
    CatalogQuestion,
    Effort,
    Header,
    decode_header,
    merit,
    pack,
    plan_name,
)
from openrecycle.planner.plans.plan import MetricsDoc, Plan, PlanError, SolverDoc

log = structlog.get_logger()

# How many catalogs are filled at the same time, and of how many the headers stay in memory.
MAX_FILLING = 2
MAX_KEPT = 16
# Plans of more ops are not encoded in the console's process: that would delay the answers to heartbeats.
KEPT_OPS = 20_000
# How many plans are stored at once.
BATCH = 64
# A filling whose process died, or whose plans could not be stored, is begun again after these seconds.
AGAIN_AFTER = (5.0, 30.0, 120.0)

Headers = Mapping[str, Header]


@dataclass
class Filling:
    """The filling of one catalog, as far as its process has reported. done, total: plans that are there, and wanted.

    state: running, done, cancelled or failed; why: the reason of the last failure, after which it may be begun again:
    failures counts these, and again_at is when (monotonic seconds; None: it is at work). began: POSIX seconds. asked:
    the process's answer; None once it has been read to its end, which may be some time after the filling was cancelled.
    given_up: it is not to be begun again.
    """

    request: CatalogRequest
    fingerprint: str
    asked: PendingAnswer | None = field(repr=False, compare=False)
    began: float = field(default_factory=time.time)
    began_at: float = field(default_factory=time.monotonic, repr=False)
    seconds: float = 0.0
    done: int = 0
    total: int = 0
    planned: int = 0
    state: str = "running"
    why: str = ""
    failures: int = 0
    again_at: float | None = None
    given_up: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def elapsed(self) -> float:
        """Seconds that it has taken, up to now or to its end."""
        return time.monotonic() - self.began_at if self.running else self.seconds


def info_of(question: CatalogQuestion) -> CatalogInfo:
    """Returns CatalogInfo.of(question), cached by job, since it takes half a second for 16,384 stages."""
    return _info_and_job(question)[0]


def _key(question: CatalogQuestion) -> Hashable:
    return id(question.job), question.technique, question.memory.text, question.over


@cached(LRUCache(MAX_KEPT), _key, threading.Lock())
def _info_and_job(question: CatalogQuestion) -> tuple[CatalogInfo, Job]:
    """Returns the info, and the job: while the cache holds the job, no other object gets its id, which is in the
    key."""
    return CatalogInfo.of(question), question.job


class Catalogs:
    """The catalogs of a console. Thread-safe. on_plans: called with (question, names) in a filling's thread when plans
    came in."""

    def __init__(
        self, store: Store, *, processes: int | None = None, again_after: Sequence[float] = AGAIN_AFTER
    ) -> None:
        self._store = store
        self._again_after = again_after
        # Half of the cores, since training may run on this machine too.
        self._processes = processes or max(1, (os.cpu_count() or 1) // 2)
        self._lock = threading.Lock()
        self._access = threading.Lock()  # orders reading and writing, so that no header in memory is an old one
        self._headers: LRUCache[str, dict[str, Header]] = LRUCache(MAX_KEPT)
        self._fillings: OrderedDict[str, Filling] = OrderedDict()
        self._children = Children(serve_filling, name="catalog", nested=True)
        self._threads: list[threading.Thread] = []
        self.on_plans: Callable[[CatalogQuestion, list[str]], None] = lambda question, names: None

    def close(self) -> None:
        """Ends every filling; the plans that they have made are kept."""
        with self._lock:
            threads = list(self._threads)
            for filling in self._fillings.values():
                filling.given_up.set()
        self._children.close()
        for thread in threads:
            thread.join(10)

    # -- looking up -------------------------------------------------------------------------

    def find(self, question: CatalogQuestion, failed: Iterable[Worker]) -> tuple[Plan, str] | None:
        """Returns the stored plan for exactly these failures, and where it is from in words; None: there is none.

        A catalog that can't be read counts as empty, since the caller has just lost a worker and needs some plan. No
        catalog has plans for layers that have moved.
        """
        if not _at_home(question):
            return None
        info = info_of(question)
        try:
            found = self._opened(info).find(failed)
        except (PlannerError, ConsoleError, SQLAlchemyError) as error:
            log.warning("a catalog is not used", catalog=info.fingerprint, reason=str(error))
            return None
        if found is None or not question.fits(found.plan.partition):
            return None
        return found.plan, _origin(found.reason, found.plan.metrics, found.plan.solver)

    def located(self, question: CatalogQuestion, failed: tuple[str, ...]) -> Located | None:
        """Returns the plan that `find` would return, but still in bytes: large plans are parsed in another process."""
        if not _at_home(question):
            return None
        info = info_of(question)
        try:
            catalog = self._opened(info)
            found = catalog.fitting(map(Worker.parse, failed))
            stored = catalog.blobs.get(found.name) if found else None
        except (PlannerError, ConsoleError, SQLAlchemyError) as error:
            log.warning("a catalog is not used", catalog=info.fingerprint, reason=str(error))
            return None
        if found is None or stored is None:
            return None
        header = catalog.header(found.name)
        if not question.fits(header.partition):
            return None
        origin = _origin(found.reason, header.metrics, header.solver)
        return Located(info.model_dump_json(), failed, found.name, stored, origin)

    def names(self, question: CatalogQuestion) -> frozenset[str]:
        """Returns the names of the stored plans for a question. Raises ConsoleError."""
        if not _at_home(question):
            return frozenset()
        return frozenset(self._headers_of(info_of(question).fingerprint))

    def keep(self, question: CatalogQuestion, plan: Plan) -> None:
        """Adds a plan that was made elsewhere, unless a better one is stored, it is too large to be encoded here, or it
        is for another partition than the question's."""
        if plan.job.ops > KEPT_OPS:
            return
        if not question.fits(plan.partition):
            return
        info = info_of(question)
        pattern, permutation = canonical_pattern(map(Worker.parse, plan.failed), question.job)
        known = self._headers_of(info.fingerprint).get(plan_name(pattern))
        if known is not None and question.fits(known.partition) and known.merit >= merit(plan.metrics):
            return
        plan = plan.renamed(permutation)
        self._save(info, {plan_name(pattern): pack(plan, Effort(solver=plan.solver.name.split(" ")[0]))})

    def plan(self, fingerprint: str, name: str) -> Plan:
        """Returns one stored plan. Raises ConsoleError (404)."""
        stored = self.stored(fingerprint)
        try:
            return stored.plan(name)
        except PlanError as error:
            raise damaged_plan(name, error) from None

    def stored(self, fingerprint: str) -> StoredCatalog:
        """Opens a stored catalog. Raises ConsoleError (404)."""
        with storing():
            text = self._store.catalog_info(fingerprint)
        if text is None:
            raise ConsoleError(
                404, "unknown_catalog", f"got {fingerprint!r}, expected a stored catalog's", field="catalog"
            )
        try:
            return self._opened(CatalogInfo.from_json(text, source=f"catalog {fingerprint}"), fingerprint)
        except PlannerError as error:
            raise invalid(error) from None

    def stored_of(self, question: CatalogQuestion) -> StoredCatalog:
        """Opens the catalog of a question, which may be empty. Raises ConsoleError."""
        return self._opened(info_of(question))

    def blobs(self, fingerprint: str) -> dict[str, bytes]:
        """Returns the bytes of every stored plan by name. Raises ConsoleError."""
        with storing():
            return self._store.catalog_blobs(fingerprint).all()

    # -- what there is ----------------------------------------------------------------------

    def list(self) -> list[CatalogSummary]:
        """Returns the stored catalogs, newest first. Raises ConsoleError."""
        with storing():
            rows = self._store.catalogs()
        return [found for row in reversed(rows) if (found := summary(row)) is not None]

    def report(self, question: CatalogQuestion, tolerance: int, fingerprint: str | None = None) -> CatalogReport:
        """Reports which plans there are for up to `tolerance` failures, and which are missing. Raises ConsoleError.

        fingerprint: of a stored catalog that another version of the planner made; by default that of the question.
        """
        named = fingerprint or info_of(question).fingerprint
        return report(question, needed(question, tolerance), named, self._headers_of(named))

    def delete(self, fingerprint: str) -> None:
        """Deletes a catalog. Raises ConsoleError if there is none, or it is being filled."""
        filling = self.filling(fingerprint)
        if filling is not None and filling.running:
            raise ConsoleError(409, "filling", "the catalog is being filled; cancel that first")
        self.stored(fingerprint)
        with self._access:
            with storing():
                self._store.delete_catalog(fingerprint)
            with self._lock:
                self._headers.pop(fingerprint, None)
                self._fillings.pop(fingerprint, None)

    # -- filling ----------------------------------------------------------------------------

    def filling(self, fingerprint: str) -> Filling | None:
        """Returns the newest filling of this catalog since the console started."""
        return self._fillings.get(fingerprint)

    def idle(self) -> bool:
        """Says whether the processes of all newest fillings have ended, and all their plans are stored."""
        with self._lock:
            return all(filling.asked is None for filling in self._fillings.values())

    def has_room(self, fingerprint: str) -> bool:
        """Says whether there is room to fill this catalog now, beside those that are being filled."""
        with self._lock:
            running = [known for known, filling in self._fillings.items() if filling.running]
        return len(running) < MAX_FILLING and fingerprint not in running

    def fill(self, request: CatalogRequest) -> Filling:
        """Starts to make the missing plans in the background. While a filling runs, an equal request returns it.

        Raises ConsoleError if the request can't be planned, or enough catalogs are being filled already.
        """
        try:
            request.check()
        except PlannerError as error:
            raise invalid(error) from None
        info = info_of(request.question)
        stored = self.blobs(info.fingerprint)
        with self._lock:
            known = self._fillings.get(info.fingerprint)
            if known is not None and known.running:
                if known.request == request:
                    return known
                raise ConsoleError(
                    409, "filling", f"the catalog is being filled up to {known.request.tolerance} failures; cancel that"
                )
            if sum(filling.running for filling in self._fillings.values()) >= MAX_FILLING:
                raise ConsoleError(
                    409, "busy", f"{MAX_FILLING} catalogs are being filled; wait for one of them, or cancel it"
                )
            asked = self._children.begin(request, dict(stored), self._processes)
            filling = self._fillings[info.fingerprint] = Filling(request, info.fingerprint, asked)
            self._fillings.move_to_end(info.fingerprint)
            for old in [f for f, made in self._fillings.items() if not made.running][:-MAX_KEPT]:
                del self._fillings[old]
            thread = threading.Thread(target=self._collect, args=(info, filling, asked), name="catalog", daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()
        return filling

    def cancel(self, fingerprint: str) -> None:
        """Ends the filling. Its plans are kept, and another `fill` goes on from there. Raises ConsoleError (404)."""
        with self._lock:
            filling = self._fillings.get(fingerprint)
            if filling is None:
                raise ConsoleError(
                    404, "not_filling", f"got {fingerprint!r}, expected one that is being filled", field="catalog"
                )
            if filling.running and filling.asked is not None:
                filling.state = "cancelled"
                filling.given_up.set()
                filling.asked.end()

    def _collect(self, info: CatalogInfo, filling: Filling, asked: PendingAnswer) -> None:
        """Stores the plans until all are made, and begins again after a failure that may pass; runs in a thread."""
        outcome, why, passing = self._taken(info, filling, asked)
        for pause in self._again_after:
            if not passing or filling.given_up.is_set():
                break
            log.warning("the filling of a catalog is begun again", catalog=info.fingerprint, seconds=pause, reason=why)
            filling.why, filling.failures, filling.again_at = why, filling.failures + 1, time.monotonic() + pause
            if filling.given_up.wait(pause):
                break
            filling.again_at = None
            try:
                stored = self.blobs(info.fingerprint)
                with self._lock:
                    if filling.given_up.is_set():
                        break
                    filling.asked = self._children.begin(filling.request, dict(stored), self._processes)
            except ConsoleError as error:
                why = str(error)
                continue
            outcome, why, passing = self._taken(info, filling, filling.asked)
        with self._lock:
            filling.asked = filling.again_at = None
            if filling.running:  # not cancelled meanwhile
                filling.state, filling.why = outcome, why

    def _taken(self, info: CatalogInfo, filling: Filling, asked: PendingAnswer) -> tuple[str, str, bool]:
        """Stores the plans that the process sends, until it is done or has died. Returns the outcome, why it failed,
        and whether it may succeed when it is begun again."""
        try:
            with closing(self._batches(filling, asked)) as batches:
                for batch in batches:
                    self._save(info, batch)
                    self.on_plans(info.question, sorted(batch))
            return "done", "", False
        except ConsoleError as error:
            return "failed", str(error), error.status == 503
        except Exception:
            log.exception("a catalog could not be filled", catalog=info.fingerprint)
            return "failed", "the plans could not be stored; the console's log says more", True

    def _batches(self, filling: Filling, asked: PendingAnswer) -> Generator[dict[str, bytes]]:
        """Yields the plans that the process sends, all of them before an error is raised."""
        batch: dict[str, bytes] = {}
        why: ConsoleError | None = None
        with closing(asked.messages()) as messages:
            try:
                for message in messages:
                    if isinstance(message, bytes):
                        name, batch[name] = read_stored(message)
                    else:
                        filling.done = message.get("done", filling.done)
                        filling.total = message.get("total", filling.total)
                        filling.planned = message.get("planned", filling.planned)
                    filling.seconds = time.monotonic() - filling.began_at
                    if batch and (len(batch) >= BATCH or not asked.waiting()):
                        yield batch
                        batch = {}
            except ConsoleError as error:
                why = error
            if batch:
                yield batch
        if why is not None:
            raise why

    # -- details ----------------------------------------------------------------------------

    def _opened(self, info: CatalogInfo, fingerprint: str | None = None) -> StoredCatalog:
        """Opens a catalog. fingerprint: the stored one, if another version of the planner computed it otherwise."""
        own = fingerprint or info.fingerprint
        return StoredCatalog(info, self._store.catalog_blobs(own), headers=self._headers_of(own))

    def _headers_of(self, fingerprint: str) -> Headers:
        """Returns the headers of a catalog's plans by name. Damaged ones are left out, and count as missing."""
        with self._lock:
            known = self._headers.get(fingerprint)
            if known is not None:
                return dict(known)
        with self._access:
            return self._read_headers(fingerprint)

    def _read_headers(self, fingerprint: str) -> Headers:
        """Does the same with `_access` held."""
        with self._lock:
            known = self._headers.get(fingerprint)
        headers = decoded(self.blobs(fingerprint)) if known is None else known
        with self._lock:
            self._headers[fingerprint] = headers
            return dict(headers)

    def _save(self, info: CatalogInfo, blobs: Mapping[str, bytes]) -> None:
        new = decoded(blobs)
        with self._access:
            stored = self._read_headers(info.fingerprint)
            headers = {
                name: header
                for name, header in new.items()
                # A running job may have stored a better one meanwhile.
                if (known := stored.get(name)) is None
                or not info.question.fits(known.partition)
                or header.merit >= known.merit
            }
            rows = [(name, header.failures, blobs[name]) for name, header in headers.items()]
            with storing():
                self._store.save_catalog(info.fingerprint, info.model_dump_json(), rows)
            with self._lock:
                if info.fingerprint in self._headers:
                    self._headers[info.fingerprint].update(headers)


def _at_home(question: CatalogQuestion) -> bool:
    """Says whether the question is for the job's own partition, without failures. No catalog of the console has plans
    for another."""
    return question.job.at_home is question.job


def _origin(reason: str, metrics: MetricsDoc, solver: SolverDoc) -> str:
    proof = "proven optimal" if metrics.gap <= 0 else f"at most {percent(metrics.gap)} above the best"
    return f"from the catalog: {reason} ({solver.name}, {proof})"


def decoded(blobs: Mapping[str, bytes]) -> dict[str, Header]:
    """Returns the headers of all plans that are not damaged."""
    out = {}
    for name, blob in blobs.items():
        try:
            out[name] = decode_header(blob, source=name)
        except PlanError as error:
            log.warning("a stored plan is not used", plan=name, reason=str(error))
    return out


def exported(catalogs: Catalogs, fingerprint: str) -> bytes:
    """Returns a zip of the folder of a stored catalog, as `openrecycle catalog --out` writes it and can go on from.
    Raises ConsoleError."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:  # plans are compressed already
        for name, data in folder_files(catalogs.stored(fingerprint).info, catalogs.blobs(fingerprint)).items():
            archive.writestr(name, data)
    return out.getvalue()
