"""What memory a job's workers take, from the model alone, before any of them starts.

Parameters, what the optimizer keeps, sums and what a step needs follow from the parameters' shapes. What a micro-batch
holds between its forward and the end of its backward is counted: one runs through the stage as in training, and every
tensor that is made and not let go counts; on tensors without data, or for real where the model is small, or does
something that has no form without data.

tests/benchmarks/bench_memory.py compares it with what workers take.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.config.numerics import Autocast
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.models import compat
from openrecycle.agent.models.layers import LayerStack, Partition, build_layer, copied, input_form, spans
from openrecycle.agent.models.stage_io import tensors_of
from openrecycle.agent.models.workload import Workload, probe_inputs, probe_targets
from openrecycle.agent.stages.backward.split import Deferred, Fused, Strategy
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import BUCKET_BYTES, NamedParameters
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.transfers import PREFETCH
from openrecycle.agent.workers.state_transfer import PIECE_ELEMENTS

_KEY = (0, 0)
_SMALL = 4 << 20
"""Bytes of parameters of a model that runs for real in less time than it takes to load what runs it without data."""
_LARGE = 256 << 20
"""Bytes of parameters above which a model never runs for real: it may take minutes, and memory that is not there."""


@dataclass(frozen=True)
class MicroBatchMemory:
    """Bytes of one micro-batch on a stage. forward: held from F to I. backward: from I to W. beside: while an op runs,
    beside the larger of them. received: what a neighbour gives, at most. given, back: what the next one gets, and the
    one before."""

    forward: int = 0
    backward: int = 0
    beside: int = 0
    received: int = 0
    given: int = 0
    back: int = 0


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one worker of a stage takes, beside the program itself.

    parameters: without buffers. optimizer: what it keeps of them, of its shards where that is sharded. sums: of
    gradients. undo: of what a step changes, as far as it does not fit where the sums are. gradients: of what is
    computed or stepped at a time; where they are clipped after a step, of all that is stepped beside it. activations:
    of as many micro-batches as a plan may have in flight, with what an op needs for a moment. transfers: what
    neighbours are sent, for as long as it is kept, and what is received ahead. checkpoint: the copy of its
    share that is written. hand_over: pieces on their way to workers that join.
    """

    parameters: int
    optimizer: int
    sums: int
    undo: int
    gradients: int
    activations: int = 0
    transfers: int = 0
    checkpoint: int = 0
    hand_over: int = 0

    @property
    def copied(self) -> int:
        """Of what a checkpoint holds."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))

    def times(self, ranks: int) -> StageMemory:
        return StageMemory(**{each.name: ranks * getattr(self, each.name) for each in fields(self)})


def state_memory(
    shapes: NamedParameters, kept_each: float, apart: bool, optimization: Optimization, peers: int
) -> StageMemory:
    """Of a worker of a stage with these parameters, without activations.

    kept_each: bytes that the optimizer keeps per element. apart: are parameters stepped one after the other? peers:
    workers of the stage, over which the optimizer's state may be sharded.
    """
    trained = [p for _, p in shapes if p.requires_grad]
    elements, size = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
    frozen = sum(p.nbytes for _, p in shapes if not p.requires_grad)
    largest = max((p.nbytes for p in trained), default=0)
    sums = elements * (8 if optimization.mode == "deterministic" else 4)
    sharded = optimization.sharding == "zero1"
    share = min(1.0, 2 / peers) if sharded else 1.0
    kept, stepped = round(share * kept_each * elements), round(share * size)
    gradients = min(stepped, BUCKET_BYTES if sharded else max(BUCKET_BYTES, largest)) if apart else stepped
    # One that is multiplied before it is summed; that of a step comes into the same memory.
    gradients = max(gradients, largest if optimization.mode == "deterministic" else 0)
    if optimization.clip_norm is not None and not optimization.synchronous:
        gradients += stepped  # kept until their norm is known
    undo = max(0, stepped + kept - sums)
    return StageMemory(frozen + size, kept, sums, undo, gradients)


def checkpoint_memory(whole: StageMemory, peers: int, *, copies: int) -> int:
    """Of a checkpoint each peer copies and writes as much. whole: of a worker that has all of the stage's state."""
    return copies * -(-whole.copied // peers)


def hand_over_memory(state: StageMemory, kept_each: float, peers: int) -> int:
    """A piece for each of the others, to or from which one is on its way."""
    return min(state.copied, round((peers - 1) * PIECE_ELEMENTS * (4 + kept_each)))


def activation_memory(one: MicroBatchMemory, in_flight: int, *, splits: bool) -> int:
    """splits: may W of several micro-batches be left for later?"""
    larger = max(one.forward, one.backward)
    return one.beside + (in_flight * larger if splits else (in_flight - 1) * one.forward + larger)


def with_activations(
    state: StageMemory, one: MicroBatchMemory, in_flight: int, per_iteration: int, ranks: int, *, splits: bool
) -> StageMemory:
    """per_iteration: micro-batches of a worker. ranks: that hold as much as one that is alone. splits: as of
    `activation_memory`."""
    activations = activation_memory(one, in_flight, splits=splits)
    # An output is kept until its gradient comes; a gradient until the end of the next iteration.
    transfers = PREFETCH * one.received + in_flight * one.given + 2 * per_iteration * one.back
    return replace(state, activations=ranks * activations, transfers=ranks * transfers)


# -- a micro-batch ----------------------------------------------------------------------------------


def micro_batch_memory(
    workload: Workload, partition: Partition, seed: int, autocast: Autocast | None, parameter_bytes: int
) -> list[MicroBatchMemory] | None:
    """By stage; None where the layers can't be run here: that is said elsewhere, in better words. parameter_bytes: of
    the whole model."""
    layers = sum(partition)
    try:
        read, wanted = tensors_of(probe_inputs(workload, seed), "data"), probe_targets(workload, seed)
    except Exception:
        return None

    def run(take: Callable[[Tensor], Tensor]) -> list[MicroBatchMemory]:
        inputs, targets = tuple(map(take, read)), compat.copied(wanted, take)
        found: list[MicroBatchMemory] = []
        for stage, span in enumerate(spans(partition)):
            built = {n: copied(build_layer(workload, n, layers, seed), take) for n in span}
            module = LayerStack(built, form=input_form(workload, layers))
            last = stage == len(partition) - 1
            loss = (lambda y: workload.loss(y, targets)) if last else None
            with _nothing_compiled():
                memory, inputs = _one(module, inputs, loss, autocast, first=stage == 0)
            found.append(memory)
        return found

    ways = [compat.tensors_without_data, _real][: 1 if parameter_bytes > _LARGE else 2]
    if parameter_bytes <= _SMALL:
        ways.reverse()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have
    try:
        for way in ways:
            with contextlib.suppress(Exception), way() as take:
                return run(take)
    finally:
        torch.set_num_threads(threads)
    return None


def _nothing_compiled() -> contextlib.AbstractContextManager[Any]:
    """Only to be measured. Where no layer is to be compiled, what compiles is not loaded for it, in 1.6 s."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def _real() -> Iterator[Callable[[Tensor], Tensor]]:
    yield torch.clone


def _one(
    module: LayerStack,
    inputs: tuple[Tensor, ...],
    loss: Callable[[Any], Tensor] | None,
    autocast: Autocast | None,
    *,
    first: bool,
) -> tuple[MicroBatchMemory, tuple[Tensor, ...]]:
    """What a micro-batch takes on a stage, and the stage's output."""
    deferred = Deferred(module)
    split: Strategy = deferred if deferred.layers.parameters else Fused(module)
    stage = Stage(module, _Dropped(), split=split, autocast=autocast)
    live = compat.LiveBytes()
    with live:
        # As they come in a worker: nobody else holds them.
        x = tuple(t.detach().clone() for t in inputs)
        came = live.now
        y = stage.forward(_KEY, x if len(x) > 1 else x[0], seed=0, loss=loss)
        del x
    outputs = y if isinstance(y, tuple) else (y,)
    # What is sent is there for longer than the micro-batch is.
    given = 0 if loss is not None else sum(t.nbytes for t in outputs)
    after_f = live.now - given
    with live:
        dys = tuple(torch.empty_like(t) if t.is_floating_point() else None for t in outputs)
        dx = stage.input_backward(_KEY, None if loss is not None else dys if isinstance(y, tuple) else dys[0])
    back = sum(t.nbytes for t in (dx if isinstance(dx, tuple) else (dx,)) if t is not None)
    del dys, dx
    after_i = live.now - given
    with live:
        stage.weight_backward(_KEY)
    beside = max(0, live.most - max(after_f, after_i))
    memory = MicroBatchMemory(after_f, after_i, beside, max(came, given), given, 0 if first else back)
    return memory, tuple(t.detach() for t in outputs)


class _Dropped(GradientSum):
    """Takes every term and keeps none."""

    def __init__(self) -> None:
        super().__init__((), terms=1)

    def add(self, tensor: Tensor, term: Tensor) -> None:
        pass

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        pass

    def add_change(self, buffer: Tensor, change: Tensor) -> None:
        pass

    def add_loss(self, loss: Tensor) -> None:
        pass

    def settle(self, key: tuple[int, int]) -> None:
        pass
