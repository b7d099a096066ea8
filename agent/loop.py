"""The training loop of one worker, through failures: take up an epoch, agree, train, and again.

No failure of a peer ends this process. What interrupts an iteration is a broken transfer or the
news of another epoch; both lead to the same place: abandon the iteration in flight, wait for an
epoch that is newer than the one left, form its groups, agree on an iteration, go on. An epoch that
only adds workers interrupts nothing: all leave at the same boundary, with nothing in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from agent.assembly import assemble
from agent.boundaries import CPU, Boundaries, boundaries_of
from agent.channel import Orders, WorkerChannel
from agent.checkpoints.checkpoint import CheckpointError, load_stage
from agent.checkpoints.checkpointing import Checkpointer, CheckpointOptions
from agent.checkpoints.weights import save_weights
from agent.communicator import Communicator, Groups
from agent.devices import Platform, kind_number
from agent.executor import Executor, Interrupted
from agent.faults import FaultInjector, Kill, Slow, slowness
from agent.heartbeat import HeartbeatThread, Status
from agent.ledger import Redo, decode, encode
from agent.ledger import redo as plan_redo
from agent.optimizer import stage_optimizer
from agent.pacing import profile_pace
from agent.recipe import Recipe
from agent.recovery import Agreement, Makeup, agree, check_alike
from agent.script import Script
from agent.state import StateError
from agent.state_transfer import StateTransferError, receive_state, send_state
from agent.timeouts import Timeouts
from agent.transport.group import TransferError
from agent.validation import Verdict
from agent.verdicts import Steps
from agent.workload import Workload
from planner.job import Job, Worker

_JOINING = -1
STATE_ATTEMPTS = 3
"""A newcomer that has got so many unusable states gives up, and the job goes on without it."""


@dataclass(frozen=True)
class LoopOptions:
    """iterations: how many to commit in all. pace: seconds per op kind, {} for as fast as it goes.
    paced_by_profile: ops take as long as the job's profile says of this worker; pace is {} then.

    joins: this process replaces a dead one and takes its state from a peer of its stage.
    boundaries: what passes between stages; None: each worker finds out. weights: folder that the
    trained weights are written to, by one worker of each stage. platform: the same for all workers.
    compare_every: iterations after which a stage's workers compare a hash of their parameters; 0: never.
    """

    job: Job
    iterations: int
    seed: int
    pace: Mapping[str, float]
    kills: tuple[Kill, ...] = ()
    joins: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    boundaries: Boundaries | None = None
    weights: str | None = None
    checkpoints: CheckpointOptions | None = None
    platform: Platform = field(default_factory=Platform)
    paced_by_profile: bool = False
    slow: tuple[Slow, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)
    compare_every: int = 100


class WorkerLoop:
    """Trains one stage of one pipeline until the job is over.

    channel brings epochs and takes reports; heartbeat, where there is a console, tells it how each
    epoch was taken up. device: where the stage computes.
    """

    def __init__(
        self,
        me: Worker,
        options: LoopOptions,
        workload: Workload,
        communicator: Communicator,
        channel: WorkerChannel,
        status: Status,
        heartbeat: HeartbeatThread | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._options, self._workload = options, workload
        self._communicator, self._channel = communicator, channel
        self._status, self._heartbeat = status, heartbeat
        self._boundaries = options.boundaries
        if self._boundaries is None:
            self._boundaries = boundaries_of(
                workload, options.job.stages, options.seed, options.recipe.autocast, device
            )
        self._device = device
        self._makeup = Makeup(str(torch.__version__), torch.get_num_threads(), kind_number(device))
        self._kills, self._pace = options.kills, options.pace
        self._take_place(me, options.checkpoints)
        self._has_state = not options.joins
        if options.checkpoints is not None and options.checkpoints.resumed is not None and not options.joins:
            self._optimizer.load_state(load_stage(Path(options.checkpoints.resumed), me.stage))
        self._epoch = 0
        self._bad_states = 0
        self._corrected = False
        """Did this epoch's agreement put the last step right?"""

    def _take_place(self, me: Worker, checkpoints: CheckpointOptions | None) -> None:
        """Puts together what a worker of that place needs, with the stage's initial state."""
        options, channel = self._options, self._channel
        assert self._boundaries is not None
        self._me = me
        stage, split = assemble(
            self._workload, options.job, me.stage, options.seed, options.recipe, self._boundaries, self._device
        )
        if split.warning and me.pipeline == 0:  # its peers find the same
            channel.say("warning", text=f"stage {me.stage}: {split.text}")
        self._optimizer = stage_optimizer(self._workload, stage.module, stage.gradients, options.recipe)
        self._steps = Steps(me, options.recipe, self._optimizer, self._say_verdict)
        self._executor = Executor(
            me,
            options.job,
            options.seed,
            self._workload,
            stage,
            self._steps,
            FaultInjector(me, list(self._kills), lambda: channel.say("dying")),
            options.pace,
            self._superseded,
            self._say_committed,
            self._boundaries,
            options.recipe.keep_finished,
            self._device,
        )
        self._checkpointer: Checkpointer | None = None
        if checkpoints is not None:
            self._checkpointer = Checkpointer(
                checkpoints, me.stage, self._iterations, self._say_checkpoint, self._superseded
            )
        self._status.take_op_milliseconds = self._executor.times.take
        self._status.timeline = self._executor.timeline

    def _move(self, orders: Orders) -> None:
        """Gives up what this worker holds: for another place, or for what a checkpoint holds.

        Raises TransferError when the checkpoint can't be read.
        """
        if orders.cell != self._me:
            self._kills = ()  # wishes for faults at a place were meant for the worker that began there
            if self._heartbeat is not None:
                self._heartbeat.moved(str(orders.cell))
        checkpoints = self._options.checkpoints
        if orders.restore is None:
            self._take_place(orders.cell, checkpoints)
            self._has_state = False
            return
        try:
            state = load_stage(Path(orders.restore), orders.cell.stage)
        except CheckpointError as error:
            raise TransferError(str(error)) from None
        if checkpoints is not None:
            checkpoints = replace(checkpoints, resumed=orders.restore, resumed_at=int(state.document["committed"]))
        self._take_place(orders.cell, checkpoints)
        self._optimizer.load_state(state)
        self._has_state = True

    def run(self) -> None:
        """Returns when the launcher says that the job is over."""
        while not self._channel.over:
            self._status.phase = "waiting"
            orders = self._channel.wait_for_epoch(self._epoch)
            if orders is None:
                return
            self._channel.take_up(orders.epoch)
            if str(orders.cell) not in orders.deployment.living:
                # It was asked to leave, and has: the launcher ends it when nobody needs it any more.
                self._epoch, self._status.phase = orders.epoch, "draining"
                self._channel.wait_for_epoch(self._epoch)
                continue
            whole = True
            try:
                self._live_through(orders)
            except (Interrupted, TransferError) as end:
                if isinstance(end, TransferError) and not self._superseded():
                    self._say_broken(str(end))
                self._executor.abandon()
                self._communicator.abandon()
                whole = False
            self._channel.say("left", epoch=self._epoch, whole=whole)

    def _live_through(self, orders: Orders) -> None:
        """One epoch, until it is superseded, broken or over; returns when it was left at a boundary,
        with its groups still up."""
        self._epoch = self._status.epoch = orders.epoch
        self._acknowledge("adopted", self._optimizer.committed)
        self._status.phase = "forming"
        if orders.cell != self._me or orders.restore is not None:
            self._move(orders)
        living = [Worker.parse(name) for name in orders.deployment.living]
        if self._options.paced_by_profile:
            self._pace = profile_pace(self._options.job, self._me, living)
            self._executor.set_pace(self._pace)
        groups = self._communicator.form(
            orders.epoch, self._me, living, orders.store, self._device, at_boundary=orders.after is not None
        )
        agreement = self._agree(groups, living)
        redo = self._compare_finished(groups, agreement)
        self._channel.say("formed", epoch=orders.epoch, iteration=agreement.iteration)
        self._acknowledge("formed", agreement.iteration)
        script = Script.of(orders.plan.schedule(), self._me)
        self._executor.timeline.epoch = orders.epoch
        self._status.phase = "training"
        while (iteration := self._optimizer.committed) < self._iterations:
            self._status.iteration = iteration
            if self._options.slow:
                factor = slowness(self._me, iteration, self._options.slow)
                self._executor.set_pace({kind: factor * seconds for kind, seconds in self._pace.items()})
            self._compare(living)
            self._checkpoint(living)
            if not self._channel.may_begin(orders.epoch, iteration):
                self._executor.settle()
                return
            if iteration >= self._iterations:
                break  # the job was told to end while it was held here
            self._executor.run(iteration, script, groups, redo)
            redo = None
            if iteration == agreement.iteration:
                self._acknowledge("resumed", iteration)
        self._steps.settle()
        self._checkpoint(living)
        # Others may still be at work, and a death among them may need this worker once more.
        self._status.phase = "draining"
        if self._options.weights is not None and self._me == min(w for w in living if w.stage == self._me.stage):
            save_weights(self._options.weights, self._me.stage, self._optimizer.module)
        self._channel.say("done", epoch=orders.epoch, sha256=self._optimizer.parameters_sha256())
        self._channel.wait_for_epoch(orders.epoch)
        if self._superseded():
            raise Interrupted

    def _agree(self, groups: Groups, living: list[Worker]) -> Agreement:
        """Compares what everybody has, and takes up what follows: rolls back, settles the last step
        where it is in doubt, sends or receives state. Raises NoAgreementError."""
        committed = self._optimizer.committed if self._has_state else _JOINING
        alike = self._makeup.numbers()
        rows = groups.gather_rows((committed, *alike, *self._steps.numbers()))
        check_alike({w: row[1 : 1 + len(alike)] for w, row in rows.items()})
        agreement = agree({w: None if row[0] == _JOINING else row[0] for w, row in rows.items()}, attempt=self._epoch)
        if self._me in agreement.roll_back:
            self._optimizer.roll_back()
        holders = {w: (row[0], *row[1 + len(alike) :]) for w, row in rows.items() if row[0] != _JOINING}
        self._corrected = self._steps.begin(groups, living, agreement.iteration, holders)
        for newcomer, source in sorted(agreement.state_from.items()):
            if source == self._me:
                send_state(groups, self._optimizer, newcomer)
            elif newcomer == self._me:
                self._receive_state(groups, source)
        return agreement

    def _receive_state(self, groups: Groups, source: Worker) -> None:
        """Raises StateTransferError, for which the next agreement names another peer; StateError when
        that has been of no use either."""
        try:
            receive_state(groups, self._optimizer, source)
        except StateTransferError as error:
            self._bad_states += 1
            if self._bad_states >= STATE_ATTEMPTS:
                raise StateError(f"{error}; that was attempt {self._bad_states}") from None
            raise
        self._bad_states = 0
        self._has_state = True

    def _compare_finished(self, groups: Groups, agreement: Agreement) -> Redo | None:
        """What is left of the iteration agreed on; None: all of it."""
        if not self._options.recipe.keep_finished:
            return None
        if agreement.roll_back or self._corrected:
            # What was summed here is of another iteration, or of parameters that nobody has any more.
            self._executor.forget_finished()
        if agreement.roll_back:
            return None
        job = self._options.job
        rows = groups.gather_rows(encode(self._executor.finished, job))
        left = plan_redo({w: decode(row, job) for w, row in rows.items()}, job, self._me.stage)
        run, kept = len(left.run), len(self._executor.finished)
        self._channel.say("redo", epoch=self._epoch, iteration=agreement.iteration, run=run, kept=kept)
        return left

    @property
    def _iterations(self) -> int:
        """How many there are in all, as far as is known."""
        last = self._channel.last
        return self._options.iterations if last is None else last

    def _superseded(self) -> bool:
        return self._channel.superseded(self._epoch)

    def _say_committed(self, iteration: int, loss: float) -> None:
        per_pipeline = self._options.job.micro_batches
        skipped = [pipeline * per_pipeline + number for pipeline, number in self._optimizer.skipped]
        self._channel.say("committed", epoch=self._epoch, iteration=iteration, loss=loss.hex(), skipped=skipped)

    def _checkpoint(self, living: list[Worker]) -> None:
        """At an iteration's boundary; after the last one, waits until everything is written."""
        if self._checkpointer is not None:
            writes = self._me == min(w for w in living if w.stage == self._me.stage)
            last = self._optimizer.committed == self._iterations
            self._checkpointer.boundary(self._optimizer, self._epoch, writes=writes, last=last)
            if last:
                self._checkpointer.finish()

    def _compare(self, living: list[Worker]) -> None:
        """At an iteration's boundary, now and then and with each checkpoint: says what this worker's parameters
        are, for the launcher to compare with those of its peers. At the end of the job `done` says it."""
        committed, every = self._optimizer.committed, self._options.compare_every
        due = bool(every) and committed % every == 0
        if self._checkpointer is not None:
            due = due or self._checkpointer.due(committed)
        if due and committed and sum(w.stage == self._me.stage for w in living) > 1:
            settled, sha256 = self._optimizer.settled, self._optimizer.parameters_sha256()
            self._channel.say("parameters", epoch=self._epoch, iteration=committed, settled=settled, sha256=sha256)

    def _say_checkpoint(self, iteration: int, problem: str | None) -> None:
        self._channel.say("checkpoint", at_iteration=iteration, problem=problem)

    def _say_verdict(self, iteration: int, verdict: Verdict, redone: bool) -> None:
        self._channel.say("verdict", iteration=iteration, coefficient=verdict.coefficient, redone=redone)

    def _acknowledge(self, state: str, iteration: int) -> None:
        if self._heartbeat is not None:
            self._heartbeat.acknowledge(self._epoch, state, iteration)

    def _say_broken(self, detail: str) -> None:
        self._channel.say("broken", epoch=self._epoch, detail=detail)
        if self._heartbeat is not None:
            self._heartbeat.report_broken(self._epoch, detail)
