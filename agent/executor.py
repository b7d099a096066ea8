"""Runs one worker's ops of one iteration, in the order of the plan.

The order is all that counts: each op waits for its inputs, so times in the plan are a forecast and
not a clock. An order that a valid schedule has can't deadlock: see agent.transport.transfers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from openrecycle.agent.communicator import Groups
from openrecycle.agent.devices import completion, on_device
from openrecycle.agent.faults import FaultInjector
from openrecycle.agent.kept_micro_batches import Redo
from openrecycle.agent.liveness import AT_REST, DATA, LEAVING, VALIDATION, WAITING, OpProgress
from openrecycle.agent.op_times import OpSeconds
from openrecycle.agent.pacing import PacedDevice
from openrecycle.agent.randomness import seed_for
from openrecycle.agent.relayout import Exchange
from openrecycle.agent.script import Script
from openrecycle.agent.stage import MicroBatch, Stage
from openrecycle.agent.stage_io import CPU, Gradients, StageIO, StageOutput, check_output
from openrecycle.agent.tied import TiedSums
from openrecycle.agent.timeline import Timeline
from openrecycle.agent.transport.group import TransferError
from openrecycle.agent.transport.transfers import TransferLayout, Transfers
from openrecycle.agent.validation_exchange import Steps
from openrecycle.agent.workload import Workload
from openrecycle.planner.job import Job, Worker


class OpError(Exception):
    """The workload's own code raised in an op of a micro-batch; `__cause__` is what it raised."""

    def __init__(self, kind: str, iteration: int, key: MicroBatch) -> None:
        super().__init__(kind, iteration, key)
        self.kind, self.iteration, self.key = kind, iteration, key


class Interrupted(Exception):
    """A newer generation has been announced: the iteration in flight is abandoned."""


