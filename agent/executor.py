"""Runs one worker's ops of one iteration, in the order of the plan.

The order is all that counts: each op waits for its inputs, so times in the plan are a forecast and
not a clock. Sends are asynchronous and tagged and receives are posted ahead, so an order that a
valid schedule has can't deadlock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from agent.boundaries import Boundaries, Boundary, Gradients, check_output
from agent.communicator import Groups, Pending
from agent.faults import FaultInjector
from agent.ledger import Redo
from agent.op_times import OpTimes
from agent.pacing import PacedDevice
from agent.randomness import seed_for
from agent.stage import MicroBatch, Stage
from agent.timeline import Timeline
from agent.verdicts import Steps
from agent.workload import Workload
from planner.job import Job, Worker
from planner.schedule import Op, Schedule

# Receives posted ahead of the op that needs them.
PREFETCH = 4
# Tags tell apart the messages of this many iterations; two may be in flight, since steps are staggered.
_TAG_ITERATIONS = 4


class Interrupted(Exception):
    """A newer epoch has been announced: the iteration in flight is abandoned."""


@dataclass(frozen=True)
class Script:
    """What one worker does in every iteration of an epoch.

    ops: in order. before, after: for each micro-batch, who runs it on the previous and next stage.
    """

    ops: tuple[Op, ...]
    before: Mapping[MicroBatch, Worker]
    after: Mapping[MicroBatch, Worker]

    @classmethod
    def of(cls, schedule: Schedule, me: Worker) -> Script:
        """Raises KeyError when the plan has no such worker."""
        neighbours: dict[int, dict[MicroBatch, Worker]] = {me.stage - 1: {}, me.stage + 1: {}}
        for worker, ops in schedule.ops.items():
            if worker.stage in neighbours:
                for op in ops:
                    if op.kind == "F":
                        neighbours[worker.stage][op.pipeline, op.micro_batch] = worker
        return cls(schedule.ops[me], neighbours[me.stage - 1], neighbours[me.stage + 1])

    def only(self, keys: Collection[MicroBatch]) -> Script:
        """The same order with the ops of these micro-batches, and the step."""
        ops = tuple(op for op in self.ops if op.kind == "O" or (op.pipeline, op.micro_batch) in keys)
        return replace(self, ops=ops)

    def receives(self) -> list[tuple[str, MicroBatch]]:
        """(`F` or `I`, micro-batch) of every op that waits for a transfer, in order."""
        out = []
        for op in self.ops:
            key = (op.pipeline, op.micro_batch)
            if op.kind == "F" and key in self.before:
                out.append(("F", key))
            elif op.kind in ("I", "B") and key in self.after:
                out.append(("I", key))
        return out


class Executor:
    """One worker's engine: a table from op kind to method, and a short loop.

    pace: seconds an op of each kind is stretched to (see agent.pacing). interrupted: asked before
    every op. committed: called with (iteration, loss) right after a step, before anything that can
    fail; the loss is 0 but on the last stage. keeps_finished: `abandon` keeps whole micro-batches.
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
        boundaries: Boundaries,
        keeps_finished: bool = False,
    ) -> None:
        self.times = OpTimes()
        self.timeline = Timeline()
        self._me, self._job, self._seed = me, job, seed
        self._workload, self._stage, self._steps = workload, stage, steps
        self._faults, self._device, self._interrupted = faults, PacedDevice(pace), interrupted
        self._committed = committed
        self._last = me.stage == job.stages - 1
        self._incoming: Boundary = boundaries[me.stage - 1] if me.stage else ()
        self._outgoing: Boundary = () if self._last else boundaries[me.stage]
        self._widest = max(map(len, boundaries), default=1)
        self._run = {"F": self._forward, "I": self._input_backward, "W": self._weight_backward, "B": self._backward}
        self._sent: deque[tuple[int, Pending]] = deque()
        self._iteration = 0
        self._groups: Groups | None = None
        self._reduction = float("inf")
        self._void = self._reducing = False
        self._keeps_finished = keeps_finished

    @property
    def finished(self) -> frozenset[MicroBatch]:
        """Micro-batches of the iteration in flight that this worker's sum holds."""
        return frozenset(self._stage.gradients.settled)

    def run(self, iteration: int, script: Script, groups: Groups, redo: Redo | None = None) -> None:
        """One iteration, its step included; or none, where the step before turns out to be wrong.

        redo: what is left of it to be done; None: all of it.

        Then every worker gets to know it before its own step of this iteration, the step before has
        been put right when this returns, and the iteration is to be run again. Until then messages
        already under way, and those that others still wait for, are passed on without computing.

        Raises Interrupted or TransferError; `abandon` must follow then. The step may have been
        taken nevertheless.
        """
        if groups is not self._groups:
            self._reduction = float("inf")
            self._device.waited()
        self._stage.counted_elsewhere = frozenset()
        if redo is not None:
            script = script.only(redo.run)
            self._stage.counted_elsewhere = redo.counted - self.finished
        self._iteration, self._groups, self._script = iteration, groups, script
        self._reducing = False
        self._expected = iter(script.receives())
        self._receiving: dict[tuple[str, MicroBatch], dict[int, Pending]] = {}
        self._void = False
        self.timeline.begin(iteration, len(script.ops) if redo is None else 0)
        self._post_receives()
        for op in script.ops:
            if self._interrupted():
                raise Interrupted
            self._void = self._void or self._steps.overturned() or (op.kind == "O" and self._steps.settle())
            if self._void:
                self._pass_on(op.kind, (op.pipeline, op.micro_batch))
            elif op.kind == "O":
                self._step()
            else:
                self._run[op.kind]((op.pipeline, op.micro_batch))
        if self._void:
            self._stage.abandon()
            self.timeline.drop()
        self.timeline.finish(script.ops)
        # What went out an iteration ago has been received by now: its receiver has answered since.
        while self._sent and self._sent[0][0] < iteration:
            self._sent.popleft()[1].wait()

    def settle(self) -> None:
        """Waits until the last step is settled and peers have received all that was sent.

        Between two iterations only: afterwards this worker may leave the groups without anybody
        missing anything. Raises TransferError, or NonFiniteError.
        """
        self._steps.drain()
        while self._sent:
            self._sent.popleft()[1].wait()

    def abandon(self) -> None:
        """Drops the iteration in flight and every transfer; of what is summed, as the recipe says."""
        # A reduction works in place, so that one which did not end has left no sum of anybody's.
        whole = not self._reducing and not self._void
        self._stage.abandon(keep_settled=self._keeps_finished and whole)
        self.timeline.drop()
        self._steps.abandon()
        self._sent.clear()
        self._receiving = {}

    def forget_finished(self) -> None:
        """Drops what `abandon` has kept."""
        self._stage.abandon()

    # -- ops ----------------------------------------------------------------------------------

    def _forward(self, key: MicroBatch) -> None:
        self._faults.before(self._iteration, "F", *key)
        seed = seed_for("stage", self._seed, self._iteration, *key, self._me.stage)
        x = (
            self._received("F", key)
            if key in self._script.before
            else self._workload.inputs(self._seed, self._iteration, *key)
        )
        started = time.monotonic()
        if self._last:
            targets = self._workload.targets(self._seed, self._iteration, *key)
            share = 1.0 / (self._job.pipelines * self._job.micro_batches)
            self._stage.forward(key, x, seed=seed, loss=lambda y: self._workload.loss(y, targets) * share)
            self._finish("F", started)
            return
        y = check_output(self._me.stage, self._outgoing, self._stage.forward(key, x, seed=seed))
        self._finish("F", started)
        self._send(self._script.after[key], dict(enumerate(y)), "F", key)

    def _input_backward(self, key: MicroBatch) -> None:
        self._faults.before(self._iteration, "I", *key)
        dy = self._received("I", key) if key in self._script.after else None
        started = time.monotonic()
        dx = self._stage.input_backward(key, dy)
        self._finish("I", started)
        self._send_gradients(key, dx)

    def _weight_backward(self, key: MicroBatch) -> None:
        self._faults.before(self._iteration, "W", *key)
        started, counted = time.monotonic(), self._stage.counted(key)
        self._stage.weight_backward(key)
        if not counted:
            self._finish("W", started)

    def _backward(self, key: MicroBatch) -> None:
        """B, coupled: the gradient goes upstream only when W is done too, as in the plan."""
        self._faults.before(self._iteration, "I", *key)
        dy = self._received("I", key) if key in self._script.after else None
        started, counted = time.monotonic(), self._stage.counted(key)
        dx = self._stage.input_backward(key, dy)
        self._faults.before(self._iteration, "W", *key)
        self._stage.weight_backward(key)
        self._finish("I" if counted else "B", started)
        self._send_gradients(key, dx)

    def _step(self) -> None:
        assert self._groups is not None
        self._faults.before(self._iteration, "R")
        self._reducing = True
        arrived = time.monotonic()
        self._groups.reduce(self._stage.gradients.buffer)
        reduced = time.monotonic()
        # What the reduction itself takes; the rest was waiting for peers.
        self._reduction = min(self._reduction, reduced - arrived)
        self._device.waited()
        self._faults.before(self._iteration, "O")
        if self._interrupted():
            raise Interrupted
        self._committed(self._iteration, self._steps.take())
        self._faults.before(self._iteration, "V")
        self._finish("O", reduced - self._reduction)

    def _pass_on(self, kind: str, key: MicroBatch) -> None:
        """The transfers of an op of an iteration that counts no more; what they carry does not matter."""
        if kind == "F":
            if key in self._script.before:
                self._received("F", key)
            if not self._last:
                self._send(self._script.after[key], {i: t.empty() for i, t in enumerate(self._outgoing)}, "F", key)
        elif kind in ("I", "B"):
            if key in self._script.after:
                self._received("I", key)
            self._send_gradients(key, tuple(t.empty() for t in self._incoming))

    def _finish(self, kind: str, started: float) -> None:
        seconds = self._device.finish(kind, started)
        self.times.add(kind, seconds)
        if self.timeline.recording:
            self.timeline.add(self._device.ended, seconds)

    # -- transfers ----------------------------------------------------------------------------

    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        """Of tensor `index` of a boundary."""
        iteration, direction = self._iteration % _TAG_ITERATIONS, "FI".index(kind)
        slots = self._job.pipelines * self._job.micro_batches
        slot = (2 * iteration + direction) * slots + key[0] * self._job.micro_batches + key[1]
        return slot * self._widest + index

    def _send(self, to: Worker, tensors: Mapping[int, Tensor], kind: str, key: MicroBatch) -> None:
        """tensors: by their place in the boundary."""
        assert self._groups is not None
        for i, tensor in tensors.items():
            self._sent.append((self._iteration, self._groups.send(to, tensor.contiguous(), self._tag(kind, key, i))))

    def _send_gradients(self, key: MicroBatch, dx: Gradients) -> None:
        """To whoever ran the forward of the stage before, if there is one."""
        if key in self._script.before:
            gradients = dx if isinstance(dx, tuple) else (dx,)
            wanted = {i: g for i, g in enumerate(gradients) if g is not None and self._incoming[i].gradient}
            self._send(self._script.before[key], wanted, "I", key)

    def _post_receives(self) -> None:
        assert self._groups is not None
        while len(self._receiving) < PREFETCH and (wanted := next(self._expected, None)) is not None:
            kind, key = wanted
            forward = kind == "F"
            source = (self._script.before if forward else self._script.after)[key]
            self._receiving[wanted] = {
                i: self._groups.receive(source, spec.empty(), self._tag(kind, key, i))
                for i, spec in enumerate(self._incoming if forward else self._outgoing)
                if forward or spec.gradient
            }

    def _received(self, kind: str, key: MicroBatch) -> Any:
        """The boundary's tensor, or all of them as a tuple; None for a gradient that does not travel."""
        arrived = {i: pending.wait() for i, pending in self._receiving.pop((kind, key)).items()}
        self._device.received()
        self._post_receives()
        width = len(self._incoming if kind == "F" else self._outgoing)
        return arrived.get(0) if width == 1 else tuple(map(arrived.get, range(width)))
