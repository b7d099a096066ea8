"""Plans and migrations that people ask for: each made in a child process of its own, with progress.

Equal requests share one result, a bounded number runs at once, and the rest waits in order. Stopping
keeps the best plan so far. What a child is asked and answers is in app.plans.solving_child.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import structlog

from openrecycle.app.plans.solving_child import PLAN, Migrations, Request, serve
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.notify import Topic
from openrecycle.app.runtime.patches import OP_BYTES, building
from openrecycle.app.runtime.processes import Channel, ChildEnded, Children, PendingAnswer
from openrecycle.planner.plans.packed import from_bytes
from openrecycle.planner.plans.plan import Plan

log = structlog.get_logger()

MAX_RUNNING = 2
MAX_WAITING = 16
# Finished ones that are kept; a plan of 393,216 ops takes about 300 MB.
MAX_KEPT = 32
MAX_KEPT_OPS = 400_000
# Points of one solve that are drawn and logged: a search may report hundreds a second.
MAX_POINTS = 2_000
# Seconds that a child may take to let go of what it does before it is ended.
STOP_GRACE = 30.0

SolveState = Literal["waiting", "running", "stopping", "done", "failed"]
OVER = ("done", "failed")


class Point(NamedTuple):
    """elapsed: seconds. incumbent (None: no plan yet), bound: in the job's time unit."""

    elapsed: float
    incumbent: float | None
    bound: float
    solver: str


@dataclass
class Solve:
    """One request and what has come of it. error: a sentence, when `failed`. stopped: by somebody.

    asked: POSIX seconds; begun: monotonic ones; seconds: how long it ran, once it is over.
    """

    id: str
    request: Request
    state: SolveState = "waiting"
    points: list[Point] = field(default_factory=list)
    plan: Plan | None = None
    migrations: Migrations | None = None
    error: str = ""
    stopped: bool = False
    asked: float = field(default_factory=time.time)
    begun: float | None = None
    seconds: float | None = None
    child: PendingAnswer | None = None
    topic: Topic = field(default_factory=Topic)
    version: int = 0  # rises with all that changes, which `topic` is told

    def changed(self) -> None:
        self.version += 1
        self.topic.publish()

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def elapsed(self) -> float:
        """Seconds that it has run."""
        if self.seconds is not None:
            return self.seconds
        return 0.0 if self.begun is None else time.monotonic() - self.begun


