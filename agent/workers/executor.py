"""Runs one worker's ops of one iteration, in the order of the plan.

Only the order counts: each op waits for its inputs, so the times in the plan are a forecast and not a clock. The order
of a valid schedule can't deadlock: see agent.transport.transfers.

`OpQueue` keeps which ops the device was given, and when each has ended there. On the CPU an op has ended when its calls
return. A GPU works on while the host gives it more. So that the GPU never waits for the host, the host runs one op
ahead: it then waits for an event, the end of the op before. It is never further ahead. So a report of what this worker
is doing is right to within one op, and little is under way when an iteration is abandoned.

Why this changes no bit, and no recovery:
- All ops are in one stream, in the order of the plan, whenever the host gives them to it.
- No op gets anything from a peer before the host has seen that it came, and that no cancel came before it
  (agent.transport.group). No op goes beyond a collective of its worker's ranks before the host has seen the end of that
  (agent.transport.ranks). So an op that is queued waits for nobody: it ends by itself, whichever worker has died.
- What is sent or summed over NCCL waits for its op on the device. What goes by way of the host, and every number that
  the host reads, waits for all ops before it.
- A worker that abandons an iteration first ends what waits for peers, and then waits for the device (`forget`). So
  nothing writes any more to a sum, a parameter or a buffer when it is undone or used again. Ops of the next iteration
  come later in the same stream.
- The host waits for the end of each step.

For what else the host waits, see DEVELOPMENT.md. The order of waits is tested with stand-ins for a GPU's events.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.config.devices import Upload, seed_for
from openrecycle.agent.config.faults import FaultInjector, PacedDevice
from openrecycle.agent.models.layers import (
    CPU,
    Gradients,
    StageIO,
    StageIOError,
    StageOutput,
    check_output,
    nothing,
    wanted_of,
)
from openrecycle.agent.models.workload import EvaluationData, Metric, Workload, weight_of
from openrecycle.agent.monitoring.liveness import (
    AT_REST,
    DATA,
    LEAVING,
    VALIDATION,
    WAITING,
    OpProgress,
    OpSeconds,
    Timeline,
)
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.group import TransferError, first_line
from openrecycle.agent.transport.ranks import SiblingError
from openrecycle.agent.transport.transfers import Script, TransferLayout, Transfers
from openrecycle.agent.workers.recovery import Redo
from openrecycle.agent.workers.reduction import GradientReduction, TiedSums, from_one
from openrecycle.agent.workers.relayout import Exchange
from openrecycle.agent.workers.sharding import ShardedStage
from openrecycle.agent.workers.validation_exchange import Steps, lost_validation
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.schedule import MicroBatch

# -- what a worker's thread has given its device to do ------------------------------------------

AHEAD = 1
"""How many ops may be queued behind the one that the device runs."""
_GLANCE_SECONDS = 2e-5


class OpQueue:
    """The ops of a device whose calls return when their work is done.

    pace: stretches ops. ended: called for each op in order, with its kind, the time at which it ended on this process's
    monotonic clock (NaN: nobody has asked for that), and the seconds that it took on the device. now: that clock.
    """

    def __init__(
        self, pace: PacedDevice, ended: Callable[[str, float, float], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._pace, self._ended, self._now = pace, ended, now

    def clock(self) -> None:
        """Starts to report the times at which ops end. Called while nothing is queued."""

    def begin(self) -> float:
        """Says that the next op's work begins. Returns the time."""
        return self._now()

    def end(self, kind: str, key: MicroBatch, started: float) -> None:
        """Says that all of the op's work has been given to the device. started: what `begin` returned."""
        self.finish(kind, started)

    def finish(self, kind: str, started: float) -> None:
        """Does the same as `end`, and waits until the op has ended. started: monotonic seconds."""
        seconds = self._pace.finish(kind, started)
        self._ended(kind, self._pace.ended, seconds)

    def wait_for(self, arrived: Callable[[], bool]) -> None:
        """Waits until `arrived` or all ops have ended. Called before a wait for a peer: until then, this worker waits
        for its own ops."""

    def drain(self) -> None:
        """Waits until all ops have ended."""

    def forget(self) -> None:
        """Waits until all ops have ended, and reports none of them."""

    def failed(self, kind: str, key: MicroBatch) -> tuple[str, MicroBatch]:
        """Returns the op in which the device has failed. The failure was found in the op that is given."""
        return kind, key


