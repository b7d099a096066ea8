"""Feeds a coordinator one event after the other, with plans made at once unless told otherwise."""

from __future__ import annotations

from itertools import pairwise

from openrecycle.agent.coordination import coordinator
from openrecycle.agent.coordination.membership import (
    Decision,
    Event,
    Exited,
    FailureTimeouts,
    Generation,
    GenerationAcknowledged,
    HeartbeatsReceived,
    LastHeartbeat,
    Member,
    NeedPlan,
    Note,
    OpenGeneration,
    PlanReady,
    State,
    Tick,
    Transition,
    WorkerRegistered,
    back_to,
)
from openrecycle.agent.messages.protocol import WorkerState
from openrecycle.app.jobs.states import Arrival, Condition, ProcessState, WorkerStates, follow, sentence

FAILURE_TIMEOUTS = FailureTimeouts(heartbeat=1, suspect=5, dead=20, transfer_grace=2)


class Run:
    """plans: answer a NeedPlan at once. log: every event with its time, to be replayed. held: by generation, which
    process was where when it opened, and which were in the job."""

    def __init__(
        self,
        pipelines: int = 2,
        stages: int = 2,
        *,
        iterations: int = 100,
        plans: bool = True,
        checkpoints: bool = False,
        own_loop: bool = False,
        partition: tuple[int, ...] = (),
    ) -> None:
        returns = back_to(checkpoints, 0)
        self.state = State.new(pipelines, stages, iterations, back_to=returns, own_loop=own_loop, partition=partition)
        self.now = 100.0
        self.plans = plans
        self.log: list[tuple[Event, float]] = []
        self.opened: list[Generation] = []
        self.held: list[tuple[dict[str, str | None], set[str | None]]] = []
        self.notes: list[Note] = []
        self.wanted: list[tuple[str, ...]] = []
        self.count = 0
        self.processes: dict[str, ProcessState] = {}

    @property
    def names(self) -> list[str]:
        return list(self.state.members)

    def member(self, name: str) -> Member:
        return self.state.members[name]

    def send(self, event: Event) -> Transition:
        self.log.append((event, self.now))
        step = coordinator.step(self.state, event, self.now, FAILURE_TIMEOUTS)
        came = {}
        if isinstance(event, WorkerRegistered):
            came[event.incarnation] = Arrival("node1", len(self.processes) + 1)
        self.processes |= follow(self.processes, [self.state, step.state], came, self.now)
        self.state = step.state
        for decision in step.decisions:
            self._take(decision)
        return step

    def _take(self, decision: Decision) -> None:
        if isinstance(decision, OpenGeneration):
            self.opened.append(decision.generation)
            members = self.state.members
            there = {m.incarnation for m in members.values() if m.state is not WorkerState.FAILED}
            self.held.append(({name: members[name].incarnation for name in decision.generation.living}, there))
        elif isinstance(decision, Note):
            self.notes.append(decision)
        elif isinstance(decision, NeedPlan):
            self.wanted.append(decision.failed)
            if self.plans:
                self.send(PlanReady(decision.failed, fingerprint(decision.failed), "made"))

    def start(self) -> Run:
        """Every worker registers; generation 1 opens and all resume."""
        for name in self.names:
            self.send(WorkerRegistered(name, f"{name}-1"))
        self.resume()
        return self

    def resume(self, *names: str) -> None:
        current = self.state.current
        assert current is not None
        for name in names or current.living:
            for state in ("adopted", "formed", "resumed"):
                incarnation = self.member(name).incarnation or ""
                self.send(GenerationAcknowledged(name, incarnation, current.number, state))  # type: ignore[arg-type]

    def exit(self, name: str) -> Transition:
        return self.send(Exited(name, self.member(name).incarnation or "never", "launcher", "was killed by SIGKILL"))

    def close(self, name: str) -> Transition:
        return self.send(Exited(name, self.member(name).incarnation or "never", name, "closed", done=True))

    def back(self, name: str) -> Transition:
        self.count += 1
        return self.send(WorkerRegistered(name, f"{name}-again{self.count}"))

    def beat(self, *names: str, draining: bool = False) -> Transition:
        beats = {n: LastHeartbeat(self.member(n).incarnation or "", self.now, draining) for n in names or self.names}
        return self.send(HeartbeatsReceived(beats))

    def wait(self, seconds: float, *heard: str) -> Transition:
        """Time goes by in steps of a second; `heard` go on sending heartbeats."""
        step = Transition(self.state)
        for _ in range(int(seconds)):
            self.now += 1
            if heard:
                self.beat(*heard)
            step = self.send(Tick())
        return step

    def lost(self) -> list[set[str]]:
        """By generation but the first: whose place in the one before was held by a process that was gone when it
        opened, but for those that were let go."""
        out = []
        for ((held, _), (_, there)), generation in zip(pairwise(self.held), self.opened[1:], strict=True):
            let_go = {worker for worker, _ in generation.let_go}
            out.append({name for name, process in held.items() if process not in there} - let_go)
        return out

    def condition(self) -> Condition:
        return WorkerStates(self.state, self.processes).condition

    def sentence(self) -> str:
        return sentence(WorkerStates(self.state, self.processes), self.now, FAILURE_TIMEOUTS)


def fingerprint(failed: tuple[str, ...]) -> str:
    return "plan-" + "-".join(failed)