class Executor:
    """One worker's engine: a table from op kind to method, and a short loop.

    pace: seconds an op of each kind is stretched to (see agent.pacing). interrupted: asked before
    every op. committed: called with (iteration, loss) right after a step, before anything that can
    fail; the loss is 0 but on the last stage. keeps_finished: `abandon` keeps whole micro-batches. progress: is told
    what this thread is at. incomplete: does this worker still take its state from a peer?
    """

    def __init__(
        self,
        me: Worker,
        job: Job,
        seed: int,
        workload: Workload,
        stage: Stage,
        steps: Steps,
        faults: FaultInjector,
        pace: Mapping[str, float],
        interrupted: Callable[[], bool],
        committed: Callable[[int, float], None],
        stage_io: StageIO,
        keeps_finished: bool = False,
        device: torch.device = CPU,
        progress: OpProgress | None = None,
        incomplete: Callable[[], bool] = lambda: False,
    ) -> None:
        self._progress = progress or OpProgress()
        self.times = OpSeconds()
        self.timeline = Timeline()
        self._me, self._job, self._seed = me, job, seed
        self._workload, self._stage, self._steps = workload, stage, steps
        self._faults, self._device, self._interrupted = faults, PacedDevice(pace), interrupted
        self._committed = committed
        self._last = me.stage == job.stages - 1
        self._where, self._complete = device, completion(device)
        self._connect_to(stage_io)
        self.exchange: Exchange | None = None
        """Of the sums of layers that move to another stage."""
        self.tied: TiedSums | None = None
        self._run = {"F": self._forward, "I": self._input_backward, "W": self._weight_backward, "B": self._backward}
        self._iteration = 0
        self.left_out: frozenset[MicroBatch] = frozenset()
        self._share = 1.0
        self._groups: Groups | None = None
        self._transfers: Transfers
        self._reduction = float("inf")
        self._void = self._reducing = False
        self._keeps_finished = keeps_finished
        self._incomplete = incomplete

    @property
    def finished(self) -> frozenset[MicroBatch]:
        """Micro-batches of the iteration in flight that this worker's sum holds."""
        return frozenset(self._stage.gradients.settled)

    def run(
        self,
        iteration: int,
        script: Script,
        groups: Groups,
        redo: Redo | None = None,
        left_out: frozenset[MicroBatch] = frozenset(),
    ) -> None:
        """One iteration, its step included; or none, where the step before turns out to be wrong.

        redo: what is left of it to be done; None: all of it. left_out: micro-batches that nobody runs; the mean is
        over the others.

        Then every worker gets to know it before its own step of this iteration, the step before has
        been put right when this returns, and the iteration is to be run again. Until then messages
        already under way, and those that others still wait for, are passed on without computing.

        Raises Interrupted, TransferError or OpError; `abandon` must follow then. The step may have been
        taken nevertheless.
        """
        if groups is not self._groups:
            self._transfers = groups.transfers(self._layout)
            self._reduction = float("inf")
            self._device.waited()
        self._stage.counted_elsewhere = frozenset()
        if redo is not None:
            script = script.only(redo.run)
            self._stage.counted_elsewhere = redo.counted - self.finished
        script, self.left_out = script.without(left_out), left_out
        self._share = 1.0 / max(1, self._job.pipelines * self._job.micro_batches - len(left_out))
        self._iteration, self._groups, self._script = iteration, groups, script
        self._reducing = False
        self._void = False
        self.timeline.begin(iteration, 0 if redo or left_out else len(script.ops))
        self._transfers.begin(iteration, script)
        for op in script.ops:
            if self._interrupted():
                raise Interrupted
            self._progress.at(VALIDATION)
            self._void = self._void or self._steps.overturned() or (op.kind == "O" and self._steps.settle())
            if self._void:
                self._pass_on(op.kind, (op.pipeline, op.micro_batch))
            elif op.kind == "O":
                self._step()
            else:
                self._run_op(op.kind, (op.pipeline, op.micro_batch))
        if self._void:
            self._stage.abandon()
            self.timeline.drop()
        self.timeline.finish(script.ops)
        # What went out an iteration ago has been received by now: its receiver has answered since.
        self._progress.at(WAITING)
        self._transfers.let_go(iteration)
        self._progress.at(AT_REST)
        self._progress.warmed_up()

    def rearrange(self, stage: Stage, stage_io: StageIO) -> None:
        """Between two iterations, with everything settled: the worker's stage has other layers from here on."""
        self._stage, self.exchange = stage, None
        self._connect_to(stage_io)
        if self._groups is not None:
            self._transfers = self._groups.transfers(self._layout)

    def _connect_to(self, stage_io: StageIO) -> None:
        self._incoming: StageOutput = stage_io[self._me.stage - 1] if self._me.stage else ()
        self._outgoing: StageOutput = () if self._last else stage_io[self._me.stage]
        widest = max(map(len, stage_io), default=1)
        self._layout = TransferLayout(self._job, self._incoming, self._outgoing, widest, self._where)

    def set_pace(self, pace: Mapping[str, float]) -> None:
        """Seconds by op kind, from the next op on."""
        self._device.set_pace(pace)

    def settle(self) -> None:
        """Waits until the last step is settled and peers have received all that was sent.

        Between two iterations only: afterwards this worker may leave the groups without anybody
        missing anything. Raises TransferError, or NonFiniteError.
        """
        self._progress.at(VALIDATION)
        self._steps.drain()
        self._progress.at(WAITING)
        if self._groups is not None:
            self._transfers.let_go()
        self._progress.at(AT_REST)

    def abandon(self) -> None:
        """Drops the iteration in flight and every transfer; of what is summed, as keep_finished says."""
        self._progress.at(LEAVING)
        if self._groups is not None:
            self._transfers.drop()
            self._groups = None
        # A reduction works in place, so that one which did not end has left no sum of anybody's.
        whole = not self._reducing and not self._void
        self._stage.abandon(keep_settled=self._keeps_finished and whole)
        self.timeline.drop()
        self._steps.abandon()
        self._progress.at(AT_REST)

    def forget_finished(self) -> None:
        """Drops what `abandon` has kept."""
        self._stage.abandon()

    # -- ops ----------------------------------------------------------------------------------

    def _run_op(self, kind: str, key: MicroBatch) -> None:
        """Raises OpError for what the workload's code raises, and for an output of another shape than the others'."""
        try:
            self._run[kind](key)
        except TransferError:
            raise
        except Exception as error:
            raise OpError(kind, self._iteration, key) from error

    def _forward(self, key: MicroBatch) -> None:
        self._faults.before(self._iteration, "F", *key)
        seed = seed_for("micro-batch", self._seed, self._iteration, *key)
        if key in self._script.before:
            x = self._received("F", key)
        else:
            self._progress.at(DATA, key)
            x = self._here(self._workload.inputs(self._seed, self._iteration, *key))
        started = time.monotonic()
        if self._last:
            self._progress.at(DATA, key)
            targets = self._here(self._workload.targets(self._seed, self._iteration, *key))
            self._progress.at("F", key)
            share = self._share
            self._stage.forward(key, x, seed=seed, loss=lambda y: self._workload.loss(y, targets) * share)
            self._finish("F", started)
            return
        self._progress.at("F", key)
        y = check_output(self._me.stage, self._outgoing, self._stage.forward(key, x, seed=seed))
        self._finish("F", started)
        self._transfers.send("F", key, dict(enumerate(y)))

    def _input_backward(self, key: MicroBatch) -> None:
        self._faults.before(self._iteration, "I", *key)
        dy = self._received("I", key) if key in self._script.after else None
        self._progress.at("I", key)
        started = time.monotonic()
        dx = self._stage.input_backward(key, dy)
        self._finish("I", started)
        self._send_gradients(key, dx)

    def _weight_backward(self, key: MicroBatch) -> None:
        self._faults.before(self._iteration, "W", *key)
        self._progress.at("W", key)
        started, counted = time.monotonic(), self._stage.counted(key)
        self._stage.weight_backward(key)
        if not counted:
            self._finish("W", started)

    def _backward(self, key: MicroBatch) -> None:
        """B, coupled: the gradient goes upstream only when W is done too, as in the plan."""
        self._faults.before(self._iteration, "I", *key)
        dy = self._received("I", key) if key in self._script.after else None
        self._progress.at("B", key)
        started, counted = time.monotonic(), self._stage.counted(key)
        dx = self._stage.input_backward(key, dy)
        self._faults.before(self._iteration, "W", *key)
        self._stage.weight_backward(key)
        self._finish("I" if counted else "B", started)
        self._send_gradients(key, dx)

    def _step(self) -> None:
        self._faults.before(self._iteration, "R")
        self._reducing = True
        self._progress.at(WAITING)
        arrived = time.monotonic()
        self._transfers.reduce(self._stage.gradients.buffer)
        # From here on this worker has what its step needs, and takes it whatever breaks: see agent.recovery.
        if self.tied is not None:
            self.tied.sum(self._iteration, self._steps.optimizer)
        broken = None
        try:
            if self.exchange is not None:
                self.exchange.take(self._iteration)
        except TransferError as error:
            broken = error
        if self.exchange is not None:
            self._steps.beside = self.exchange.stepped
        incomplete = int(self._incomplete())
        try:
            incomplete = self._transfers.reduced_by_all(incomplete)
        except TransferError as error:
            broken = broken or error
        reduced = time.monotonic()
        self._progress.at("O")
        # What the reduction itself takes; the rest was waiting for peers.
        self._reduction = min(self._reduction, reduced - arrived)
        self._device.waited()
        self._faults.before(self._iteration, "O")
        self._committed(self._iteration, self._steps.take(incomplete))
        self._faults.before(self._iteration, "V")
        if broken is not None:
            raise broken
        self._finish("O", reduced - self._reduction)

    def _pass_on(self, kind: str, key: MicroBatch) -> None:
        """The transfers of an op of an iteration that counts no more; what they carry does not matter."""
        if kind == "F":
            if key in self._script.before:
                self._received("F", key)
            if not self._last:
                self._transfers.send("F", key, {i: t.empty(self._where) for i, t in enumerate(self._outgoing)})
        elif kind in ("I", "B"):
            if key in self._script.after:
                self._received("I", key)
            self._send_gradients(key, tuple(t.empty(self._where) for t in self._incoming))

    def _here(self, data: Any) -> Any:
        return data if self._where.type == "cpu" else on_device(data, self._where)

    def _finish(self, kind: str, started: float) -> None:
        if self._complete is not None:
            self._complete()
        seconds = self._device.finish(kind, started)
        self.times.add(kind, seconds)
        if self.timeline.recording:
            self.timeline.add(self._device.ended, seconds)

    # -- transfers ----------------------------------------------------------------------------

    def _send_gradients(self, key: MicroBatch, dx: Gradients) -> None:
        """To whoever ran the forward of the stage before, if there is one."""
        if key in self._script.before:
            gradients = dx if isinstance(dx, tuple) else (dx,)
            wanted = {i: g for i, g in enumerate(gradients) if g is not None and self._incoming[i].gradient}
            self._transfers.send("I", key, wanted)

    def _received(self, kind: str, key: MicroBatch) -> Any:
        """The boundary's tensor, or all of them as a tuple; None for a gradient that does not travel."""
        self._progress.at(WAITING, key)
        arrived = self._transfers.receive(kind, key)
        self._device.received()
        width = len(self._incoming if kind == "F" else self._outgoing)
        return arrived.get(0) if width == 1 else tuple(map(arrived.get, range(width)))