@dataclass(frozen=True)
class _Queued:
    """An op that the device was given. number: how many ops have ended when this one has. began, ended: its events."""

    kind: str
    key: MicroBatch
    number: int
    began: Any
    ended: Any


class OpCount:
    """Counts the ops that have ended on a GPU. The GPU itself counts them, into the host's memory: once it has failed,
    it answers nothing any more."""

    def __init__(self, device: torch.device) -> None:
        self._there, self._here = torch.full((1,), -1, device=device), torch.zeros(1, dtype=torch.int64)
        if device.type == "cuda":
            self._here = self._here.pin_memory()
        # Done once before anything is received: a kernel is loaded with its first use, which waits for all that the GPU
        # was given.
        self.add()

    def add(self) -> None:
        """Has the GPU count one more op, after all that it was given."""
        self._there.add_(1)
        self._here.copy_(self._there, non_blocking=True)

    @property
    def ended(self) -> int:
        return int(self._here)


class DeviceOpQueue(OpQueue):
    """The ops of a GPU.

    event: makes an event that is recorded in the stream of the ops, with `synchronize`, `query`, and `elapsed_time` to
    a later one in ms. progress: is told what the host waits for. count: without it, the op in which a failure is found
    counts as the one that has failed.
    """

    def __init__(
        self,
        pace: PacedDevice,
        ended: Callable[[str, float, float], None],
        progress: OpProgress,
        event: Callable[[], Any],
        now: Callable[[], float] = time.monotonic,
        count: OpCount | None = None,
    ) -> None:
        super().__init__(pace, ended, now)
        self._progress, self._event = progress, event
        self._count, self._given = count, 0
        self._queued: deque[_Queued] = deque()
        self._began: Any = None
        self._clock: tuple[Any, float] | None = None

    def clock(self) -> None:
        event = self._event()
        event.synchronize()
        self._clock = event, self._now()

    def begin(self) -> float:
        self._began = self._event()
        return super().begin()

    def end(self, kind: str, key: MicroBatch, started: float) -> None:
        if self._pace.paces(kind):
            self.finish(kind, started)
            return
        self._pace.waited()
        self._counted()
        self._queued.append(_Queued(kind, key, self._given, self._began, self._event()))
        self._retire(AHEAD)

    def finish(self, kind: str, started: float) -> None:
        self._counted()
        end = self._event()
        if self._queued:
            self.drain()
            started = max(started, self._now())  # the device came to it only now
        end.synchronize()
        super().finish(kind, started)

    def wait_for(self, arrived: Callable[[], bool]) -> None:
        while self._queued and not arrived():
            op = self._queued[0]
            self._progress.at(op.kind, op.key)
            while not (ended := op.ended.query()) and not arrived():
                time.sleep(_GLANCE_SECONDS)
            if ended:
                self._retire(len(self._queued) - 1)

    def drain(self) -> None:
        self._retire(0)

    def forget(self) -> None:
        self._queued.clear()
        self._event().synchronize()

    def failed(self, kind: str, key: MicroBatch) -> tuple[str, MicroBatch]:
        ended = self._given if self._count is None else self._count.ended
        return next(((op.kind, op.key) for op in self._queued if op.number > ended), (kind, key))

    def _counted(self) -> None:
        self._given += 1
        if self._count is not None:
            self._count.add()

    def _retire(self, keep: int) -> None:
        """Waits for the ends of all ops but the last `keep`."""
        while len(self._queued) > keep:
            op = self._queued[0]
            self._progress.at(op.kind, op.key)
            op.ended.synchronize()
            self._queued.popleft()
            at = math.nan
            if self._clock is not None:
                since, then = self._clock
                at = then + since.elapsed_time(op.ended) / 1000
            self._ended(op.kind, at, op.began.elapsed_time(op.ended) / 1000)


