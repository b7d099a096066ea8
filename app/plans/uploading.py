"""Large plans that come from outside, read in a process of their own.

JSON and pydantic let no other thread run: megabytes of it would hold up every heartbeat for as long as they take.
The child reads, checks and sums up; the console never builds the plan, and a document that was made to take a lot of
memory takes it from a process that ends.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openrecycle.app.runtime.errors import ConsoleError, bounded, sentence, starting
from openrecycle.app.runtime.processes import Channel, ChildEnded, Children
from openrecycle.planner.check import check, further
from openrecycle.planner.plans.packed import Packed, packed
from openrecycle.planner.plans.plan import Plan

log = structlog.get_logger()

# Of a file's name, what a plan is kept under.
NAME = 80
# Smaller ones are read in some milliseconds, where they came in.
LARGE = 128 * 1024
# Uploads that may wait for the one that is read, each with its megabytes.
MOST_WAITING = 8
# Beyond this a process has gone astray: 31 MB take some 12 s and 0.7 GB, 128 MB four times that.
TIMEOUT = 300.0
MOST_BYTES = 4 << 30
# Eight megabytes of ops have no more; of larger ones so many bytes at least belong to each.
MOST_CONTAINERS, MOST_FIELDS = 150_000, 800_000
CONTAINER_BYTES, FIELD_BYTES = 40, 10


class PlanToSave(BaseModel):
    """plan: a whole Plan document, which is checked; or solve: the id of one that was made here."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=200)]
    plan: Plan | None = None
    solve: Annotated[str, Field(max_length=64)] | None = None

    @property
    def wrong(self) -> str:
        """Why it can't be saved; "": it can be."""
        if (self.plan is None) == (self.solve is None):
            return "plan, solve: expected one of them"
        if self.plan is None or not (found := check(self.plan)):
            return ""
        return f"plan: {found[0]}" + (f"; and {more}" if (more := further(found)) else "")


class ReadPlan(NamedTuple):
    """A plan that has been checked, and is not read again to be stored. summary: see `summary_of`."""

    name: str
    fingerprint: str
    summary: dict[str, object]
    stored: Packed


class Reading:
    """A file that is read beside the page that waits for it. size: bytes. Once `over`, either `kept` is the fingerprint
    of the plan that it holds, or `error` says why it holds none."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.began = name, size, time.monotonic()
        self.kept, self.error = "", ""

    @property
    def over(self) -> bool:
        return bool(self.kept or self.error)


class Uploads:
    """One per console. Thread-safe; blocks its caller, one upload after the other."""

    def __init__(self) -> None:
        self._children = Children(read_upload, name="upload", most=1, memory=MOST_BYTES)
        self._lock = threading.Lock()
        self._waiting = 0

    def read(self, body: bytes) -> ReadPlan | PlanToSave:
        """What the body of POST /plans asks for: a plan that came with it, or the id of a solve.

        Raises ConsoleError: 422 for what is no plan, 429 when too many wait, 503 when the process was ended.
        """
        with self._lock:
            if self._waiting > MOST_WAITING:
                raise ConsoleError(429, "too_many", f"{MOST_WAITING} plans wait to be read already; try again later")
            self._waiting += 1
        try:
            with starting():
                answered = self._children.ask(body, timeout=TIMEOUT)
        except ChildEnded:
            detail = "the process that read the plan ended before it was done; perhaps memory was not enough"
            raise ConsoleError(503, "unavailable", detail) from None
        finally:
            with self._lock:
                self._waiting -= 1
        head, _, rest = answered.partition(b"\n")
        said = json.loads(head)
        if why := said.get("wrong"):
            raise ConsoleError(422, "invalid", why)
        if "solve" in said:
            return PlanToSave(name=said["name"], solve=said["solve"])
        stored = Packed(rest[: said["columns"]], rest[said["columns"] :])
        return ReadPlan(said["name"], said["fingerprint"], said["summary"], stored)

    def begin(self, name: str, document: bytes, keep: Callable[[ReadPlan], str]) -> Reading:
        """Reads the Plan document of that file name in a thread of its own, and keeps the plan under the name.

        keep: called in that thread; returns the plan's fingerprint.
        """
        reading = Reading(name, len(document))
        called = json.dumps(name.removesuffix(".json")[:NAME].strip() or "plan").encode()

        def read() -> None:
            try:
                found = self.read(b'{"name":' + called + b',"plan":' + document + b"}")
                if not isinstance(found, ReadPlan):
                    raise ConsoleError(422, "invalid", "it is not a plan")
                reading.kept = keep(found)
            except ConsoleError as error:
                reading.error = f"{name}: {error.detail}"
            except Exception as error:
                log.exception("an uploaded plan could not be kept")
                reading.error = f"{name}: it could not be kept ({type(error).__name__})"

        threading.Thread(target=read, name="upload", daemon=True).start()
        return reading

    def close(self) -> None:
        """Ends what is being read."""
        self._children.close()


def read_upload(channel: Channel, body: bytes) -> None:
    """In a child."""
    gc.disable()  # a million lists would be looked through again and again, and all goes with the process
    channel.say(answer(body))


def answer(body: bytes) -> bytes:
    """A line of JSON: {"wrong": sentence}, {"name", "solve"}, or of a ReadPlan how long its columns are, which
    follow with its document."""
    try:
        size = len(body)
        containers, fields = max(MOST_CONTAINERS, size // CONTAINER_BYTES), max(MOST_FIELDS, size // FIELD_BYTES)
        bounded(body, containers=containers, fields=fields)
        message = PlanToSave.model_validate_json(body)
    except ConsoleError as error:
        return json.dumps({"wrong": error.detail}).encode()
    except ValidationError as error:
        return json.dumps({"wrong": sentence(error.errors(include_url=False))}).encode()
    except MemoryError:
        return json.dumps({"wrong": "plan: it takes more memory than there is"}).encode()
    if wrong := message.wrong:
        return json.dumps({"wrong": wrong}).encode()
    plan = message.plan
    if plan is None:
        return json.dumps({"name": message.name, "solve": message.solve}).encode()
    columns, document = packed(plan)
    head = {
        "name": message.name,
        "fingerprint": plan.fingerprint,
        "summary": summary_of(plan),
        "columns": len(columns),
    }
    return json.dumps(head).encode() + b"\n" + columns + document


def summary_of(plan: Plan) -> dict[str, Any]:
    """Plain data."""
    job, metrics = plan.job, plan.metrics
    return {
        "period": metrics.period,
        "lower_bound": metrics.lower_bound,
        "gap": metrics.gap,
        "time_unit": job.time_unit,
        "failed": list(plan.failed),
        "technique": plan.technique.value,
        "memory": plan.memory,
        "pipelines": job.pipelines,
        "stages": job.stages,
        "micro_batches": job.micro_batches,
        "workers": job.pipelines * job.stages,
    }
