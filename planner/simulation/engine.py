"""The engine: plays one policy against one trace.

Events are those of the trace, a worker's getting ready, the end of a pause, and an iteration's end
where the policy has asked for it. What lies between is counted by division, so the run time grows
with the number of events and not with the number of iterations.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from openrecycle.planner.simulation.outcome import SimulationOutcome
from openrecycle.planner.simulation.policy_base import (
    MILLISECOND,
    Cluster,
    KeepTraining,
    MembershipChange,
    Pace,
    Policy,
    Reaction,
    Stop,
)
from openrecycle.planner.simulation.trace import Trace

ADD, REMOVE, READY, RESUME = 1, 2, 3, 4


@dataclass(order=True)
class _Event:
    """Compared by time and kind alone, as the seeds' simulators do: see `_Run.play`."""

    time: int
    kind: int
    worker: str = field(compare=False)


def simulate(trace: Trace, policy: Policy, *, ready_after: int = 0) -> SimulationOutcome:
    """One run. ready_after: microseconds from a worker's arrival until it can train.

    What happens at the trace's end or later is not played, and an iteration that ends exactly then
    does not count.
    """
    return _Run(trace, policy, ready_after).play()


class _Run:
    def __init__(self, trace: Trace, policy: Policy, ready_after: int) -> None:
        self.trace = trace
        self.policy = policy
        self.ready_after = ready_after
        self.end = trace.end * MILLISECOND
        self.cluster = Cluster()
        self.heap: list[_Event] = []
        self.pace: Pace | None = None
        self.at = 0  # where the present iteration, checkpoint or standstill began
        self.in_flight_end: int | None = None  # of the iteration in flight, where it is not at + pace.iteration
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
        """The trace's events go through a binary heap in the order of the file, and a job at a standstill
        sees them one by one.

        Which of several workers that come at once is first is then what the published simulators
        make of it; Bamboo's pipelines depend on it.
        """
        for event in self.trace.events:
            self._push(event.time * MILLISECOND, ADD if event.action == "add" else REMOVE, event.worker)
        heapq.heapify(self.heap)  # not idle: it turns events of one time round
        while True:
            now = min(self.heap[0].time, self.end) if self.heap else self.end
            self._advance(now)
            if self.heap and self.heap[0].time < now:
                continue  # an iteration's end has begun a pause, which ends before
            if now == self.end:
                break
            change = self._pop(now)
            if change.lost or change.ready:
                training, paused = self._in_flight(), self.paused is not None
                self._apply(self.policy.changed(self.cluster, change, training=training, paused=paused), now)
        self.worker_time += self.cluster.living * (self.end - self.seen)
        self.worker_time += self.policy.extra_workers * self.end
        self._save()
        return self._outcome()

    def _push(self, time: int, kind: int, worker: str = "") -> None:
        heapq.heappush(self.heap, _Event(time, kind, worker))

    def _pop(self, now: int) -> MembershipChange:
        """Everything that happens now; at a standstill no more than one worker's getting ready."""
        self.worker_time += self.cluster.living * (now - self.seen)
        self.seen = self.cluster.now = now
        lost: list[str] = []
        ready: list[str] = []
        while self.heap and self.heap[0].time == now:
            if self.heap[0].kind == RESUME and (lost or ready):
                break  # the policy hears of them first
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
        """Every iteration and checkpoint that ends before `until`."""
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
                self._apply(self.policy.boundary(self.cluster), now)
            elif not self._iterate(self.pace, until):
                return

    def _iterate(self, pace: Pace, until: int) -> bool:
        """Some iterations, or the end of a checkpoint, before `until`. False: nothing more ends before it."""
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
        """The iteration in flight ends, and so many in all."""
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
        """What was done so far can no longer be lost."""
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

    def _in_flight(self) -> bool:
        return self.pace is not None

    # -- reactions -----------------------------------------------------------------------------

    def _apply(self, reaction: Reaction, now: int) -> None:
        if isinstance(reaction, Stop):
            self._stop(reaction, now)
        elif self._in_flight():
            self._keep(reaction, now)

    def _stop(self, stop: Stop, now: int) -> None:
        if self._in_flight() and self.saving is None:
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
