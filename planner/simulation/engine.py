"""Plays one policy against one trace: the interface of a policy, the engine, and the outcome of a run.

A policy decides how a job trains with the workers it has, what it does when they change, and what that costs. Times are
whole microseconds, so that results do not depend on rounding; only costs are in seconds. The outcome has the one
definition of each of its numbers.

The engine handles events: those of the trace, a worker that gets ready, the end of a pause, and the end of an iteration
where the policy has asked for it. What lies between is counted by division, so the run time grows with the number of
events and not with the number of iterations.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise
from typing import Any, Protocol

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import named_numbers
from openrecycle.planner.simulation.traces import Trace

# -- the interface of a policy ------------------------------------------------------------------

SECOND = 1_000_000
MILLISECOND = 1_000


@dataclass(frozen=True)
class Pace:
    """The speed at which training goes on until something changes.

    iteration: microseconds of one iteration. samples: how many it trains on. checkpoint_every: iterations between two
    checkpoints, 0 for none; checkpoint: microseconds that one takes, during which nothing trains.
    """

    iteration: int
    samples: float
    checkpoint_every: int = 0
    checkpoint: int = 0

    def __post_init__(self) -> None:
        if self.iteration < 1 or self.samples < 0 or self.checkpoint_every < 0 or self.checkpoint < 0:
            raise ValueError(f"not a pace: {self}")

    @property
    def rate(self) -> float:
        """Samples per second between checkpoints."""
        return self.samples * SECOND / self.iteration


@dataclass(frozen=True)
class MembershipChange:
    """The workers that were lost and that became ready at one instant, in the order in which they did."""

    lost: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()


class Cluster:
    """The workers as a policy sees them, in the order in which they came. now: microseconds.

    ready: the workers that can train; usable: their number.
    """

    def __init__(self) -> None:
        self.now = 0
        self._living: dict[str, bool] = {}
        self.usable = 0

    @property
    def ready(self) -> list[str]:
        return [name for name, usable in self._living.items() if usable]

    @property
    def living(self) -> int:
        """Number of workers that are there and paid for, ready or not yet."""
        return len(self._living)

    def add(self, name: str) -> None:
        self._living[name] = False

    def remove(self, name: str) -> bool:
        """Removes a worker; returns whether it was ready."""
        was_ready = self._living.pop(name)
        self.usable -= was_ready
        return was_ready

    def set_ready(self, name: str) -> bool:
        """Marks a worker as ready; returns whether it is still there."""
        if name not in self._living:
            return False
        self.usable += not self._living[name]
        self._living[name] = True
        return True


@dataclass(frozen=True)
class Stop:
    """Training stops now and goes on after `pause` microseconds, at the pace that the policy then gives.

    The iteration in flight is lost, unless `grace` is set and it would have ended within the pause.
    rollback: the work since the last checkpoint is lost too. save: the pause begins with a checkpoint, so that no
    earlier work can be lost later.
    """

    pause: int
    grace: bool = False
    rollback: bool = False
    save: bool = False


@dataclass(frozen=True)
class KeepTraining:
    """Training goes on.

    stretch: the rest of the iteration in flight takes this many times longer, rounded down to milliseconds.
    pace: of the iterations after it; None: as before. ask: call `iteration_end` when it ends.
    """

    stretch: float = 1.0
    pace: Pace | None = None
    ask: bool = False


Reaction = Stop | KeepTraining


class Policy(Protocol):
    """How a job reacts to failures. There is one object per run, so it may keep state. `pace` is called whenever
    training starts or resumes.

    fault_free: samples per second with nothing failed, which goodput is measured against.
    workers: how many the job is made for; further ones stand by. extra_workers: how many are paid for
    in addition to those of the trace.
    """

    name: str
    fault_free: float
    workers: int
    extra_workers: int

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        """Called when workers came or went. training: an iteration is in flight; paused: the job is in a pause;
        neither: it waits for workers."""
        ...

    def iteration_end(self, cluster: Cluster) -> Reaction:
        """Called at the end of an iteration for which the policy has asked."""
        ...

    def pace(self, cluster: Cluster) -> Pace | None:
        """Returns the pace with these workers, from now. None: training can't go on; the job waits for workers."""
        ...


