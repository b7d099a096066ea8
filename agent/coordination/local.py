"""Coordination in a launcher without a console: the console's state machine, driven by what the launcher sees itself.

The launcher sees its workers' processes end, so no silence is judged here (agent.monitoring.liveness does that). Nobody
is asked for a choice, and plans come from a catalog at once. A plan that was made while survivors waited is checked in
a thread beside the training, once they form. A plan that was made ahead has been checked already.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from openrecycle.agent.coordination import coordinator
from openrecycle.agent.coordination.generations import deployment_of, may_pass, out, why_not, worth_moving
from openrecycle.agent.coordination.launcher import (
    Coordination,
    Deploy,
    Failure,
    Halt,
    LauncherWarning,
    Step,
    restore_point,
)
from openrecycle.agent.coordination.launcher import Event as Order
from openrecycle.agent.coordination.membership import (
    AckState,
    Event,
    Exited,
    FailureTimeouts,
    Generation,
    GenerationAcknowledged,
    IterationsCommitted,
    LayersMoved,
    LeadChanged,
    Note,
    OpenGeneration,
    OpRaised,
    PlanReady,
    PlanRefused,
    Refuse,
    State,
    StateLost,
    Tick,
    TransferBroken,
    UsePlan,
    WorkerRegistered,
    all_were_spare,
)
from openrecycle.agent.messages.protocol import Iteration, Recovery, Relayout, ValidationReport
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.check import checked
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import MayMove, Worker
from openrecycle.planner.layers.migration import best_migrations
from openrecycle.planner.layers.partition import Layout, lay_out
from openrecycle.planner.layers.room import LayerRoom
from openrecycle.planner.plans.plan import Plan

_STATE = TypeAdapter(State)


Checkpoint = Callable[[], "str | Halt"]


def in_thread(find: Checkpoint) -> Future[str | Halt]:
    """Looks for the checkpoint in a daemon thread of its own. In the pool that makes plans it might wait long behind a
    plan, and the end of the program would wait for it."""
    found = Future[str | Halt]()
    threading.Thread(target=lambda: found.set_result(find()), name="checkpoint", daemon=True).start()
    return found


class LocalCoordination(Coordination):
    """Decides on generations in the launcher, for a job without a console. It reads no clock: `poll` is given the time.

    catalog: makes the plans. grace: seconds that a broken transfer waits for the exit that explains it, before a link
    is blamed (agent.coordination.blame) and all form anew. migrate: move a failure to another stage whenever that makes
    the plan shorter; a worker moves to a stage without living workers in any case. back_to: as in State. checkpoint:
    returns the checkpoint to go back to. It is called by way of `beside`, since the newest checkpoint is read whole and
    hashed. relayout: whether layers may change their stage. room: the memory that workers have for layers that move;
    None: there is enough. iterations: those of the job; with few of them left, moving layers is not worth it.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        grace: float = FailureTimeouts.transfer_grace,
        migrate: bool = False,
        back_to: str = "",
        checkpoint: Callable[[], str | None] = lambda: None,
        beside: Callable[[Checkpoint], Future[str | Halt]] = in_thread,
        relayout: MayMove = "never",
        room: LayerRoom | None = None,
        iterations: int = sys.maxsize,
    ) -> None:
        job = catalog.job
        self._relayout, self._room, self._iterations = relayout, room, iterations
        self._hosts = dict[str, str]()
        """The host of each process, by its incarnation."""
        self._no_room = set[str]()
        """The warnings already given of partitions that do not fit into memory."""
        self._find_beside = beside
        self._restoring: tuple[Generation, Future[str | Halt]] | None = None
        """The newest generation, which waits for the checkpoint that it goes back to; None: no generation waits."""
        self._beside = ThreadPoolExecutor(1, "planning")
        self._unchecked: list[Plan] = []
        self._checks: list[Future[Plan]] = []
        self._layout: tuple[int, Future[Layout]] | None = None
        """The generation for which a better partition is looked for, and the result to come."""
        self._looked_at = self._ready_for = 0
        """The newest generations for which a partition was looked for, and plans were made ahead."""
        self._iteration_seconds = 0.0
        self._catalog, self._migrate, self._checkpoint = catalog, migrate, checkpoint
        self._failure_timeouts = FailureTimeouts(transfer_grace=grace)
        # The launcher knows when all iterations are committed, and needs every worker until then. So the state machine
        # gets a number of iterations that is never reached.
        self._state = State.new(job.pipelines, job.stages, sys.maxsize, back_to=back_to, partition=job.partition)
        self._now = 0.0
        self._planned: tuple[Plan, str] | None = None
        """The newest plan that was made, and where it is from, in words."""
        self._orders: list[Order] = []

    # -- Coordination -------------------------------------------------------------------------

    def ready(
        self,
        worker: Worker,
        incarnation: str,
        host: str = "",
        pids: Sequence[int] = (),
        made_of: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._hosts[incarnation] = host
        of_spares = all_were_spare(pids, made_of)
        if refusal := self._take(WorkerRegistered(str(worker), incarnation, reports=False, of_spares=of_spares)):
            self._orders.append(LauncherWarning(refusal.detail, worker))

    def acknowledged(
        self,
        state: Step,
        worker: Worker,
        incarnation: str,
        generation: int,
        iteration: int = 0,
    ) -> None:
        # A worker says that it has formed once it has all of its state. Without a console that counts as "resumed":
        # there is no need to wait longer, since a worker that comes back is let in after an iteration that all finish.
        if state == "resumed":
            return
        step: AckState = "adopted" if state == "adopted" else "resumed"
        self._take(GenerationAcknowledged(str(worker), incarnation, generation, step))
        if state == "formed":
            self._check_beside()
            self._make_ready()
            self._look_for_layout()

    def failed(self, failure: Failure) -> None:
        cause, worker, incarnation, generation, detail, peer, _, now = failure
        self._now = self._now if now is None else now
        name = str(worker)
        match cause:
            case "exit":
                self._take(Exited(name, incarnation, "launcher", detail))
                if self._state.current is None:
                    self._orders.append(Halt(f"{worker} {detail} before training began", lacks=worker))
            case "transfer":
                self._take(TransferBroken(name, incarnation, peer or name, generation, detail))
            case "exception":
                self._take(OpRaised(name, incarnation, generation, detail))
            case "state-lost":
                self._take(StateLost(name, incarnation, generation, detail))

    def committed(self, iterations: Iterable[Iteration]) -> None:
        iterations = list(iterations)
        if iterations:
            self._iteration_seconds = iterations[-1].seconds or self._iteration_seconds
        self._take(IterationsCommitted(max((i.iteration + 1 for i in iterations), default=0)))

    def report(self, message: Relayout | Recovery | ValidationReport) -> None:
        if isinstance(message, Relayout):
            self._take(LayersMoved(message.generation, message.iteration, message.partition, problem=message.problem))
            self._look_for_layout()

    def saved(self) -> dict[str, Any]:
        return {"state": _STATE.dump_python(self._state, mode="json"), "hosts": self._hosts}

    def restore(self, document: Mapping[str, Any]) -> None:
        """Goes on from what another launcher has `saved`. Raises ValueError for a document that is not of that form."""
        self._state = _STATE.validate_python(document["state"])
        self._hosts = dict(document["hosts"])
        if self._state.halted and not self.stands:  # the other one was lost before it could end the job
            self._orders.append(Halt(self._state.halted))

    def lead_changed(self, lost: Mapping[Worker, str], detail: str, now: float) -> None:
        self._now = now
        self._take(LeadChanged({str(worker): incarnation for worker, incarnation in lost.items()}, detail))

    @property
    def stands(self) -> str:
        return self._state.halted if may_pass(self._state) else ""

    @property
    def looks(self) -> bool:
        """Whether a better partition of the layers is being looked for."""
        return self._layout is not None

    def poll(self, now: float) -> list[Order]:
        self._now = now
        self._take(Tick())
        # Only now, so that workers that the launcher has found dead in one turn are gone in one generation.
        if (pending := self._state.pending) is not None:
            self._take(self._plan(pending.failed, pending.partition))
        self._take_layout()
        self._take_checks()
        self._deploy_restored()
        orders, self._orders = self._orders, []
        return orders

    def close(self, hurried: Callable[[], bool]) -> None:
        self._beside.shutdown(wait=False, cancel_futures=True)

    # -- layers -------------------------------------------------------------------------------

    def _look_for_layout(self) -> None:
        """Starts to look for a better partition of the layers for the living workers, in a thread, once all train."""
        state, job = self._state, self._catalog.job
        lost = out(state)
        if self._relayout == "never" or not job.layers or lost is None or self._layout:
            return
        if state.generation == self._looked_at:
            return
        self._looked_at = state.generation
        technique, memory = self._catalog.technique, self._catalog.memory
        find = partial(lay_out, job, frozenset(map(Worker.parse, lost)))
        room = self._room and self._room.with_hosts(state.hosts(self._hosts))
        found = self._beside.submit(find, technique=technique, memory=memory, present=state.held, room=room)
        self._layout = state.generation, found

    def _take_layout(self) -> None:
        if self._layout is None or not self._layout[1].done():
            return
        (generation, found), self._layout = self._layout, None
        failed, held = out(self._state), self._state.held
        if failed is None or generation != self._state.generation:
            self._look_for_layout()  # the membership has changed since, so the result says nothing
            return
        try:
            layout = found.result()
            partition = layout.partition
            if layout.refused and layout.refused not in self._no_room:
                self._no_room.add(layout.refused)
                self._orders.append(LauncherWarning(layout.refused))
            if partition in (held, self._state.unmovable):
                return
            lost = frozenset(map(Worker.parse, failed))
            catalog = self._catalog.at(partition)
            made_now = not catalog.has(lost)
            plan, _ = catalog.plan_for(lost)
            if made_now:
                checked(plan)
            now, _ = self._catalog.at(held).plan_for(lost)
        except PlannerError:
            return
        left = self._iterations - self._state.committed
        better, reason = worth_moving(now.metrics.period, plan.metrics.period, self._iteration_seconds, left)
        # With one iteration left, it would be over before the layers have moved.
        if left <= 1 or not (better or self._relayout == "always"):
            return
        self._planned = plan, "made now"
        self._take(UsePlan(plan.fingerprint, failed, "", reason, partition))

    # -- the machine --------------------------------------------------------------------------

    def _take(self, event: Event) -> Refuse | None:
        """Steps the state machine by one event. The plan that is needed then, and what the launcher has to do, wait
        for `poll`."""
        before, step = self._state, coordinator.step(self._state, event, self._now, self._failure_timeouts)
        self._state = step.state
        if step.state.halted != before.halted and step.state.halted and not self.stands:
            self._orders.append(Halt(step.state.halted))
        for decision in step.decisions:
            match decision:
                case OpenGeneration():
                    self._open(decision.generation)
                case Note(severity="warning", kind="generation"):
                    self._orders.append(LauncherWarning(f"generation {before.generation}: {decision.text}"))
        return step.refusal

    def _plan(self, failed: tuple[str, ...], partition: tuple[int, ...]) -> PlanReady | PlanRefused:
        try:
            moves = self._moves(failed)
            empty = {*failed, *(source for source, _ in moves)} - {to for _, to in moves}
            catalog, lost = self._catalog.at(partition), frozenset(map(Worker.parse, empty))
            made_now = not catalog.has(lost)
            self._planned = plan, origin = catalog.plan_for(lost)
        except PlannerError as error:
            return PlanRefused(failed, str(error))
        if made_now:
            self._unchecked.append(plan)
        return PlanReady(failed, plan.fingerprint, origin, moves)

    def _check_beside(self) -> None:
        self._checks += [self._beside.submit(checked, plan) for plan in self._unchecked]
        self._unchecked.clear()

    def _make_ready(self) -> None:
        """Prepares, in a thread and once all train, what workers are to be sent when another one dies."""
        lost = out(self._state)
        if lost is not None and self._state.generation != self._ready_for:
            self._ready_for = self._state.generation
            catalog = self._catalog.at(self._state.held)
            self._beside.submit(catalog.make_ready, frozenset(map(Worker.parse, lost)))

    def _take_checks(self) -> None:
        for check in [check for check in self._checks if check.done()]:
            self._checks.remove(check)
            try:
                check.result()
            except PlannerError as error:  # a fault of the planner: the plan must not be used
                self._orders.append(Halt(str(error)))

    def _moves(self, failed: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        """Returns (from, to) of workers that change their stage, which makes the plan shorter."""
        if not (self._migrate and failed):
            return ()
        catalog = self._catalog
        lost = map(Worker.parse, failed)
        best = best_migrations(catalog.job, lost, technique=catalog.technique, memory=catalog.memory)
        moves = tuple((str(m.worker), str(m.takes)) for m in best.migrations)
        return () if why_not(self._state, moves) else moves

    def _open(self, generation: Generation) -> None:
        before, self._restoring = self._restoring, None
        if not generation.restore:
            self._deploy(generation, None)
            return
        # A search that is under way also serves a generation that opens meanwhile, since nobody has trained since.
        find = partial(restore_point, self._checkpoint, generation.reason, time.sleep)
        self._restoring = generation, before[1] if before else self._find_beside(find)
        self._deploy_restored()

    def _deploy_restored(self) -> None:
        if self._restoring is None or not self._restoring[1].done():
            return
        (generation, found), self._restoring = self._restoring, None
        if isinstance(restore := found.result(), Halt):
            self._orders.append(restore)
        else:
            self._deploy(generation, restore)

    def _deploy(self, generation: Generation, restore: str | None) -> None:
        assert self._planned is not None
        plan, origin = self._planned
        self._orders.append(Deploy(deployment_of(generation, origin=origin), plan, restore))