class Solves:
    """One per console. Thread-safe."""

    def __init__(
        self,
        *,
        running: int = MAX_RUNNING,
        work: Callable[[Channel, bytes], None] = serve,
        on_made: Callable[[Plan], None] = lambda plan: None,
    ) -> None:
        self._most = running
        self._children = Children(work, name="solve")
        self._on_made = on_made
        self._lock = threading.RLock()
        self._solves: dict[str, Solve] = {}
        self._closed = False

    def find(self, request: Request) -> Solve | None:
        """What has been made of an equal request, without starting anything."""
        return self._solves.get(request.id)

    def get(self, solve_id: str) -> Solve:
        """Raises ConsoleError (404)."""
        found = self._solves.get(solve_id)
        if found is None:
            raise ConsoleError(404, "unknown_solve", f"solve: got {solve_id!r}, expected the id of one that is kept")
        return found

    def all(self) -> list[Solve]:
        """Those that are kept, in the order in which they were asked for."""
        with self._lock:
            return sorted(self._solves.values(), key=lambda s: (s.asked, s.id))

    def start(self, request: Request) -> Solve:
        """Begins it, or has it wait its turn. One that is known is given back, unless it came to no end
        of its own: it failed, or was stopped. Raises ConsoleError (429) when too many wait."""
        with self._lock:
            known = self._solves.get(request.id)
            if known is not None and not (known.state == "failed" or (known.over and known.stopped)):
                return known
            if sum(s.state == "waiting" for s in self._solves.values()) >= MAX_WAITING:
                raise ConsoleError(
                    429, "too_many", f"{MAX_WAITING} plans wait to be made already; stop one, or ask again later"
                )
            self._solves.pop(request.id, None)
            solve = self._solves[request.id] = Solve(request.id, request)
            self._drop_old()
            self._begin_next()
            return solve

    def stop(self, solve_id: str) -> Solve:
        """Has it end with the best plan so far. Raises ConsoleError (404)."""
        with self._lock:
            solve = self.get(solve_id)
            if solve.state == "waiting":
                solve.stopped = True
                self._over(solve, "stopped before it had begun")
            elif solve.state == "running":
                solve.stopped, solve.state = True, "stopping"
                solve.changed()
                if solve.child is not None:
                    solve.child.stop()
        return solve

    def warm(self) -> None:
        """Has a process ready that has imported the planner, so that the next plan need not wait for that."""
        self._children.prepare()

    def stop_waiting(self) -> None:
        """Sends home whoever follows a solve, so that the server can end."""
        for solve in self.all():
            solve.topic.close()

    def close(self) -> None:
        self.stop_waiting()
        with self._lock:
            self._closed = True
        self._children.close()

    # -- details ----------------------------------------------------------------------------

    def _begin_next(self) -> None:
        for solve in self.all():
            busy = sum(s.state in ("running", "stopping") for s in self._solves.values())
            if self._closed or busy >= self._most:
                return
            if solve.state == "waiting":
                self._begin(solve)

    def _begin(self, solve: Solve) -> None:
        document = solve.request.model_dump_json().encode()
        # A search that lasts longer than it was asked to ends with its best plan so far.
        solve.child = self._children.begin(document, timeout=solve.request.timeout, grace=STOP_GRACE)
        solve.state, solve.begun = "running", time.monotonic()
        solve.changed()
        threading.Thread(target=self._collect, args=(solve, solve.child), name="solve", daemon=True).start()

    def _collect(self, solve: Solve, child: PendingAnswer) -> None:
        """Takes the child's messages until it is done, is gone, or takes too long."""
        try:
            for data in child.messages():
                if data[:1] == PLAN:
                    self._take_plan(solve, data[1:])
                else:
                    self._take(solve, json.loads(data))
                if solve.over:
                    return
            raise ChildEnded
        except ChildEnded as ended:
            if ended.late:
                why = "did not stop, and was ended; it left no plan"
            else:
                why = "ended before it was done" + (f" ({ended})" if ended.exitcode is not None else "")
                why += "; perhaps the machine's memory was not enough" if ended.killed else ""
            self._over(solve, f"the planning process {why}")
        except Exception as error:
            log.exception("what a planning process said can't be read")
            self._over(solve, f"what the planning process said can't be read ({type(error).__name__})")

    def _take(self, solve: Solve, message: dict[str, object]) -> None:
        match message:
            case {"point": [float() | int() as elapsed, incumbent, bound, str(solver)]}:
                _add(solve.points, Point(elapsed, incumbent, bound, solver))  # type: ignore[arg-type]
                solve.changed()
            case {"migrations": document}:
                solve.migrations = Migrations.model_validate(document)
                self._over(solve)
            case {"error": str(sentence)}:
                self._over(solve, sentence)
            case _:
                raise ValueError(f"unknown message {sorted(message)}")

    def _take_plan(self, solve: Solve, document: bytes) -> None:
        with building(len(document) // OP_BYTES):
            solve.plan = from_bytes(document, source="the planning process")
        self._on_made(solve.plan)
        self._over(solve)

    def _over(self, solve: Solve, error: str = "") -> None:
        with self._lock:
            if solve.over:
                return
            solve.seconds = solve.elapsed
            solve.error = error
            solve.state = "failed" if error else "done"
            solve.changed()
            self._drop_old()
            self._begin_next()

    def _drop_old(self) -> None:
        over = [s for s in self.all() if s.over]
        ops = sum(s.request.job.ops for s in over if s.plan is not None)
        while over and (len(over) > MAX_KEPT or (len(over) > 1 and ops > MAX_KEPT_OPS)):
            oldest = over.pop(0)
            ops -= oldest.request.job.ops if oldest.plan is not None else 0
            del self._solves[oldest.id]


def _add(points: list[Point], point: Point) -> None:
    """Keeps what changed, and of a long search the newest as the last point."""
    if points and points[-1][1:] == point[1:]:
        return
    if len(points) >= MAX_POINTS:
        points[-1] = point
    else:
        points.append(point)