@dataclass(frozen=True)
class RecoveryCosts:
    """The costs of getting from one state of a job to the next, and of a worker.

    Seconds, unless said otherwise. The defaults are for a job of some hundred accelerators.

    detect: from a death until all workers know. recover: agreement and new process groups, with a plan made ahead.
    rejoin: until a worker that returns has its peers' state. migrate: until a worker that changes its stage has the
    state of the new one. repartition: until every worker has the layers of a new partition. restart: of all workers,
    from the last checkpoint. checkpoint: to save one; checkpoint_interval: between two. dollars: per worker and hour.
    """

    detect: float = 1.0
    recover: float = 1.0
    rejoin: float = 5.0
    migrate: float = 5.0
    repartition: float = 20.0
    restart: float = 300.0
    checkpoint: float = 30.0
    checkpoint_interval: float = 1800.0
    dollars: float = 2.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e7:
                raise InputError(f"--cost {each.name}", value, "a number from 0 to 1e7")
            if each.name == "checkpoint_interval" and not value:
                raise InputError("--cost checkpoint_interval", value, "a number of seconds above 0")

    @classmethod
    def parse(cls, text: str, *, field: str = "--cost") -> RecoveryCosts:
        """Parses `detect=1,recover=0.5,...`, any subset. Raises InputError."""
        return cls(**named_numbers(text, [f.name for f in fields(cls)], field=field))


# -- the outcome of a simulated run, and the one definition of each of its numbers --------------

HOUR = 3600 * SECOND


@dataclass(frozen=True)
class SimulationOutcome:
    """Totals of one policy on one trace. Times in microseconds.

    begin: start of the first iteration. last: end of the last completed iteration. end: of the trace.
    samples, iterations, productive: the samples and the number of the iterations whose work counts, and their time.
    lost: iterations that began and whose work was lost. worker_time: living workers x time. failures: workers lost.
    rates: (time, samples per second from then on), 0 while nothing trains.
    """

    policy: str
    trace: str
    begin: int | None
    last: int
    end: int
    samples: float
    iterations: int
    productive: int
    lost: int
    worker_time: int
    failures: int
    fault_free: float
    workers: int
    rates: tuple[tuple[int, float], ...]

    @property
    def hours(self) -> float:
        """Length of the trace in hours."""
        return self.end / HOUR

    @property
    def window(self) -> int:
        """From the first iteration's start to the last one's end; published averages are over this time."""
        return 0 if self.begin is None else max(0, self.last - self.begin)

    @property
    def average_samples_per_second(self) -> float:
        """Samples that count, over `window`."""
        return self.samples * SECOND / self.window if self.window else 0.0

    @property
    def trace_samples_per_second(self) -> float:
        """Samples that count, over the whole trace, including the time before the first and after the last
        iteration."""
        return self.samples * SECOND / self.end

    @property
    def ettr(self) -> float:
        """Time of the iterations that count / wall time from the first start to the end of the trace."""
        return 0.0 if self.begin is None else self.productive / (self.end - self.begin)

    @property
    def goodput(self) -> float:
        """As `ettr`, with each iteration weighted by its throughput / fault-free throughput."""
        if self.begin is None or not self.fault_free:
            return 0.0
        return self.samples * SECOND / (self.end - self.begin) / self.fault_free

    @property
    def worker_hours(self) -> float:
        """Hours of living workers, which have to be paid."""
        return self.worker_time / HOUR

    @property
    def worker_hours_wasted(self) -> float:
        """Worker hours beyond those that the samples take on the fault-free job. Below 0 where fewer workers do more
        each."""
        if not self.fault_free:
            return self.worker_hours
        return self.worker_hours - self.samples / self.fault_free * self.workers / 3600

    def dollars(self, per_worker_hour: float) -> float:
        return self.worker_hours * per_worker_hour

    def dollars_per_million_samples(self, per_worker_hour: float) -> float | None:
        """Dollars per million samples; None where nothing was trained."""
        return self.dollars(per_worker_hour) / self.samples * 1e6 if self.samples else None

    def document(self, model: str, *, price: float | None = None, over_time: bool = False) -> dict[str, Any]:
        """Returns the JSON object that `openrecycle simulate --json` prints. price: dollars per worker and hour.

        over_time: with the rates as well, as (hours, samples per second from then on).
        """
        out: dict[str, Any] = {
            "policy": self.policy,
            "model": model,
            "trace": self.trace,
            "average_samples_per_second": self.average_samples_per_second,
            "goodput": self.goodput,
            "ettr": self.ettr,
            "iterations_lost": self.lost,
            "failures": self.failures,
            "hours": self.hours,
            "iterations": self.iterations,
            "trace_samples_per_second": self.trace_samples_per_second,
            "fault_free_samples_per_second": self.fault_free,
            "worker_hours": self.worker_hours,
            "worker_hours_wasted": self.worker_hours_wasted,
        }
        if price is not None:
            out["dollars"] = self.dollars(price)
            out["dollars_per_million_samples"] = self.dollars_per_million_samples(price)
        if over_time:
            out["throughput_over_time"] = [[time / HOUR, rate] for time, rate in self.rates]
        return out