def op_queue(
    device: torch.device, pace: PacedDevice, ended: Callable[[str, float, float], None], progress: OpProgress
) -> OpQueue:
    """Returns the queue of this thread's ops on `device`."""
    if device.type != "cuda":
        return OpQueue(pace, ended)

    def event() -> Any:
        # Blocking, since a thread that spins would take the processor from the threads that report and cancel.
        made: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(device))
        return made

    return DeviceOpQueue(pace, ended, progress, event, count=OpCount(device))


# -- one worker's ops of one iteration ----------------------------------------------------------


class OpError(Exception):
    """The workload's own code raised in an op of a micro-batch; `__cause__` is what it raised."""

    def __init__(self, kind: str, iteration: int, key: MicroBatch) -> None:
        super().__init__(kind, iteration, key)
        self.kind, self.iteration, self.key = kind, iteration, key


class RankAloneError(StageIOError):
    """A layer raised on one rank alone, where each micro-batch is divided over the ranks. The other ranks wait for what
    this one does not send, and would take what it sends next for that."""


class Interrupted(Exception):
    """A newer generation has been announced: the iteration in flight is abandoned."""


class Executor:
    """Runs one worker's ops: a table from op kind to method, and a short loop. Used by the training thread.

    pace: the seconds to which ops of each kind are stretched (see agent.config.faults). interrupted: asked before every
    op whether to abandon the iteration. committed: called with (iteration, loss) right after a step, before anything
    that can fail; the loss is 0 on all stages but the last. keeps_finished: `abandon` keeps the micro-batches that are
    summed whole. progress: is told what this thread is doing. incomplete: says whether this worker still takes its
    state from a peer. hold_settings: called after the workload's code, which may have changed what torch keeps for the
    whole process.
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
        hold_settings: Callable[[], None] = lambda: None,
    ) -> None:
        self._progress = progress or OpProgress()
        self.times = OpSeconds()
        self.timeline = Timeline()
        self._me, self._job, self._seed = me, job, seed
        self._workload, self._stage, self._steps = workload, stage, steps
        self._faults, self._device, self._interrupted = faults, PacedDevice(pace), interrupted
        self._committed = committed
        self._last = me.stage == job.stages - 1
        self._where, self._here = device, Upload(device)
        self._queue = op_queue(device, self._device, self._op_ended, self._progress)
        self._usual_weight: float | None = getattr(workload, "usual_weight", None)
        self._varies: bool = getattr(workload, "varies", False)
        self._weights: dict[MicroBatch, Tensor] = {}
        """The weights of the micro-batches under way, where they are weighted."""
        self._connect_to(stage_io)
        self._exchange: Exchange | None = None
        """Exchanges the sums of layers that move to another stage."""
        self._tied: TiedSums | None = None
        self._sharded: ShardedStage | None = None
        self._run = {"F": self._forward, "I": self._input_backward, "W": self._weight_backward, "B": self._backward}
        self._iteration = 0
        self.left_out: frozenset[MicroBatch] = frozenset()
        self._share = 1.0
        self._groups: Groups | None = None
        self._transfers: Transfers
        self._reduction_seconds = float("inf")
        self._void = self._overturned = self._reducing = False
        self._reduction: GradientReduction | None = None
        """The reduction of the iteration in flight, until its step is taken."""
        self._keeps_finished = keeps_finished
        self._incomplete, self._hold_settings = incomplete, hold_settings

    @property
    def sharded(self) -> ShardedStage | None:
        """What shares the optimizer's state with the stage's workers; None: the state is not sharded."""
        return self._sharded

    @property
    def finished(self) -> frozenset[MicroBatch]:
        """The micro-batches of the iteration in flight that are in this worker's sum."""
        return frozenset(self._stage.gradients.settled)

    def run(
        self,
        iteration: int,
        script: Script,
        groups: Groups,
        redo: Redo | None = None,
        left_out: frozenset[MicroBatch] = frozenset(),
    ) -> None:
        """Runs one iteration with its step; or none, if the step before turns out to be wrong.

        redo: what is left of the iteration; None: all of it. left_out: micro-batches that nobody runs; the mean is over
        the others.

        If the step before was wrong, every worker learns so before its own step of this iteration. The step before has
        been corrected when this returns, and the iteration is to be run again. Until then, messages that are under way
        or that others wait for are passed on without computing.

        Raises Interrupted, TransferError or OpError; `abandon` must follow then. The step may have been taken
        nevertheless.
        """
        self.use(groups)
        self._hold_settings()  # the step before, a builder or an evaluation may have changed torch's settings
        self._stage.count_elsewhere(frozenset() if redo is None else redo.counted - self.finished)
        whole = script
        if redo is not None:
            script = script.only(redo.run)
        script, self.left_out = script.without(left_out), left_out
        left = 0 if self._usual_weight is not None else len(left_out)  # the sum of weights is without them anyway
        self._share = 1.0 / max(1, self._job.pipelines * self._job.micro_batches - left)
        self._iteration, self._script = iteration, script
        self._reducing = False
        self._void = self._overturned = False
        self._weights.clear()
        self.data_seconds = 0.0
        self.timeline.begin(iteration, 0 if redo or left_out else len(script.ops))
        if self.timeline.recording:
            self._queue.clock()
        self._transfers.begin(iteration, script)
        reduces = self._transfers if self._sharded is None else self._sharded
        # Where only a part of the iteration is left, workers that run nothing of it may have sums, too.
        alone = script.alone if self._sharded is None and redo is None else None
        self._reduction = GradientReduction(
            self._stage.gradients, reduces.begin_reduce if alone is None else from_one(groups, alone)
        )
        keys = {(op.pipeline, op.micro_batch) for op in script.ops if op.kind == "F"}
        self._stage.expect(sum(not self._stage.counted(key) for key in keys), self._reduction)
        self._announce(iteration, script, whole)
        for op in script.ops:
            if self._interrupted():
                raise Interrupted
            self._progress.at(VALIDATION)
            self._void = self._void or self._counts_no_more(op.kind)
            if self._void:
                self._pass_on(op.kind, (op.pipeline, op.micro_batch))
            elif op.kind == "O":
                self._step()
            else:
                self._run_op(op.kind, (op.pipeline, op.micro_batch))
        if self._void:
            self._stage.abandon()
            self.timeline.drop()
            self.gather_parameters()
        self._queue.drain()
        self.timeline.finish(script.ops)
        # What was sent an iteration ago has been received by now: its receiver has answered since.
        self._progress.at(WAITING)
        self._transfers.let_go(iteration)
        self._progress.at(AT_REST)
        self._progress.warmed_up()

    def evaluate(
        self, iteration: int, data: EvaluationData, script: Script, groups: Groups, problem: Callable[[str], None]
    ) -> dict[str, float]:
        """Runs the forwards of all micro-batches of `data`, on this worker those that `script` gives it. Called before
        `iteration`, with everything settled. Returns the mean `loss` and the mean of each metric, the same to the bit
        whichever workers ran them; on other stages than the last it returns nothing.

        A micro-batch that raises makes the means NaN and is reported to `problem`, the first that raises the same; no
        worker ends for it. Raises Interrupted or TransferError; `abandon` must follow then.
        """
        self.use(groups)
        measures = {"loss": self._workload.loss, **data.metrics}
        # Each micro-batch has a place of its own: adding zeros rounds nothing.
        table = torch.zeros(len(measures) + 1, data.micro_batches, dtype=torch.float64)
        per_pipeline, at_once = self._job.micro_batches, self._job.pipelines * self._job.micro_batches
        told: set[str] = set()
        with self._stage.evaluating():
            for first in range(0, data.micro_batches, at_once):
                count = min(at_once, data.micro_batches - first)
                self._script = script.forwards({divmod(i, per_pipeline) for i in range(count)})
                self._transfers.begin(iteration, self._script)
                for op in self._script.ops:
                    if self._interrupted():
                        raise Interrupted
                    key = op.pipeline, op.micro_batch
                    index = first + key[0] * per_pipeline + key[1]

                    def said(error: BaseException, what: str = "", index: int = index) -> None:
                        self._check_siblings(error)
                        if isinstance(error, (TransferError, torch.AcceleratorError, RankAloneError)):
                            raise error  # the second: the device's context is gone for good
                        why = f"{what}{type(error).__name__}: {error}"[:1000]
                        if why not in told:
                            told.add(why)
                            problem(f"evaluation, micro-batch {index}: {why}")

                    try:
                        self._evaluate_forward(key, index, data, measures, table[:, index], said)
                    except BaseException as error:
                        said(error)
                        table[:, index] = math.nan
                        self._send_outputs(key, tuple(_unknown(spec.empty(self._where)) for spec in self._outgoing))
                self._progress.at(WAITING)
                self._transfers.let_go()  # can't deadlock: the receivers wait for no worker that comes after this one
        if self._last:
            values = table.to(self._where)
            self._transfers.reduce(values)
            table = values.cpu()
        self._progress.at(AT_REST)
        *rows, weights = table.tolist()
        return {name: _mean(row, weights) for name, row in zip(measures, rows, strict=True)} if self._last else {}

    def _evaluate_forward(
        self,
        key: MicroBatch,
        index: int,
        data: EvaluationData,
        measures: Mapping[str, Metric],
        into: Tensor,
        problem: Callable[[BaseException, str], None],
    ) -> None:
        seed = seed_for("evaluation", self._seed, index)

        def run(**how: Any) -> Any:
            try:
                return self._stage.evaluate(x, seed=seed, **how)
            except BaseException as error:
                self._check_siblings(error)
                if getattr(self._workload, "divided", False):
                    text = f"{type(error).__name__}: {error}"[:1000]
                    raise RankAloneError(
                        f"evaluation, micro-batch {index}: {text} (layers are fully sharded, so all ranks must run it)"
                    ) from error
                raise

        if key in self._script.before:
            x = self._received("F", key)
        else:
            self._progress.at(DATA, key)
            x = self._here(data.inputs(self._seed, index))
        if not self._last:
            self._progress.at("F", key)
            self._send_outputs(key, self._checked(run()))
            return
        self._progress.at(DATA, key)
        read = data.targets(self._seed, index)
        weight = 1.0 if self._usual_weight is None else float(weight_of(self._workload, read))
        targets = self._here(read)
        self._progress.at("F", key)

        def measure(y: Any) -> None:
            for place, (name, metric) in enumerate(measures.items()):
                try:
                    into[place] = float(metric(y, targets))
                except BaseException as error:
                    problem(error, f"{name}: ")
                    into[place] = math.nan

        into[-1] = weight
        run(measure=measure)

    def rearrange(self, stage: Stage, stage_io: StageIO) -> None:
        """Gives the worker a stage with other layers. Called between two iterations, with everything settled."""
        self._stage, self._exchange = stage, None
        self._connect_to(stage_io)
        if self._groups is not None:
            self._transfers = self._groups.transfers(self._layout)

    def use(self, groups: Groups) -> None:
        """Uses a generation's groups, as soon as they have formed: `abandon` ends what is exchanged in them."""
        if groups is not self._groups:
            self._groups, self._transfers = groups, groups.transfers(self._layout)
            self._reduction_seconds = float("inf")
            self._device.waited()

    def share(self, sharded: ShardedStage) -> None:
        """Shares the optimizer's state with the stage's workers from here on."""
        self._sharded = sharded

    def end_sharing(self) -> None:
        if self._sharded is not None:
            self._sharded.end()
            self._sharded = None

    def tie(self, sums: TiedSums | None) -> None:
        """Sets how gradients are summed with stages that have copies of this one's parameters; None: none has."""
        self._tied = sums

    def move_layers(self, exchange: Exchange | None) -> None:
        """Has layers that come to this worker take each step that it takes, from here on; None: no layers move."""
        self._exchange = exchange
        self._steps.take_along(exchange.stepped if exchange is not None else [])

    def end_exchanges(self) -> None:
        """Ends the exchanges of a generation that is being left. Layers that are on their way keep what they have, with
        the steps that they have taken."""
        self._exchange = self._tied = None
        self.end_sharing()

    def _connect_to(self, stage_io: StageIO) -> None:
        self._incoming: StageOutput = stage_io[self._me.stage - 1] if self._me.stage else ()
        self._outgoing: StageOutput = () if self._last else stage_io[self._me.stage]
        weighted, varies = self._usual_weight is not None, self._varies
        widest = max(map(len, stage_io), default=1) + weighted + varies
        self._layout = TransferLayout(self._job, self._incoming, self._outgoing, widest, self._where, weighted, varies)

    def set_pace(self, pace: Mapping[str, float]) -> None:
        """Sets the pace from the next op on, in seconds by op kind."""
        self._device.set_pace(pace)

    def settle(self) -> None:
        """Waits until the last step is settled and peers have received all that was sent.

        Called between two iterations only. Afterwards this worker may leave the groups, and no peer lacks anything.
        Raises TransferError, or NonFiniteError.
        """
        self._progress.at(VALIDATION)
        self._steps.drain()
        self.gather_parameters()
        self._progress.at(WAITING)
        if self._groups is not None:
            self._transfers.let_go()
        self._progress.at(AT_REST)

    def gather_parameters(self) -> None:
        """Takes the parameters that other workers step, if the last step was corrected. Called between two iterations,
        once the last step is settled. Raises TransferError."""
        if self._sharded is not None:
            self._progress.at(WAITING)
            self._sharded.gather()

    def abandon(self) -> None:
        """Drops the iteration in flight and every transfer. Sums are kept where `keeps_finished` asks for it."""
        self._progress.at(LEAVING)
        if self._groups is not None:
            self._groups.ranks.halt()  # first, since what waits for peers would hold up the device
            self._transfers.drop()
            self._groups = None
        self._queue.forget()
        # A reduction works in place: one that did not end has left sums that are nobody's.
        begun = self._reduction is not None and self._reduction.begun
        whole = not self._reducing and not self._void and not begun
        let_go = self._reduction.let_go if self._reduction is not None and begun else None
        self._stage.abandon(keep_settled=self._keeps_finished and whole, let_go=let_go)
        self._reduction = None
        self.timeline.drop()
        self._steps.abandon()
        self._progress.at(AT_REST)

    def forget_finished(self) -> None:
        """Drops what `abandon` has kept."""
        self._stage.abandon()

    def _announce(self, iteration: int, script: Script, following: Script) -> None:
        """Tells the workload which micro-batches this worker will read: now, and in the iteration after this one."""
        upcoming = getattr(self._workload, "upcoming", None)
        if upcoming is not None and (self._last or self._me.stage == 0):
            runs = [(iteration, script), (iteration + 1, following)]
            keys = [(i, (op.pipeline, op.micro_batch), s) for i, s in runs for op in s.ops if op.kind == "F"]
            upcoming([(i, *key) for i, key, s in keys if self._last or key not in s.before])

    # -- ops ----------------------------------------------------------------------------------

    def _run_op(self, kind: str, key: MicroBatch) -> None:
        """Runs one op. Raises OpError for what the workload's code raises, and for an output of the wrong shape."""
        try:
            self._run[kind](key)
        except TransferError:
            raise
        except BaseException as error:  # even SystemExit: only the workload's code raises that here
            self._check_siblings(error)
            # A forward may have used parameters of a step that is overturned, or what a worker passed on that knew of
            # it. Then the failure is nobody's fault. The forward has received its input, and has sent nothing yet.
            self._progress.at(VALIDATION)
            if kind == "F" and self._counts_no_more():
                self._send_nothing(key)
                return
            if isinstance(error, torch.AcceleratorError):
                kind, key = self._queue.failed(kind, key)
            raise OpError(kind, self._iteration, key) from error
        finally:
            self._hold_settings()

    def _counts_no_more(self, kind: str = "") -> bool:
        """Says whether the step before has been overturned, as far as is known before an op of this kind. An F does not
        wait to know it. The first op with gradients does: it uses the memory with which that step could be undone (see
        agent.workers.recovery)."""
        if kind == "F":
            return self._steps.overturned()
        self._overturned = self._overturned or self._steps.settle()
        return self._overturned

    def _check_siblings(self, error: BaseException) -> None:
        """Raises SiblingError if a collective in a module raised `error` because another rank has left it."""
        if self._groups is not None and self._groups.ranks.broke(error):
            raise SiblingError(f"in a layer: {first_line(error)}") from None

    def _forward(self, key: MicroBatch) -> None:
        self._faults.before(self._iteration, "F", *key)
        seed = seed_for("micro-batch", self._seed, self._iteration, *key)
        if key in self._script.before:
            x, wanted = self._received("F", key), wanted_of(self._incoming)
        else:
            x, wanted = self._here(self._read(self._workload.inputs, key)), None
        # Reading counts as waiting, as for what a peer sends: it is no part of the op.
        loss = self._scaled_loss(key, self._read(self._workload.targets, key)) if self._last else None
        started = self._queue.begin()
        self._progress.at("F", key)
        if loss is not None:
            self._stage.forward(key, x, seed=seed, loss=loss, wanted=wanted)
            self._queue.end("F", key, started)
            return
        y = self._checked(self._stage.forward(key, x, seed=seed, wanted=wanted))
        self._queue.end("F", key, started)
        self._send_outputs(key, y)

    def _read(self, read: Callable[..., Any], key: MicroBatch) -> Any:
        self._progress.at(DATA, key)
        begun = time.monotonic()
        try:
            return read(self._seed, self._iteration, *key)
        finally:
            self.data_seconds += time.monotonic() - begun
            self._hold_settings()

    def _scaled_loss(self, key: MicroBatch, targets: Any) -> Callable[[Any], Tensor]:
        """Returns, for the last stage, what maps the output to the micro-batch's share of the iteration's loss.
        targets: as they were read: on the host, their weight is found without the device."""
        share, weighted, there = self._share, self._usual_weight, self._here(targets)
        if weighted is None:
            return lambda y: self._workload.loss(y, there) * share
        counts = weight_of(self._workload, targets)
        self._weights[key] = weight = self._here(counts)
        if not float(counts):  # a mean over nothing is no number
            return nothing
        return lambda y: self._workload.loss(y, there) * (weight[0] * (share / weighted)).float()

    def _gradient_of_output(self, key: MicroBatch) -> Any:
        """Takes the gradient from the worker that ran the forward of the next stage, if there is one, with the
        micro-batch's weight."""
        dy = self._received("I", key) if key in self._script.after else None
        if self._usual_weight is not None:
            self._stage.weigh(key, self._weights[key])
        return dy

    def _input_backward(self, key: MicroBatch) -> None:
        self._faults.before(self._iteration, "I", *key)
        dy = self._gradient_of_output(key)
        self._progress.at("I", key)
        started = self._queue.begin()
        dx = self._stage.input_backward(key, dy)
        self._queue.end("I", key, started)
        self._send_gradients(key, dx)

    def _weight_backward(self, key: MicroBatch) -> None:
        self._faults.before(self._iteration, "W", *key)
        self._progress.at("W", key)
        started, counted = self._queue.begin(), self._stage.counted(key)
        self._stage.weight_backward(key)
        if not counted:
            self._queue.end("W", key, started)

    def _backward(self, key: MicroBatch) -> None:
        """Runs B, which is I and W in one: the gradient is sent upstream only when W is done too, as in the plan."""
        self._faults.before(self._iteration, "I", *key)
        dy = self._gradient_of_output(key)
        self._progress.at("B", key)
        started, counted = self._queue.begin(), self._stage.counted(key)
        dx = self._stage.input_backward(key, dy)
        self._faults.before(self._iteration, "W", *key)
        self._stage.weight_backward(key)
        self._queue.end("I" if counted else "B", key, started)
        self._send_gradients(key, dx)

    def _step(self) -> None:
        self._faults.before(self._iteration, "R")
        self._reducing = True
        self._progress.at(WAITING)
        assert self._reduction is not None
        arrived = time.monotonic()
        self._reduction.begin()  # comes after the last W on the device, which may not have ended
        arrived -= time.monotonic()
        self._queue.drain()
        arrived += time.monotonic()
        self._progress.at(WAITING)
        self._reduction.finish()
        # From here on this worker has what its step needs, and takes the step whatever breaks: see
        # agent.workers.recovery.
        if self._tied is not None:
            self._tied.sum(self._iteration, self._steps.optimizer)
        if self._sharded is not None:
            self._sharded.measure()
        broken = None
        try:
            if self._exchange is not None:
                self._exchange.take(self._iteration)
        except TransferError as error:
            broken = error
        if self._exchange is not None:
            self._steps.take_along(self._exchange.stepped)
        incomplete = int(self._incomplete())
        try:
            incomplete = self._transfers.reduced_by_all(incomplete)
        except TransferError as error:
            broken = broken or error
        reduced = time.monotonic()
        self._progress.at("O")
        # The least that was seen is what the reduction itself takes; the rest was waiting for peers.
        self._reduction_seconds = min(self._reduction_seconds, reduced - arrived)
        self._device.waited()
        self._faults.before(self._iteration, "O")
        self._committed(self._iteration, self._steps.take(incomplete, by_all=broken is None))
        self._faults.before(self._iteration, "V")
        if broken is None and self._steps.in_doubt:
            broken = lost_validation()  # peers may have the validation, and have taken another step
        if broken is not None:
            raise broken
        if self._sharded is not None:
            self._progress.at(WAITING)
            self._sharded.stepped(incomplete)
            self._sharded.gather()
        self._queue.finish("O", reduced - self._reduction_seconds)

    def _pass_on(self, kind: str, key: MicroBatch) -> None:
        """Does the transfers of an op of an iteration that no longer counts. What they carry matters only to a forward
        whose worker has not heard of that yet: it must be able to compute with it."""
        if kind == "F":
            if key in self._script.before:
                self._received("F", key)
            self._send_nothing(key)
        elif kind in ("I", "B"):
            if key in self._script.after:
                self._received("I", key)
            self._send_gradients(key, tuple(t.empty(self._where) for t in self._incoming))

    def _checked(self, output: Any) -> tuple[Tensor, ...]:
        return check_output(self._me.stage, self._outgoing, output, varies=self._varies)

    def _op_ended(self, kind: str, at: float, seconds: float) -> None:
        self.times.add(kind, seconds)
        if self.timeline.recording:
            self.timeline.add(at, seconds)

    # -- transfers ----------------------------------------------------------------------------

    def _send_outputs(self, key: MicroBatch, y: tuple[Tensor, ...]) -> None:
        """Sends outputs to the worker that runs the forward of the next stage, if there is one."""
        if not self._last:
            self._transfers.send("F", key, dict(enumerate(y)))

    def _send_nothing(self, key: MicroBatch) -> None:
        """Sends zeros in place of outputs. Layers can compute with them, since 0 is a valid index for any of them."""
        self._send_outputs(key, tuple(spec.empty(self._where).zero_() for spec in self._outgoing))

    def _send_gradients(self, key: MicroBatch, dx: Gradients) -> None:
        """Sends gradients to the worker that ran the forward of the stage before, if there is one."""
        if key in self._script.before:
            gradients = dx if isinstance(dx, tuple) else (dx,)
            wanted = {i: g for i, g in enumerate(gradients) if g is not None and self._incoming[i].gradient}
            if self._usual_weight is not None:
                wanted[len(self._incoming)] = self._weights.pop(key) if key in self._weights else self._here(_ZERO)
            self._transfers.send("I", key, wanted)

    def _received(self, kind: str, key: MicroBatch) -> Any:
        """Waits for what comes from a neighbouring stage. Returns the boundary's tensor, or all of them as a tuple;
        None stands for a gradient that is not sent."""
        self._queue.wait_for(lambda: self._transfers.arrived(kind, key))
        self._progress.at(WAITING, key)
        arrived = self._transfers.receive(kind, key)
        self._device.received()
        width = len(self._incoming if kind == "F" else self._outgoing)
        if kind == "I" and self._usual_weight is not None:
            self._weights[key] = arrived.pop(width)
        return arrived.get(0) if width == 1 else tuple(map(arrived.get, range(width)))


_ZERO = torch.zeros(1, dtype=torch.float64)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the mean of the values whose weight is not 0; NaN: there is none."""
    total = math.fsum(weights)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True) if w) / total if total else math.nan


def _unknown(tensor: Tensor) -> Tensor:
    """Fills a tensor that stands for one that could not be computed."""
    return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.zero_()
