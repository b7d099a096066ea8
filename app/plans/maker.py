"""Long work in a child process: plans and advice are made there, one at a time, the most urgent first.

A solver in a thread of the console's process would hold up its heartbeats; in a child it can also
be ended. JSON crosses the pipe, and large plans in columns (planner.packed).
"""

from __future__ import annotations

import itertools
import json
import math
import queue
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog

from openrecycle.app.advice.verdict import verdict_document
from openrecycle.app.catalogs.outlook import OutlookRequest, outlook_document
from openrecycle.app.runtime.children import Channel, ChildEnded, Children
from openrecycle.app.runtime.garbage_collection import OP_BYTES, building
from openrecycle.planner.catalog_store import CatalogInfo, MappedBlobs, StoredCatalog
from openrecycle.planner.errors import PlannerError
from openrecycle.planner.job import MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.packed import from_bytes, to_bytes
from openrecycle.planner.plan import JobDoc, Plan, PlanError
from openrecycle.planner.solvers.portfolio import checked_plan_of, make_plan

log = structlog.get_logger()

URGENT, AHEAD = 0, 1

# A plan is tried again once when the child that made it died; then its request is at fault.
_ATTEMPTS = 2


Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)


class Request(Protocol[Made_co]):
    """owner: what `cancel` goes by (the job's id). patience: seconds that its work may take; None: any."""

    @property
    def owner(self) -> str: ...
    @property
    def patience(self) -> float | None: ...
    def to_json(self) -> bytes: ...
    def read(self, document: bytes) -> Made_co: ...


@dataclass(frozen=True)
class PlanRequest:
    """Asks for one plan. time_limit: of the solver, in seconds."""

    owner: str
    job: JobDoc
    failed: tuple[str, ...]
    technique: str
    memory: str
    solver: str = "list"
    time_limit: float = 60.0
    patience: None = None

    def to_json(self) -> bytes:
        body = {**self.__dict__, "job": self.job.model_dump(mode="json")}
        return json.dumps(body).encode()

    def read(self, document: bytes) -> Plan:
        return from_bytes(document, source="the planning process")


@dataclass(frozen=True)
class LookUpRequest:
    """Asks for one plan of a catalog, fitted to the failures. info: of the catalog, as JSON. stored: the plan as it
    lies there, under that name."""

    owner: str
    info: str
    failed: tuple[str, ...]
    name: str
    stored: bytes
    patience: None = None

    def to_json(self) -> bytes:
        return json.dumps({"look_up": {**self.__dict__, "stored": b64encode(self.stored).decode()}}).encode()

    def read(self, document: bytes) -> Plan:
        return from_bytes(document, source="the planning process")


Done = Callable[[Made | None, str], None]
"""Called with (what was made, "") or (None, why there is nothing), in the maker's own thread."""


class PlanMaker:
    """Owns the child process. Thread-safe. `done` callbacks run one after the other. on_made: called with
    everything that was made, and not just looked up, before them."""

    def __init__(self, name: str = "planning", *, on_made: Callable[[Any], None] = lambda made: None) -> None:
        self._name = name
        self._on_made = on_made
        self._queue: queue.PriorityQueue[tuple[int, int, Request[Any] | None, Done[Any]]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._cancelled: set[str] = set()
        self._stopping = False
        self._children = Children(serve, name=name, keep=math.inf)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, *, child: bool = True) -> None:
        """child: starts the process now, so that the first request need not wait for it."""
        if child:
            self._children.prepare()
        self._thread.start()

    def submit(self, request: Request[Made], done: Done[Made], *, priority: int = AHEAD) -> None:
        self._queue.put((priority, next(self._order), request, done))

    def cancel(self, owner: str) -> None:
        """Forgets what `owner` still waits for; its callbacks are not called."""
        self._cancelled.add(owner)

    def close(self) -> None:
        """Ends the child, whatever it does, and waits for both."""
        self._stopping = True
        self._queue.put((-1, next(self._order), None, lambda made, why: None))
        self._children.close()
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        while True:
            _, _, request, done = self._queue.get()
            if request is None or self._stopping:
                return
            if request.owner in self._cancelled:
                continue
            made, why = self._solve(request)
            if self._stopping:
                return
            if request.owner not in self._cancelled:
                try:
                    if made is not None and not isinstance(request, LookUpRequest | OutlookRequest):
                        self._on_made(made)
                    done(made, why)
                except Exception:
                    log.exception("what was made could not be filed", job=request.owner)

    def _solve(self, request: Request[Made]) -> tuple[Made | None, str]:
        for _ in range(_ATTEMPTS):
            try:
                made, why = read_answer(self._children.ask(request.to_json(), patience=request.patience))
            except ChildEnded as ended:
                if ended.late:
                    return None, f"it took more than {request.patience:g} s"
                if self._stopping:
                    return None, "the console is stopping"
                log.warning("the planning process died; starting another", job=request.owner)
                continue
            if made is None:
                return None, why
            with building(len(made) // OP_BYTES):
                return request.read(made), ""
        return None, "the planning process died over it"


def serve(channel: Channel, request: bytes) -> None:
    """In the child."""
    channel.say(answer(request))


# Before what was made, and before why nothing was: a large document is not wrapped into another one.
_MADE, _WHY = b"+", b"-"


def read_answer(data: bytes) -> tuple[bytes | None, str]:
    """(what was made, "") or (None, why there is nothing)."""
    return (data[1:], "") if data[:1] == _MADE else (None, data[1:].decode())


def answer(request: bytes) -> bytes:
    """What `read_answer` reads."""
    body = json.loads(request)
    try:
        if "advise" in body:
            return _MADE + verdict_document(body["advise"]).encode()
        if "outlook" in body:
            return _MADE + outlook_document(body["outlook"]).encode()
        if "look_up" in body:
            return _MADE + to_bytes(_looked_up(**body["look_up"]))
        plan = make_plan(
            problem(JobDoc.model_validate(body["job"]), body["failed"], body["technique"], body["memory"]),
            solver=body["solver"],
            time_limit=body["time_limit"],
            look_ahead=body["solver"] != "list",  # asked for while workers wait
            form=checked_plan_of,
        )
    except PlannerError as error:
        return _WHY + str(error).encode()
    except Exception as error:
        asked = body.get("advise") or body.get("look_up") or body
        log.exception("the planner failed", failed=asked.get("failed"))
        return _WHY + f"the planner failed ({type(error).__name__}); the console's log says more".encode()
    return _MADE + to_bytes(plan)


def _looked_up(info: str, failed: Sequence[str], name: str, stored: str, **_: object) -> Plan:
    """Raises PlannerError when the stored plan is damaged, or not for such failures."""
    catalog = StoredCatalog(CatalogInfo.from_json(info), MappedBlobs({name: b64decode(stored)}))
    found = catalog.find(Worker.parse(worker, field="failed") for worker in failed)
    if found is None:
        raise PlanError(f"plan {name} is not for these failures")
    return found.plan


def problem(job: JobDoc, failed: Sequence[str], technique: str, memory: str) -> Problem:
    """Raises PlannerError."""
    workers = frozenset(Worker.parse(name, field="failed") for name in failed)
    return Problem(job.job(), workers, Technique.of(technique), MemoryLimit.parse(memory))
