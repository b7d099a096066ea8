"""Simulations for the Simulate page, which run in child processes and can be cancelled.

The engine and the policies are the planner's; this file only has the page's requests and runs them. A process is kept
for the next simulation with all plans that it has made, so that a change of the failures needs few new ones.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from cachetools import LRUCache
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openrecycle.app.runtime.errors import ConsoleError, first_wrong
from openrecycle.app.runtime.processes import Channel, Children, PendingAnswer
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, count_ops
from openrecycle.planner.layers.migration import LEAST_UNIT, MOST_UNIT
from openrecycle.planner.plans.plan import JobDoc
from openrecycle.planner.profiles import SHAPES, analytic_job, model_shape
from openrecycle.planner.simulation.engine import HOUR, Crossing, RecoveryCosts, SimulationOutcome, simulate, sweep
from openrecycle.planner.simulation.planned import PlannedJob, Rate, evened
from openrecycle.planner.simulation.policies import PLANNED, planned_policy
from openrecycle.planner.simulation.traces import HOST, Domain, Trace, from_history, generated, public_traces, scaled

POLICIES = (*PLANNED, "spares")
DRAWN, HISTORY = "drawn", "history"
# Plans for larger grids take too long for a page; the command line takes such grids.
MAX_WORKERS = 4096
MAX_KEPT = 32
MAX_PLANNED = 4
# A plan of up to this many ops is made in a moment, so that a simulation can be stopped without ending its process.
QUICK_OPS = 20_000
# Seconds for which a process is kept for the next simulation, and in which it has to stop when told to.
KEEP, HEED = 300.0, 10.0
# A page that has not looked for this many seconds counts as closed: browsers let hidden pages look once a minute.
GONE = 150.0
# The sweep's mean times between failures, as multiples of the one asked for.
SWEEP = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class SimulationRequest(BaseModel):
    """What is simulated. Equal requests have equal results.

    job: replaces the model's shape and the grid by a job's own. unit_seconds: how long the job's time unit is; None:
    what its name says, and 1 second for a unit that is no unit of time. mtbf, host_mtbf: mean hours between
    failures of one worker and of a host of 8 (0: hosts don't fail as a whole). repair: hours. trace:
    `drawn`, a public trace by its name (see `public_traces`), or `history` with rows of the job's own.
    dollars: per worker and hour.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "gpt-3-6.7b"
    job: JobDoc | None = None
    unit_seconds: Annotated[float, Field(ge=LEAST_UNIT, le=MOST_UNIT)] | None = None
    samples: Annotated[float, Field(gt=0, le=1e9)] | None = None
    pipelines: Annotated[int, Field(ge=1, le=1024)] = 6
    stages: Annotated[int, Field(ge=1, le=512)] = 4
    micro_batches: Annotated[int, Field(ge=1, le=1024)] = 16
    policies: tuple[str, ...] = ("ours", "recycle", "drop-replica", "checkpoint-restart")
    trace: str = DRAWN
    mtbf: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 100.0
    host_mtbf: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)] = 0.0
    repair: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] = 4.0
    hours: Annotated[float, Field(gt=0, le=8760, allow_inf_nan=False)] = 72.0
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    dollars: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] = 2.0
    history: tuple[tuple[float, str, Literal["failed", "joined"]], ...] = ()
    history_seconds: Annotated[float, Field(ge=0, le=1e9)] = 0.0

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # pydantic's own hash fails: a job has its workers' speeds in a dict

    @property
    def ops(self) -> int:
        """The number of ops of one iteration."""
        grid = self.job or self
        return count_ops(grid.pipelines, grid.stages, grid.micro_batches)


@dataclass
class Simulation:
    """One simulation, filled by its child process. rows: one document per policy, as the command line prints it.

    curves: by policy, (hours, samples per second from then on). living: (hours, workers from then on). rates: by
    policy, samples per second at each MTBF of `mtbf`. refused: policies that this job can't have, and what it could
    have instead. watched: by page that shows it, when it last looked, in monotonic seconds. first: set once there is a
    row, or none will come.
    """

    request: SimulationRequest
    rows: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    living: list[tuple[float, int]] = field(default_factory=list)
    mtbf: list[float] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)
    crossings: list[Crossing] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    error: str = ""
    done: bool = False
    asked: PendingAnswer | None = None
    watched: dict[str, float] = field(default_factory=dict)
    first: threading.Event = field(default_factory=threading.Event)

    def look(self, page: str) -> None:
        """Notes that a page still shows it."""
        self.watched[page] = time.monotonic()

    def take(self, said: Mapping[str, Any]) -> None:
        """Takes a message of the child."""
        if self.done:
            return
        if "living" in said:
            self.living, self.refused = said["living"], said["refused"]
        if "row" in said:
            self.curves[said["row"]["policy"]] = said["curve"]
            self.rows.append(said["row"])
        if "mtbf" in said:
            self.mtbf, self.rates = said["mtbf"], said["rates"]
            self.crossings = [Crossing(**crossing) for crossing in said["crossings"]]
        if self.rows:
            self.first.set()

    def end(self, error: str = "") -> None:
        """Notes that there will be no more messages."""
        if not self.done:
            self.error, self.done = error, True
            self.first.set()

    @property
    def steps(self) -> tuple[int, int]:
        """The progress: (finished parts, all parts)."""
        swept = self.request.trace == DRAWN
        return len(self.rows) + bool(self.mtbf), len(self.request.policies) - len(self.refused) + swept


