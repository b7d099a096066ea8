"""How a stage's backward is split into I and W: three ways, each exact for the modules it passes for.

`deferred`: layers of our own that compute weight gradients late; keeps memory flat. `torch`:
the two functions of torch.distributed.pipelining, for any graph; keeps the graph from F to W.
`fused`: nothing is split. Which one serves a module is found by trying: see agent.stages.backward.probe.

Where no input of a stage has a gradient (integer tokens), nobody waits for I: `torch` and `fused`
then run the whole backward in W.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from openrecycle.agent.models import compat
from openrecycle.agent.models.fully_sharded import Sums, computed
from openrecycle.agent.stages.backward.buffers import Move
from openrecycle.agent.stages.backward.deferred import DeferredGradients, DeferredLayers

StrategyName = Literal["deferred", "torch", "fused"]


@dataclass
class MicroBatchState:
    """What one micro-batch holds from F to the end of W.

    inputs: leaves; those that require a gradient have it in `.grad` after I. late: none requires
    one. several: the input came as a tuple. outputs: in I, those that require a gradient; dys:
    theirs ((None,) where the output is the loss). moves: what F changed in buffers. known:
    (parameter, gradient) that I has produced already. weight: see agent.stages.stage.Stage.weigh.
    """

    inputs: tuple[Tensor, ...]
    late: bool
    several: bool = False
    outputs: tuple[Tensor, ...] = ()
    dys: tuple[Tensor | None, ...] = ()
    loss: Tensor | None = None
    weight: Tensor | None = None
    moves: list[Move] = field(default_factory=list)
    known: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    deferred: DeferredGradients = field(default_factory=DeferredGradients)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def release(self) -> None:
        """Lets go of the graph."""
        self.outputs = self.dys = ()


class Strategy(Protocol):
    """Fills and empties a MicroBatchState. whole: I leaves nothing to W, unless the state is late."""

    name: StrategyName
    whole: bool

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        """Around the module's forward."""

    def input_backward(self, state: MicroBatchState) -> None:
        """I: the gradients of the inputs, and whatever comes with them."""

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        """W: every parameter's gradient to `sink`, at most once each."""

    def reads_parameters(self, state: MicroBatchState) -> bool:
        """Does W need values of parameters, beside those that a backward of a whole module puts together?"""

    def close(self) -> None:
        """Leaves the module as it was before."""


class Fused:
    """One backward for both."""

    name: StrategyName = "fused"
    whole = True

    def __init__(self, module: nn.Module) -> None:
        self._parameters = _trainable(module)

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def input_backward(self, state: MicroBatchState) -> None:
        if not state.late:
            state.known = _backward(state, self._parameters)

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        if state.late:
            state.known = _backward(state, self._parameters)
        for parameter, gradient in state.known:
            sink.add(parameter, gradient)
        state.known = []

    def reads_parameters(self, state: MicroBatchState) -> bool:
        return False

    def close(self) -> None:
        """Nothing was changed."""


class Deferred:
    """Own layers pay their weight gradients in W; the other parameters get theirs in I."""

    name: StrategyName = "deferred"
    whole = False

    def __init__(self, module: nn.Module) -> None:
        self.layers = DeferredLayers(module)
        self.parameters = _trainable(module)

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        return self.layers.on(state.deferred)

    def input_backward(self, state: MicroBatchState) -> None:
        # Activation checkpointing runs forwards inside the backward; those defer their gradients, too.
        with self.layers.on(state.deferred):
            state.known = _backward(state, self.parameters)

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        state.deferred.flush(sink, state.known)

    def reads_parameters(self, state: MicroBatchState) -> bool:
        return state.deferred.reads_parameters

    def close(self) -> None:
        self.layers.undo()


class TorchSplit:
    """stage_backward_input and stage_backward_weight of torch.distributed.pipelining."""

    name: StrategyName = "torch"
    whole = False

    def __init__(self, module: nn.Module) -> None:
        # Here, not at the top: most stages do without.
        self._of_inputs, self._of_weights = compat.split_backward()
        self._parameters = _trainable(module)

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def input_backward(self, state: MicroBatchState) -> None:
        if state.late:
            return
        # A view can't be detached in place, which is how torch's function frees the upper graph.
        outputs = [y.clone() if y._is_view() else y for y in state.outputs]
        inputs = [x for x in state.inputs if x.requires_grad]
        dys = None if state.dys == (None,) else list(state.dys)
        _, state.groups = self._of_inputs(outputs, dys, inputs, self._parameters)
        state.release()

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        if state.late:
            gradients = _backward(state, self._parameters)
        else:
            with _own_gradients(self._parameters) as gradients:
                # The graph is kept, since two groups of parameters may share a part of it.
                self._of_weights(self._parameters, state.groups, retain_graph=True)
        state.groups = []
        for parameter, gradient in gradients:
            sink.add(parameter, gradient)

    def reads_parameters(self, state: MicroBatchState) -> bool:
        # Parts of the graph run again, without its beginning, where what they need is put together.
        return not state.late

    def close(self) -> None:
        """Nothing was changed."""


STRATEGIES: dict[StrategyName, Callable[[nn.Module], Strategy]] = {
    "deferred": Deferred,
    "torch": TorchSplit,
    "fused": Fused,
}


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [computed(p) for p in module.parameters() if p.requires_grad]


def _backward(state: MicroBatchState, parameters: Sequence[nn.Parameter]) -> list[tuple[Tensor, Tensor]]:
    """The whole graph's backward; returns the gradients of the parameters that autograd knows of."""
    with _own_gradients(parameters) as gradients:
        if state.outputs:
            torch.autograd.backward(state.outputs, state.dys)
    state.release()
    return gradients


@contextlib.contextmanager
def _own_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collects what a backward within adds to `.grad`, which is None before and after."""
    gradients: list[tuple[Tensor, Tensor]] = []
    for parameter in parameters:
        parameter.grad = None
    try:
        yield gradients
    finally:
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.append((parameter, parameter.grad))
                parameter.grad = None