# -- how policies compare as failures become rarer ---------------------------------------------------


ALIKE = 0.001
"""Policies whose throughputs differ by a smaller share are as good as each other: which failures a trace has decides
which of them comes first."""


def alike(one: float, other: float) -> bool:
    """Says whether two throughputs are as good as equal."""
    return abs(one - other) <= ALIKE * max(one, other)


@dataclass(frozen=True)
class Crossing:
    """Between two MTBFs policy `after` overtakes policy `before`. hours: where their interpolated lines meet."""

    before: str
    after: str
    hours: float


@dataclass(frozen=True)
class Sweep:
    """One outcome per MTBF (hours, ascending) and policy."""

    hours: tuple[float, ...]
    outcomes: tuple[tuple[SimulationOutcome, ...], ...]

    def rates(self, policy: int) -> list[float]:
        """Samples per second over the whole trace, by MTBF."""
        return [row[policy].trace_samples_per_second for row in self.outcomes]

    @property
    def crossings(self) -> list[Crossing]:
        """The crossings of each pair of policies, by MTBF; the hours are interpolated on a logarithmic scale."""
        out = []
        names = [outcome.policy for outcome in self.outcomes[0]]
        for a in range(len(names)):
            for b in range(a + 1, len(names)):
                rates = list(zip(self.hours, self.rates(a), self.rates(b), strict=True))
                apart = {hours for hours, x, y in rates if not alike(x, y)}
                gaps = [(hours, x - y) for hours, x, y in rates if x != y]  # where they are equal, neither leads
                leads = [list(run) for _, run in groupby(gaps, key=lambda gap: gap[1] > 0)]
                # What is as good as equal all the time is no lead.
                leads = [run for run in leads if any(hours in apart for hours, _ in run)]
                for one, other in pairwise(leads):
                    (before, lead), (after, behind) = one[-1], other[0]
                    if (lead > 0) != (behind > 0):
                        share = lead / (lead - behind)
                        low, high = math.log(before), math.log(after)
                        first, second = (names[a], names[b]) if lead > 0 else (names[b], names[a])
                        out.append(Crossing(first, second, math.exp(low + share * (high - low))))
        return sorted(out, key=lambda crossing: crossing.hours)


def sweep(
    hours: Sequence[float], trace: Callable[[float], Trace | None], run: Callable[[Trace], Sequence[SimulationOutcome]]
) -> Sweep:
    """Plays all policies for each MTBF. trace(mtbf) makes the trace, or None to leave that value out; run(trace) plays
    all policies against it."""
    played = {value: tuple(run(made)) for value in sorted(set(hours)) if (made := trace(value)) is not None}
    return Sweep(tuple(played), tuple(played.values()))


ADD, REMOVE, READY, RESUME = 1, 2, 3, 4


# -- the engine ---------------------------------------------------------------------------------


@dataclass(order=True)
class _QueuedEvent:
    """Compared by time and kind alone, as in the published simulators: see `_SimulationRun.play`."""

    time: int
    kind: int
    worker: str = field(compare=False)


def simulate(trace: Trace, policy: Policy, *, ready_after: int = 0) -> SimulationOutcome:
    """Play one run. ready_after: microseconds from a worker's arrival until it can train.

    Events at the trace's end or later are left out, and an iteration that ends exactly then does not count.
    """
    return _SimulationRun(trace, policy, ready_after).play()