class Simulations:
    """Runs simulations, and keeps the newest results. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children = Children(answer, name="simulation", setup=simulator, keep=KEEP)
        self._kept: dict[SimulationRequest, Simulation] = {}

    def prepare(self) -> None:
        """Prepares a process, since somebody is about to ask for a simulation."""
        self._children.prepare()

    def get(self, request: SimulationRequest, page: str) -> Simulation:
        """Returns the simulation of `request`, and starts it if there is none. page: any name for the page that shows
        it."""
        with self._lock:
            known = self._kept.pop(request, None)
            if known is None:
                known = Simulation(request)
                self._start(known)
            known.look(page)
            self._kept[request] = known  # the newest last
            while len(self._kept) > MAX_KEPT:
                self._end(self._kept.pop(next(iter(self._kept))))
            return known

    def cancel(self, request: SimulationRequest, page: str) -> None:
        """Notes that a page no longer shows it. If it still runs and no other page shows it, it is ended and
        forgotten."""
        with self._lock:
            if (running := self._kept.get(request)) is not None:
                running.watched.pop(page, None)
                self._end_unless_watched(running)

    def end_unwatched(self) -> None:
        """Ends simulations whose pages were closed or loaded again, of which there is no notice. Call it now and
        then."""
        with self._lock:
            for running in list(self._kept.values()):
                self._end_unless_watched(running)

    def close(self) -> None:
        self._children.close()

    def _start(self, simulation: Simulation) -> None:
        simulation.asked = self._children.begin(simulation.request, grace=HEED)
        threading.Thread(target=_follow, args=(simulation, simulation.asked), name="simulation", daemon=True).start()

    def _end_unless_watched(self, simulation: Simulation) -> None:
        since = time.monotonic() - GONE
        if not simulation.done and all(looked < since for looked in list(simulation.watched.values())):
            self._end(self._kept.pop(simulation.request))

    def _end(self, simulation: Simulation) -> None:
        simulation.end("the simulation was ended before it was done")
        if simulation.asked is not None and simulation.request.ops <= QUICK_OPS:
            simulation.asked.stop()
        elif simulation.asked is not None:
            simulation.asked.end()


def _follow(simulation: Simulation, asked: PendingAnswer) -> None:
    try:
        for message in asked.messages():
            simulation.take(message)
        simulation.end()
    except ConsoleError as error:
        simulation.end(error.detail)


class Simulator:
    """Answers requests in the child, and keeps the plans for the newest jobs."""

    def __init__(self) -> None:
        self._planned: LRUCache[tuple[Job, float, float | None], _WantedJob] = LRUCache(MAX_PLANNED)
        for _ in run(SimulationRequest(pipelines=2, stages=2, micro_batches=2, hours=24, mtbf=12)):
            """Run a small one now, since the first one imports modules."""

    def answer(self, channel: Channel, request: SimulationRequest) -> None:
        """Sends one message per policy, and one for the sweep."""
        for message in run(request, lambda job, samples, unit: self._plan(job, samples, unit, channel.check)):
            channel.say(message)
            channel.check()

    def _plan(self, job: Job, samples: float, unit: float | None, check: Callable[[], object]) -> PlannedJob:
        planned = self._planned.get((job, samples, unit))
        if planned is None:
            planned = self._planned[job, samples, unit] = _WantedJob(_evened(job), samples=samples, unit_seconds=unit)
        planned.check = check
        return planned


@functools.cache
def simulator() -> Simulator:
    """Returns the simulator of this child process."""
    return Simulator()


def answer(channel: Channel, request: SimulationRequest) -> None:
    """Answers one request, in the child."""
    simulator().answer(channel, request)


class _WantedJob(PlannedJob):
    """A PlannedJob that calls `check` before it makes a plan, which may take a second: it raises Unwanted."""

    check: Callable[[], object]

    def rerouted(self, failures: int) -> Rate | None:
        self.check()
        return super().rerouted(failures)

    def fewer_pipelines(self, pipelines: int) -> Rate | None:
        self.check()
        return super().fewer_pipelines(pipelines)

    def with_depth(self, stages: int, workers: int) -> Rate | None:
        self.check()
        return super().with_depth(stages, workers)

    def templates(self, workers: int) -> Rate | None:
        self.check()
        return super().templates(workers)


def _planned(job: Job, samples: float, unit: float | None) -> PlannedJob:
    return PlannedJob(_evened(job), samples=samples, unit_seconds=unit)


def _evened(job: Job) -> Job:
    return job if job.speeds else evened(job, technique=Technique.STAGGERED, memory=MemoryLimit("uniform"))


def run(
    request: SimulationRequest,
    plan: Callable[[Job, float, float | None], PlannedJob] = _planned,
) -> Iterator[dict[str, Any]]:
    """Yields the messages of one simulation as soon as they are known. plan: makes the PlannedJob for (job, samples of
    an iteration, seconds of its time unit).

    Raises PlannerError, and what `plan` raises.
    """
    unknown = [name for name in request.policies if name not in POLICIES]
    if unknown or not request.policies:
        raise InputError("policies", ", ".join(unknown), "one or more of " + ", ".join(POLICIES))
    grid = request.job or request
    if grid.pipelines * grid.stages > MAX_WORKERS:
        raise InputError(
            "pipelines x stages",
            grid.pipelines * grid.stages,
            f"at most {MAX_WORKERS} workers here; `openrecycle simulate` takes more",
        )
    if request.job is not None:
        job, label = request.job.job(), "job"
    else:
        shape = model_shape(request.model)
        job, label = analytic_job(shape, request.pipelines, request.stages, request.micro_batches), request.model
    samples = request.samples or float(job.pipelines * job.micro_batches)
    planned = plan(job, samples, request.unit_seconds)
    costs = RecoveryCosts(dollars=request.dollars)
    trace = _trace(request, planned.job)
    policies, refused = [], {}
    for name in dict.fromkeys(request.policies):
        try:
            planned_policy(name, planned, costs)
        except InputError as error:
            refused[name] = error.expected
        else:
            policies.append(name)
    if not policies:
        raise InputError("policies", ", ".join(refused), next(iter(refused.values())))
    living = [(at / 3_600_000, n) for at, n in trace.counts] + [(trace.hours, trace.counts[-1][1])]
    yield {"living": living, "refused": refused}
    for name in policies:
        outcome = simulate(trace, planned_policy(name, planned, costs))
        yield {"row": outcome.document(label, price=request.dollars), "curve": curve(outcome)}
    if request.trace == DRAWN:

        def play(drawn: Trace) -> Sequence[SimulationOutcome]:
            return [simulate(drawn, planned_policy(name, planned, costs)) for name in policies]

        def rarer(mtbf: float) -> Trace | None:
            try:
                return _drawn(request, planned.workers, mtbf)
            except InputError:  # too many failures at this MTBF
                return None

        made = sweep([request.mtbf * factor for factor in SWEEP], rarer, play)
        yield {
            "mtbf": list(made.hours),
            "rates": {outcome.policy: made.rates(i) for i, outcome in enumerate(made.outcomes[0])},
            "crossings": [asdict(crossing) for crossing in made.crossings],
        }


def curve(outcome: SimulationOutcome) -> list[tuple[float, float]]:
    """Returns (hours, samples per second from then on), up to the trace's end."""
    points = [(at / HOUR, rate) for at, rate in outcome.rates]
    return [*points, (outcome.hours, points[-1][1])] if points else []


def _trace(request: SimulationRequest, job: Job) -> Trace:
    workers = job.pipelines * job.stages
    if request.trace == DRAWN:
        return _drawn(request, workers, request.mtbf)
    if request.trace == HISTORY:
        # Workers that never failed are in no row.
        return from_history(request.history, map(str, job.workers()), end=max(request.history_seconds, 1.0))
    known = public_traces()
    if request.trace not in known:
        raise InputError("trace", request.trace, "drawn or one of " + ", ".join(known))
    return scaled(known[request.trace], workers)


def _drawn(request: SimulationRequest, workers: int, mtbf: float) -> Trace:
    domains = [Domain(1, mtbf, request.repair)]
    if request.host_mtbf:
        domains.append(Domain(HOST, request.host_mtbf, request.repair))
    return generated(workers, request.hours, domains, seed=request.seed, name=f"MTBF {mtbf:g} h")


def shapes() -> list[str]:
    return list(SHAPES)


def parse_request(**values: Any) -> SimulationRequest:
    """Makes a request. Raises PlannerError with a sentence that names the field."""
    try:
        return SimulationRequest(**values)
    except ValidationError as error:
        raise first_wrong(error) from None
