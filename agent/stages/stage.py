"""One stage's module and what its micro-batches hold between forward and weight-backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openrecycle.agent.config.numerics import Autocast
from openrecycle.agent.models.fully_sharded import OverRanks, Sums
from openrecycle.agent.models.layers import LayerStack
from openrecycle.agent.models.stage_io import Gradients, Tensors, leaf, precision, tensors_of
from openrecycle.agent.stages.backward.buffers import MovingBuffers
from openrecycle.agent.stages.backward.split import Deferred, MicroBatchState, Strategy
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.planner.plans.schedule import MicroBatch

__all__ = ["MicroBatch", "Stage"]


class Stage:
    """Runs F, I and W of micro-batches on one stage's module; gradients go into `gradients`.

    Ops of different micro-batches may be interleaved in any order that keeps F before I before W.
    A micro-batch's gradients, loss and buffer changes enter the sum together, in one op (W, or I
    where the split has everything then), and once: a micro-batch in `gradients.settled` may run
    again for its neighbours' sake without being counted again.

    split: how the backward is split (see agent.stages.backward.probe). autocast: forward and loss run under
    torch.autocast of this type.
    """

    def __init__(
        self,
        module: nn.Module,
        gradients: GradientSum,
        *,
        split: Strategy | None = None,
        autocast: Autocast | None = None,
    ) -> None:
        self.module = LayerStack.of(module)
        self.gradients = gradients
        self.split = split or Deferred(module)
        self._buffers = MovingBuffers(module, gradients.moving)
        self._autocast = autocast
        self._over_ranks = OverRanks(layer for _, layer in self.module.layers)
        self._states: dict[MicroBatch, MicroBatchState] = {}
        self.counted_elsewhere: frozenset[MicroBatch] = frozenset()
        """Micro-batches that are in the sum of a peer, and are run once more for the neighbours' sake."""
        self._to_come = 0
        self._last: Sums = gradients

    def expect(self, micro_batches: int, last: Sums) -> None:
        """So many more will be brought into the sum until the step. last: gets the terms of the last one of them, and
        passes them on."""
        self._to_come, self._last = micro_batches, last

    def counted(self, key: MicroBatch) -> bool:
        """Is the micro-batch in this stage's sums already, on this worker or a peer?"""
        return key in self.gradients.settled or key in self.counted_elsewhere

    @property
    def held(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._states)

    def forward(
        self,
        key: MicroBatch,
        x: Tensors,
        *,
        seed: int,
        loss: Callable[[Any], Tensor] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> Tensors:
        """F. Returns the output, detached; on the last stage `loss` maps it to the scaled scalar loss.

        The tensors of `x` are the module's positional arguments. seed: of this micro-batch's
        randomness (dropout), whichever worker runs it and wherever the model is cut. wanted: of which of them the
        stage before takes a gradient back; None: of all that can have one.
        """
        given = x if isinstance(x, tuple) else (x,)
        inputs = tuple(map(leaf, given, wanted if wanted is not None else [True] * len(given)))
        state = MicroBatchState(inputs, late=not any(t.requires_grad for t in inputs), several=isinstance(x, tuple))
        with (
            self._over_ranks.op(),
            self._buffers.kept(state.moves),
            self.split.recording(state),
            precision(self._autocast, inputs[0].device),
        ):
            y = self.module(*inputs, seed=seed)
            if loss is not None:
                y = loss(y)
                state.loss = y.detach()
                if self.gradients.loss_scale != 1.0:
                    y = (y if y.dtype == torch.float64 else y.float()) * self.gradients.loss_scale
        state.outputs = tensors_of(y, "output of the stage")
        self._states[key] = state
        if state.loss is not None:
            return state.loss
        return y.detach() if isinstance(y, Tensor) else tuple(t.detach() for t in state.outputs)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within, the module is in evaluation mode. Each part of it has its own mode back afterwards: some are kept in
        evaluation mode by their owner."""
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode

    def evaluate(self, x: Tensors, *, seed: int, measure: Callable[[Any], Any] = lambda y: y) -> Any:
        """What `measure` makes of the output; nothing is kept of it."""
        inputs = x if isinstance(x, tuple) else (x,)
        where = inputs[0].device
        with torch.no_grad(), self._over_ranks.op(), self._buffers.kept(), precision(self._autocast, where):
            return measure(self.module(*inputs, seed=seed))

    def weigh(self, key: MicroBatch, weight: Tensor) -> None:
        """Between F and I: how much the micro-batch counts in the iteration's mean."""
        self._states[key].weight = weight

    def input_backward(self, key: MicroBatch, dy: Gradients) -> Gradients:
        """I. dy: gradient of the output, in its form (None on the last stage, whose output is the loss).

        Returns the gradient of the input, in its form: None for what has none, zeros where the output does
        not depend on an input.
        """
        state = self._states[key]
        inputs = state.inputs
        wanted = [t.requires_grad for t in inputs]
        dys = dy if isinstance(dy, tuple) else (dy,)
        pairs = [(y, g) for y, g in zip(state.outputs, dys, strict=True) if y.requires_grad]
        state.outputs, state.dys = tuple(y for y, _ in pairs), tuple(g for _, g in pairs)
        with self._over_ranks.op(), self._buffers.kept():
            self.split.input_backward(state)
        state.inputs = ()
        if self.split.whole and not state.late:
            self._settle(key, state)
        dxs = tuple(
            (torch.zeros_like(t) if t.grad is None else t.grad) if want else None
            for t, want in zip(inputs, wanted, strict=True)
        )
        return dxs if state.several else dxs[0]

    def weight_backward(self, key: MicroBatch) -> None:
        """W. Adds the gradients that I left owing."""
        self._settle(key, self._states.pop(key))

    def abandon(self, *, keep_settled: bool = False, let_go: Callable[[], None] | None = None) -> None:
        """Forgets every micro-batch under way; and, unless `keep_settled`, what is in the sum. let_go: see
        GradientSum.clear."""
        self._states.clear()
        self._to_come = 0
        if not keep_settled:
            self.gradients.clear(let_go)

    def _settle(self, key: MicroBatch, state: MicroBatchState) -> None:
        """Brings everything of a micro-batch into the sum, at one stroke, unless it is in it."""
        if self.counted(key):
            return
        self._to_come -= 1
        with self._over_ranks.summed(self._last if self._to_come == 0 else self.gradients) as sums:
            together = self.split.reads_parameters(state)
            with self._over_ranks.op(together=together), self._buffers.kept():
                self.split.weight_backward(state, sums)
            for buffer, change in state.moves:
                sums.add_change(buffer, change)
        if state.loss is not None:
            self.gradients.add_loss(state.loss)
        if state.weight is not None:
            self.gradients.add_weight(state.weight)
        self.gradients.settle(key)