class _SimulationRun:
    def __init__(self, trace: Trace, policy: Policy, ready_after: int) -> None:
        self.trace = trace
        self.policy = policy
        self.ready_after = ready_after
        self.end = trace.end * MILLISECOND
        self.cluster = Cluster()
        self.heap: list[_QueuedEvent] = []
        self.pace: Pace | None = None
        self.at = 0  # where the present iteration, checkpoint or standstill began
        self.in_flight_end: int | None = None  # end of the iteration in flight, if it is not at + pace.iteration
        self.saving: int | None = None  # when the present checkpoint ends
        self.paused: int | None = None  # when the present pause ends
        self.asked = False
        self.since = 0  # iterations since the last checkpoint
        self.begin: int | None = None
        self.last = 0
        self.samples = self.unsaved_samples = 0.0
        self.iterations = self.unsaved_iterations = 0
        self.productive = self.unsaved_productive = 0
        self.lost = 0
        self.failures = 0
        self.worker_time = self.seen = 0
        self.rates: list[tuple[int, float]] = []

    def play(self) -> SimulationOutcome:
        """Plays the run. The trace's events go through a binary heap in the order of the file, and a job that waits for
        workers sees them one by one.

        This gives workers that come at the same time the same order as the published simulators do; Bamboo's pipelines
        depend on it.
        """
        for event in self.trace.events:
            self._push(event.time * MILLISECOND, ADD if event.action == "add" else REMOVE, event.worker)
        heapq.heapify(self.heap)  # needed though the events are sorted: it reorders events of the same time
        while True:
            now = min(self.heap[0].time, self.end) if self.heap else self.end
            self._advance(now)
            if self.heap and self.heap[0].time < now:
                continue  # an iteration has ended and the policy has begun a pause that ends before `now`
            if now == self.end:
                break
            change = self._pop(now)
            if change.lost or change.ready:
                training, paused = self.pace is not None, self.paused is not None
                self._apply(self.policy.changed(self.cluster, change, training=training, paused=paused), now)
        self.worker_time += self.cluster.living * (self.end - self.seen)
        self.worker_time += self.policy.extra_workers * self.end
        self._save()
        return self._outcome()

    def _push(self, time: int, kind: int, worker: str = "") -> None:
        heapq.heappush(self.heap, _QueuedEvent(time, kind, worker))

    def _pop(self, now: int) -> MembershipChange:
        """Takes all events of this instant; if the job waits for workers, no more than one that gets ready."""
        self.worker_time += self.cluster.living * (now - self.seen)
        self.seen = self.cluster.now = now
        lost: list[str] = []
        ready: list[str] = []
        while self.heap and self.heap[0].time == now:
            if self.heap[0].kind == RESUME and (lost or ready):
                break  # the policy is told of the workers first
            event = heapq.heappop(self.heap)
            if event.kind == ADD:
                self.cluster.add(event.worker)
                self._push(now + self.ready_after, READY, event.worker)
            elif event.kind == RESUME:
                if self.paused == now:
                    self._resume(now)
            elif event.kind == REMOVE:
                self.failures += 1
                if self.cluster.remove(event.worker):
                    lost.append(event.worker)
            elif self.cluster.set_ready(event.worker):
                ready.append(event.worker)
                if self.pace is None and self.paused is None:
                    break
        return MembershipChange(tuple(lost), tuple(ready))

    # -- time ----------------------------------------------------------------------------------

    def _advance(self, until: int) -> None:
        """Plays every iteration and checkpoint that ends before `until`."""
        while True:
            if self.pace is None:
                return
            if self.asked and self.saving is None:
                now = self._flight_end()
                if now >= until:
                    return
                self._complete(1)
                self.asked = False
                self.cluster.now = now
                self._apply(self.policy.iteration_end(self.cluster), now)
            elif not self._iterate(self.pace, until):
                return

    def _iterate(self, pace: Pace, until: int) -> bool:
        """Plays some iterations, or the end of a checkpoint, before `until`. Returns False if nothing more ends before
        then."""
        if self.saving is not None:
            if self.saving >= until:
                return False
            self.at, self.saving = self.saving, None
            self._save()
            return True
        if self.in_flight_end is not None:
            if self.in_flight_end >= until:
                return False
            self._complete(1)
            return True
        every = pace.checkpoint_every
        if every and not self.since:
            cycle = every * pace.iteration + pace.checkpoint
            whole = (until - 1 - self.at) // cycle
            if whole > 0:
                self.at += whole * cycle
                self.last = self.at - pace.checkpoint
                self._count(whole * every, whole * every * pace.iteration, pace)
                self._save()
        room = (until - 1 - self.at) // pace.iteration
        count = min(room, every - self.since) if every else room
        if count <= 0:
            return False
        self._complete(count)
        return True

    def _complete(self, count: int) -> None:
        """Ends the iteration in flight, and `count` - 1 further ones."""
        pace = self.pace
        assert pace is not None
        begin = self.at
        self.at = self._flight_end() + (count - 1) * pace.iteration
        self.in_flight_end = None
        self.last = self.at
        self._count(count, self.at - begin, pace)
        if pace.checkpoint_every:
            self.since += count
            if self.since >= pace.checkpoint_every:
                self.saving = self.at + pace.checkpoint
        else:
            self._save()

    def _count(self, iterations: int, time: int, pace: Pace) -> None:
        self.unsaved_iterations += iterations
        self.unsaved_productive += time
        self.unsaved_samples += iterations * pace.samples

    def _save(self) -> None:
        """Counts the work done so far as saved: it can no longer be lost."""
        self.iterations += self.unsaved_iterations
        self.productive += self.unsaved_productive
        self.samples += self.unsaved_samples
        self._forget()

    def _forget(self) -> None:
        self.unsaved_iterations = self.unsaved_productive = self.since = 0
        self.unsaved_samples = 0.0

    def _flight_end(self) -> int:
        assert self.pace is not None
        return self.at + self.pace.iteration if self.in_flight_end is None else self.in_flight_end

    # -- reactions -----------------------------------------------------------------------------

    def _apply(self, reaction: Reaction, now: int) -> None:
        if isinstance(reaction, Stop):
            self._stop(reaction, now)
        elif self.pace is not None:
            self._keep(reaction, now)

    def _stop(self, stop: Stop, now: int) -> None:
        if self.pace is not None and self.saving is None:
            ends = self._flight_end()
            if ends <= now or (stop.grace and ends < now + stop.pause):
                if ends < self.end:
                    self._complete(1)
            elif self.at < now:
                self.lost += 1
        if stop.save:
            self._save()
        if stop.rollback:
            self.lost += self.unsaved_iterations
            self._forget()
        self.pace, self.in_flight_end, self.saving, self.asked = None, None, None, False
        self.paused = now + stop.pause
        self._push(self.paused, RESUME)
        self._note(now, 0.0)

    def _keep(self, keep: KeepTraining, now: int) -> None:
        assert self.pace is not None
        self.asked = self.asked or keep.ask
        if self.saving is None:
            ends = self._flight_end()
            if keep.pace is not None or keep.stretch != 1.0:
                extra = int((ends - now) * (keep.stretch - 1)) // MILLISECOND * MILLISECOND
                self.in_flight_end = ends + extra if now > self.at else None
        if keep.pace is not None:
            self.pace = keep.pace
            self._note(now, keep.pace.rate)

    def _resume(self, now: int) -> None:
        self.paused = None
        self.pace = self.policy.pace(self.cluster)
        self.at = now
        if self.pace is None:
            return
        if self.begin is None:
            self.begin = self.last = now
        if self.pace.checkpoint_every and self.since >= self.pace.checkpoint_every:
            self.saving = now + self.pace.checkpoint
        self._note(now, self.pace.rate)

    def _note(self, now: int, rate: float) -> None:
        if self.rates and self.rates[-1][0] == now:
            self.rates.pop()
        if not self.rates or self.rates[-1][1] != rate:
            self.rates.append((now, rate))

    def _outcome(self) -> SimulationOutcome:
        return SimulationOutcome(
            policy=self.policy.name,
            trace=self.trace.name,
            begin=self.begin,
            last=self.last,
            end=self.end,
            samples=self.samples,
            iterations=self.iterations,
            productive=self.productive,
            lost=self.lost,
            worker_time=self.worker_time,
            failures=self.failures,
            fault_free=self.policy.fault_free,
            workers=self.policy.workers,
            rates=tuple(self.rates),
        )
