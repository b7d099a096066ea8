"""How a stage's backward is split into I (gradients of inputs) and W (gradients of weights). There are three ways, each
exact for the modules that pass its trial:

`deferred`: common layers compute their weight gradients later, which keeps memory flat. `torch`: the two functions of
torch.distributed.pipelining, which work for any graph, and keep the graph from F to W. `fused`: nothing is split. Which
one suits a module is found by trying: see agent.stages.stage. If no input of a stage has a gradient (integer tokens),
no other stage waits for I: `torch` and `fused` then run the whole backward in W.

The file also handles buffers that a forward changes, such as the running statistics of a batch norm (`MovingBuffers`).
Left alone, they would depend on which micro-batches a worker happened to run, and in which order: two replicas of a
stage would drift apart, and every re-routing would show in them. So every forward of an iteration starts from the same
values, and its changes are undone. At the step the buffer moves by the mean change over all micro-batches of the stage,
summed like the gradients. For a batch norm that is one update per iteration with the statistics' mean over the global
batch (momentum counts iterations, not micro-batches). Integers move by the rounded mean: a counter of batches counts
iterations.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle.agent.models import compat
from openrecycle.agent.models.layers import BackwardSeed, StageIOError
from openrecycle.agent.models.parallelized import Sums, computed

# The most elements of a small buffer: a counter, a flag, or an average for each channel.
_SMALL = 4096

# -- buffers that a forward changes, such as the running statistics of a batch norm -------------

Move = tuple[Tensor, Tensor]
"""(buffer, what a forward added to it: fp64, the same shape)."""


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer of a module. places: where modules have it; several if they share it. plain: all its numbers are known
    to be finite, as those of a norm's running statistics."""

    tensor: Tensor
    name: str
    plain: bool
    places: list[tuple[dict[str, Tensor | None], str]] = field(default_factory=list)


class MovingBuffers:
    """The buffers of a module, as it was built. Those in `tensors` (by identity; None: all) may change in a forward,
    which is given copies of them. tried: it is known that no others change."""

    def __init__(self, module: nn.Module, tensors: Iterable[Tensor] | None = None, *, tried: bool = False) -> None:
        wanted = None if tensors is None else {id(t) for t in tensors}
        statistics = {id(t) for t in compat.running_statistics(module)}
        known: dict[int, _Buffer] = {}
        self._modules: list[tuple[str, dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        """For each module the beginning of its names, its present buffers, and those that it was built with."""
        for path, owner in module.named_modules():
            present, start = compat.own_buffers(owner), f"{path}." if path else ""
            self._modules.append((start, present, dict(present)))
            for key, tensor in present.items():
                if tensor is not None:
                    first = _Buffer(tensor, start + key, id(tensor) in statistics)
                    known.setdefault(id(tensor), first).places.append((present, key))
        self._moving = [b for b in known.values() if wanted is None or id(b.tensor) in wanted]
        self._still = [b for b in known.values() if not (wanted is None or id(b.tensor) in wanted)]
        self._have_any = [entry for entry in self._modules if entry[2]]
        self._present = [present for _, present, _ in self._modules]
        self._sizes = list(map(len, self._present))
        self._tried = tried
        # A tensor that was made in inference mode has no version.
        self._watched = [b for b in known.values() if not b.tensor.is_inference()] if tried else []
        self.made = set[str]()
        """Names of buffers that forwards have made."""
        self.changed: set[int] | None = set() if wanted is None else None
        """If all buffers may change: the identities of those that forwards have written to, or replaced by others with
        other values."""

    @contextlib.contextmanager
    def kept(self, moves: list[Move] | None = None) -> Iterator[None]:
        """Restores the buffers when the context ends, and appends what has changed to `moves`.

        What a forward has saved for its backward, or returns as its output, is a copy, and stays. A buffer that a
        forward has made is removed: otherwise what a stage holds would depend on what it has run. Raises StageIOError
        if a buffer has changed that may not.
        """
        copies = [b.tensor.detach().clone() for b in self._moving]
        for buffer, copy in zip(self._moving, copies, strict=True):
            for present, key in buffer.places:
                present[key] = copy
        versions = [compat.version(b.tensor) for b in self._watched]
        written = [compat.version(copy) for copy in copies]
        try:
            yield
        except BaseException:
            self._put_back()
            raise
        after = [_now(buffer, copy) for buffer, copy in zip(self._moving, copies, strict=True)]
        replaced = self._put_back()
        if moves is not None:
            differences = [_difference(now, buffer) for buffer, now in zip(self._moving, after, strict=True)]
            moves += [(buffer.tensor, change) for buffer, change in zip(self._moving, differences, strict=True)]
            if self.changed is not None:
                seen = zip(self._moving, copies, written, differences, strict=True)
                for b, copy, v, d in seen:
                    if not bool(d.isfinite().all()) and not bool(b.tensor.to(d.dtype).isfinite()[~d.isfinite()].all()):
                        raise StageIOError(
                            f"a forward changes the buffer {b.name}, which begins with numbers that are not finite: no "
                            "change can be added to them. Begin with finite ones"
                        )
                    if compat.version(copy) != v or bool(d.ne(0).any()):
                        self.changed.add(id(b.tensor))
            if self._tried and replaced:
                self._check_replaced(replaced)
        for buffer, version in zip(self._watched, versions, strict=True):
            if compat.version(buffer.tensor) != version:
                raise StageIOError(_forbidden(buffer, own=any(buffer is b for b in self._moving)))

    def _put_back(self) -> dict[int, Tensor | None]:
        """Puts the buffers back with which the modules were built. Returns what was in the place of those that were
        replaced, by the identity of the built one."""
        replaced: dict[int, Tensor | None] = {}
        for start, present, built in self._have_any:
            for key, tensor in built.items():
                now = present.get(key)
                if now is not tensor:
                    present[key] = tensor
                    if tensor is None:
                        self.made.add(start + key)
                    else:
                        replaced[id(tensor)] = now
        if list(map(len, self._present)) != self._sizes:
            for start, present, built in self._modules:
                for key in present.keys() - built.keys():
                    del present[key]
                    self.made.add(start + key)
        return replaced

    def _check_replaced(self, replaced: Mapping[int, Tensor | None]) -> None:
        """Raises StageIOError if a buffer that may not change was replaced by one with other values."""
        for buffer in self._still:
            if id(buffer.tensor) in replaced:
                now = replaced[id(buffer.tensor)]
                if now is None or now.shape != buffer.tensor.shape or bool(_difference(now, buffer).ne(0).any()):
                    raise StageIOError(_forbidden(buffer))


def _now(buffer: _Buffer, copy: Tensor) -> Tensor | None:
    """Returns what a forward, which was given a copy, has left in the buffer's place; of several places, the first that
    does not have the copy."""
    for present, key in buffer.places:
        if (now := present.get(key)) is not copy:
            return now
    return copy


def _forbidden(buffer: _Buffer, *, own: bool = False) -> str:
    if own:
        return (
            f"a forward has changed the buffer {buffer.name} through another tensor that shares its memory; have it "
            "use the module's attribute of that name"
        )
    return (
        f"a forward has changed the buffer {buffer.name}, which the one that was tried at the start did not: what "
        "workers hold would depend on which micro-batches they ran. Have every forward in training write to it, or none"
    )


def moved_by(module: nn.Module, run: Callable[[MovingBuffers], Any]) -> list[Tensor]:
    """Returns the buffers of `module` that a forward changes, or that another forward may change.

    The latter are the running statistics of norms, where a change would not be noticed, and small buffers in modules
    that this forward has not called. Larger ones there are tables, or weights that are kept in few bits: each
    micro-batch would keep a change of them, and each iteration a sum. If one of them does change, its version shows it.
    run: runs a forward, within `kept` of the buffers that it is given. Raises StageIOError for a buffer that can't be
    summed.
    """
    buffers = MovingBuffers(module, tried=True)
    with _passed_over(module) as uncalled:
        run(buffers)
    found = buffers.changed or set()
    may = {id(t) for t in compat.running_statistics(module)} | {id(t) for t in uncalled if not t.is_complex()}
    names = {id(t): name for name, t in module.named_buffers()}
    for tensor in module.buffers():
        if tensor.is_complex() and id(tensor) in found:
            raise StageIOError(
                f"a forward changes the complex buffer {names[id(tensor)]}, of shape {tuple(tensor.shape)}; only real "
                "ones can be summed: keep its view_as_real"
            )
    return [tensor for tensor in module.buffers() if id(tensor) in found | may]


@contextlib.contextmanager
def _passed_over(module: nn.Module) -> Iterator[list[Tensor]]:
    """Fills its list, when the context ends, with the small buffers that are only in modules that were not called. A
    module without a forward is a part of another one. Compiled modules count as called, since a hook would have them
    compiled again."""
    compiled, called, uncalled = compat.compiled_parts(module), set[int](), list[Tensor]()
    watched = [
        part
        for part in module.modules()
        if _small_buffers(part) and id(part) not in compiled and compat.has_forward(part)
    ]
    hooks = [part.register_forward_pre_hook(lambda part, _: called.add(id(part))) for part in watched]
    try:
        yield uncalled
    finally:
        for hook in hooks:
            hook.remove()
    not_called = {id(part) for part in watched} - called
    elsewhere = {id(t) for p in module.modules() if id(p) not in not_called for t in compat.own_buffers(p).values()}
    uncalled += [t for p in watched for t in _small_buffers(p) if id(p) in not_called and id(t) not in elsewhere]


def _small_buffers(module: nn.Module) -> list[Tensor]:
    return [t for t in module.buffers(recurse=False) if t.numel() <= _SMALL]


def _difference(after: Tensor | None, buffer: _Buffer) -> Tensor:
    before = buffer.tensor
    if after is None or after.shape != before.shape:
        raise StageIOError(
            f"a forward turned the buffer {buffer.name}, of shape {tuple(before.shape)}, into "
            f"{'None' if after is None else tuple(after.shape)}; buffers must keep their shape"
        )
    exact = torch.complex128 if before.is_complex() else torch.float64  # rotary positions may be complex
    now, then = after.detach().to(exact), before.to(exact)
    change = now - then
    if buffer.plain:
        return change
    # Between equal infinities, which masks have, there is no difference.
    return change.masked_fill_((now == then) | (now.isnan() & then.isnan()), 0.0)


# -- layers that compute the gradient of their input now and those of their weights later ------------

# torch's own split (`torch.distributed.pipelining._backward`) keeps the graph alive between I and W. A deferred layer
# keeps two tensors instead, its input and the gradient of its output. So a micro-batch holds between I and W about what
# it held after F. (Under activation checkpointing F holds less: there the inputs that I recomputed stay until W.)
#
# Deferred layers are nn.Linear, nn.Embedding and nn.Conv1d/2d/3d in their plain forms, and the Conv1D of transformers
# (a Linear whose weight is transposed, as GPT-2 has it). Every other parameter gets its gradient with I. For each
# module it is tried out whether that equals the fused backward to the bit: see agent.stages.stage.


class Product(NamedTuple):
    """A gradient that is left @ right, which is still to be computed. dtype: of the parameter."""

    left: Tensor
    right: Tensor
    dtype: torch.dtype

    def compute(self) -> Tensor:
        """Returns the product. Under autocast it is computed in the lower type."""
        return (self.left @ self.right).to(self.dtype)


Term = Tensor | Product
Gradients = Callable[[], Sequence[Term]]
"""Returns the gradients of a layer's parameters, in their order; a Product leaves the computing to the sum."""


class DeferredGradients:
    """The weight gradients that one micro-batch has still to compute, in the order in which I has met them."""

    def __init__(self) -> None:
        self._deferred: list[tuple[Sequence[nn.Parameter], Gradients]] = []
        self._reads: list[Tensor] = []

    def defer(self, parameters: Sequence[nn.Parameter], gradients: Gradients, reads: Sequence[Tensor] = ()) -> None:
        """Defers the gradients of these parameters. reads: tensors that they need beside gradients, which may be
        parameters or views of them."""
        self._deferred.append((parameters, gradients))
        self._reads += reads

    @property
    def reads_parameters(self) -> bool:
        """Whether a tensor is needed whose memory is freed, since its parameter is gathered anew for each op."""
        return any(not tensor.untyped_storage().nbytes() for tensor in self._reads)

    def flush(self, sink: Sums, known: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Computes every pending gradient, gives each parameter's to `sink` once, and forgets it.

        known: gradients that I has already produced. The gradients of a parameter that is used more than once are
        summed first, in the order of the uses' backwards, as autograd sums them.
        """
        seen: set[int] = set()
        shared: dict[int, tuple[Tensor, Tensor] | None] = {}
        for parameter in chain((p for p, _ in known), *(parameters for parameters, _ in self._deferred)):
            if id(parameter) in seen:
                shared[id(parameter)] = None
            seen.add(id(parameter))

        def put(parameter: Tensor, term: Term) -> None:
            if id(parameter) in shared:
                gradient = term.compute() if isinstance(term, Product) else term
                earlier = shared[id(parameter)]
                shared[id(parameter)] = (parameter, gradient if earlier is None else earlier[1] + gradient)
            elif isinstance(term, Product):
                sink.add_product(parameter, term.left, term.right)
            else:
                sink.add(parameter, term)

        for parameter, gradient in known:
            put(parameter, gradient)
        self._deferred.reverse()
        self._reads.clear()
        while self._deferred:
            parameters, gradients = self._deferred.pop()
            for pending, term in zip(parameters, gradients(), strict=True):
                put(pending, term)
        for entry in shared.values():
            if entry is not None:
                sink.add(*entry)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredGradients) -> Tensor:
        # weight and bias are inputs so that the output requires a gradient even if x does not. They are kept as they
        # are, since checkpointing returns what it saves as another tensor.
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (x,) = ctx.saved_tensors
        x, weight, bias, (of_x, of_weight, of_bias) = x.detach(), ctx.weight, ctx.bias, ctx.needs_input_grad[:3]

        def gradients() -> list[Term]:
            flat = dy.reshape(-1, dy.shape[-1])
            out: list[Term] = []
            if of_weight:
                out.append(Product(flat.t(), x.reshape(-1, x.shape[-1]), weight.dtype))
            if of_bias:
                out.append(flat.sum(0).to(bias.dtype))
            return out

        ctx.deferred.defer(_where((of_weight, of_bias), (weight, bias)), gradients, [x])
        return (dy @ weight.to(dy.dtype) if of_x else None), None, None, None


class _Transposed(torch.autograd.Function):
    """A Linear whose weight has the shape (inputs, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (x,) = ctx.saved_tensors
        x, weight, bias, (of_x, of_weight, of_bias) = x.detach(), ctx.weight, ctx.bias, ctx.needs_input_grad[:3]
        flat = dy.reshape(-1, dy.shape[-1])

        def gradients() -> list[Term]:
            out: list[Term] = []
            if of_weight:
                out.append(Product(x.reshape(-1, x.shape[-1]).t(), flat, weight.dtype))
            if of_bias:
                out.append(flat.sum(0).to(bias.dtype))
            return out

        ctx.deferred.defer(_where((of_weight, of_bias), (weight, bias)), gradients, [x])
        return ((flat @ weight.to(dy.dtype).t()).view(x.shape) if of_x else None), None, None, None


class _DeferredEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding, ctx.deferred = weight, padding, deferred
        return torch.embedding(weight, indices, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (indices,) = ctx.saved_tensors
        rows, padding = ctx.weight.shape[0], ctx.padding
        ctx.deferred.defer(
            [ctx.weight], lambda: [torch.ops.aten.embedding_dense_backward(dy, indices, rows, padding, False)]
        )
        return None, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d, deferred: DeferredGradients
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.layer, ctx.deferred = weight, bias, layer, deferred
        return compat.convolve(layer, x, weight, bias)  # within a Function's forward no gradient is recorded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (x,) = ctx.saved_tensors
        x, weight, layer, (of_x, of_weight, of_bias) = x.detach(), ctx.weight, ctx.layer, ctx.needs_input_grad[:3]
        parameters = _where((of_weight, of_bias), (weight, ctx.bias))

        def part(*mask: bool) -> list[Tensor]:
            out = torch.ops.aten.convolution_backward(
                dy, x, weight.to(dy.dtype), [weight.shape[0]], layer.stride, layer.padding, layer.dilation,
                False, [0] * len(layer.stride), layer.groups, mask,
            )  # fmt: skip
            return [g for g, wanted in zip(out, mask, strict=True) if wanted]

        ctx.deferred.defer(parameters, lambda: _in_types_of(parameters, part(False, of_weight, of_bias)), [x, weight])
        return (part(True, False, False)[0] if of_x else None), None, None, None, None


def _where(wanted: Sequence[bool], parameters: Sequence[Any]) -> list[nn.Parameter]:
    return [p for p, w in zip(parameters, wanted, strict=True) if w]


def _in_types_of(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns gradients in their parameters' types. Under autocast they are computed in the lower type."""
    return [g.to(p.dtype) for p, g in zip(parameters, gradients, strict=True)]


class DeferredLayers:
    """Makes layers inside `module` deferred while `deferred` is set; without it they work as before.

    Left alone are subclasses and layers with a replaced forward, since it is not known what they do; layers whose
    weight is computed (weight norm); and layers with options that change the gradient's form (such as sparse
    embeddings).
    """

    def __init__(self, module: nn.Module) -> None:
        self.deferred: DeferredGradients | None = None
        self.parameters: list[nn.Parameter] = []
        self._layers: list[nn.Module] = []
        for layer in module.modules():
            apply = _deferred_forward(layer)
            if apply is not None:
                layer.forward = self._forward_of(layer, apply)  # type: ignore[assignment]
                self.parameters += [computed(p) for p in layer.parameters(recurse=False) if p.requires_grad]
                self._layers.append(layer)

    def undo(self) -> None:
        """Gives the layers their own forward back."""
        for layer in self._layers:
            del layer.forward
        self._layers.clear()

    @contextlib.contextmanager
    def on(self, deferred: DeferredGradients) -> Iterator[None]:
        """Within this context, the layers leave their weight gradients to `deferred`."""
        self.deferred = deferred
        try:
            yield
        finally:
            self.deferred = None

    def _forward_of(
        self, layer: nn.Module, apply: Callable[[Tensor, DeferredGradients], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        plain: Callable[[Tensor], Tensor] = layer.forward

        def forward(x: Tensor) -> Tensor:
            if self.deferred is None or not torch.is_grad_enabled():
                return plain(x)
            return apply(_as_autocast(x), self.deferred)

        return forward


def _deferred_forward(layer: nn.Module) -> Callable[[Tensor, DeferredGradients], Tensor] | None:
    """Returns the deferred forward of a layer, (input, deferred) → output; None: it can't be deferred."""
    if "forward" in vars(layer):
        return None
    own = compat.own_parameters(layer)
    computed = own.get("weight") is None or (hasattr(layer, "bias") and "bias" not in own)
    if computed or not any(p is not None and p.requires_grad for p in own.values()):
        return None
    if type(layer) is nn.Linear:
        return lambda x, deferred: _apply(_Linear, x, layer.weight, layer.bias, deferred)
    if type(layer) is _transposed():
        return lambda x, deferred: _apply(_Transposed, x, layer.weight, layer.bias, deferred)
    if type(layer) is nn.Embedding:
        if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
            return None
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        return lambda x, deferred: _apply(_DeferredEmbedding, x, layer.weight, padding, deferred)
    if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return None
        return lambda x, deferred: _apply(_Convolution, x, layer.weight, layer.bias, layer, deferred)
    return None


def _transposed() -> type[nn.Module] | None:
    """Returns Conv1D of transformers, if the process has imported it."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    out = function.apply(*args)  # type: ignore[no-untyped-call]
    assert isinstance(out, Tensor)
    return out


def _as_autocast(x: Tensor) -> Tensor:
    """Returns x as autocast would pass it to a matrix product or convolution."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return x.to(torch.get_autocast_dtype(kind))
    return x


# -- the three ways ----------------------------------------------------------------------------------

StrategyName = Literal["deferred", "torch", "fused"]


@dataclass
class MicroBatchState:
    """What one micro-batch holds from F to the end of W.

    inputs: leaves of the graph; those that require a gradient have it in `.grad` after I. late: no input requires a
    gradient. several: the input came as a tuple. outputs: in I, those that require a gradient; dys: their gradients
    ((None,) if the output is the loss). moves: what F changed in buffers. known: (parameter, gradient) that I has
    produced already. weight: see agent.stages.stage.Stage.weigh. seed: for random numbers in the backward of the last
    layer. deferred, groups: what `Deferred` and `TorchSplit` leave to W.
    """

    inputs: tuple[Tensor, ...]
    late: bool
    seed: BackwardSeed
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
    """A way to split the backward. It fills and empties a MicroBatchState. whole: I leaves nothing to W, unless the
    state is late. parameters: those whose gradients it computes."""

    name: StrategyName
    whole: bool
    parameters: list[nn.Parameter]

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        """Returns the context for the module's forward."""

    def input_backward(self, state: MicroBatchState) -> None:
        """Runs I: computes the gradients of the inputs, and others that come with them."""

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        """Runs W: adds every parameter's gradient to `sink`, at most once each."""

    def reads_parameters(self, state: MicroBatchState) -> bool:
        """Says whether W needs values of parameters, beside those that a backward of a whole module gathers."""

    def close(self) -> None:
        """Leaves the module as it was before."""


class Fused:
    """Runs one backward for both I and W."""

    name: StrategyName = "fused"
    whole = True

    def __init__(self, module: nn.Module) -> None:
        self.parameters = _trainable(module)

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def input_backward(self, state: MicroBatchState) -> None:
        if not state.late:
            state.known = _backward(state, self.parameters)

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        if state.late:
            state.known = _backward(state, self.parameters)
        for parameter, gradient in state.known:
            sink.add(parameter, gradient)
        state.known = []

    def reads_parameters(self, state: MicroBatchState) -> bool:
        return False

    def close(self) -> None:
        """Nothing was changed."""


class Deferred:
    """Computes the weight gradients of deferred layers in W; other parameters get theirs in I."""

    name: StrategyName = "deferred"
    whole = False

    def __init__(self, module: nn.Module) -> None:
        self.layers = DeferredLayers(module)
        self.parameters = _trainable(module)

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        return self.layers.on(state.deferred)

    def input_backward(self, state: MicroBatchState) -> None:
        # Activation checkpointing runs forwards inside the backward. These defer their gradients, too.
        with self.layers.on(state.deferred):
            state.known = _backward(state, self.parameters)

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        state.deferred.flush(sink, state.known)

    def reads_parameters(self, state: MicroBatchState) -> bool:
        return state.deferred.reads_parameters

    def close(self) -> None:
        self.layers.undo()


class TorchSplit:
    """Splits with stage_backward_input and stage_backward_weight of torch.distributed.pipelining."""

    name: StrategyName = "torch"
    whole = False

    def __init__(self, module: nn.Module) -> None:
        # Imported here, not at the top: most stages do without.
        self._of_inputs, self._of_weights = compat.split_backward()
        self.parameters = _trainable(module)

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def input_backward(self, state: MicroBatchState) -> None:
        if state.late:
            return
        # A view can't be detached in place, which is how torch's function frees the upper graph.
        outputs = [y.clone() if compat.is_view(y) else y for y in state.outputs]
        inputs = [x for x in state.inputs if x.requires_grad]
        dys = None if state.dys == (None,) else list(state.dys)
        state.seed.put()
        _, state.groups = self._of_inputs(outputs, dys, inputs, self.parameters)
        state.release()

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        if state.late:
            gradients = _backward(state, self.parameters)
        else:
            with _own_gradients(self.parameters) as gradients:
                # The graph is kept, since two groups of parameters may share a part of it.
                self._of_weights(self.parameters, state.groups, retain_graph=True)
        state.groups = []
        for parameter, gradient in gradients:
            sink.add(parameter, gradient)

    def reads_parameters(self, state: MicroBatchState) -> bool:
        # W runs parts of the graph again, without its beginning, which is where parameters are gathered.
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
    """Runs the whole graph's backward. Returns the gradients of the parameters that autograd knows of."""
    with _own_gradients(parameters) as gradients:
        if state.outputs:
            state.seed.put()
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
