"""Layers that torch's fully_shard (FSDP2) has split over the ranks of a worker: each holds a run of rows of every
parameter, and runs a part of each micro-batch of its own (agent.models.divided).

What fully_shard has said is kept: which parameters are put together at the same time (a unit), and who has which rows.
Its hooks are not: they know one forward and the backward that follows it, while here F, I and W of several
micro-batches are interleaved, and of W's gradients most are made without autograd. So a unit is put together here,
before its forward and before its backward, in memory that is there only for so long; and what W gives for a whole
parameter is summed over the ranks before it enters the iteration's sum, which holds this rank's rows. The sum over
ranks is of floats, in an order that is always the same, so every micro-batch still gives the same bits on whichever
worker it runs.

Gradients, optimizer state, snapshots, hand-over and checkpoints are those of the rows, which are the module's
parameters; splits of the backward (agent.stages.backward) work on the whole ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from openrecycle.agent.models import compat


class Sums(Protocol):
    """Where gradients go, once per parameter and micro-batch (see agent.stages.gradients)."""

    def add(self, tensor: Tensor, term: Tensor) -> None:
        """term: the gradient of `tensor`, a parameter."""

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        """The gradient is left @ right, which need not be computed apart from the sum."""

    def add_change(self, buffer: Tensor, change: Tensor) -> None:
        """change: what a forward has added to a buffer."""


def computed(parameter: nn.Parameter) -> nn.Parameter:
    """What a forward computes with, of a parameter of a module."""
    whole: nn.Parameter = getattr(parameter, "whole", parameter)
    return whole


class Shard:
    """A parameter of a unit. local: this rank's rows. whole: all of it, whose memory is there while the unit is
    together. owners: (module, name) of each place that has it."""

    def __init__(self, local: nn.Parameter, shape: torch.Size, owners: Sequence[tuple[nn.Module, str]]) -> None:
        self.local, self.owners = local, owners
        self.whole = nn.Parameter(torch.empty(shape, dtype=local.dtype, device=local.device), local.requires_grad)
        self.whole.untyped_storage().resize_(0)
        local.whole = self.whole  # type: ignore[attr-defined]
        self._row = shape[1:].numel()
        self._rows = shape[0]

    def each(self, ranks: int) -> int:
        """Elements that any rank holds at most."""
        return -(-self._rows // ranks) * self._row

    def runs(self, ranks: int) -> list[tuple[int, int]]:
        """Of each rank the elements of `whole` that it holds, as torch.chunk divides rows."""
        most = -(-self._rows // ranks)
        return [(min(r * most, self._rows) * self._row, min((r + 1) * most, self._rows) * self._row)
                for r in range(ranks)]  # fmt: skip


class Unit:
    """What one call of fully_shard has put together: it is gathered, and released, at the same time.

    module: the one that was passed. group: of the ranks.
    """

    def __init__(self, module: nn.Module, shards: Sequence[Shard], group: Any) -> None:
        self.shards, self._group = list(shards), group
        self._ranks, self._rank = group.size(), group.rank()
        self.together = self._in_backward = False
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after)

    def gather(self) -> None:
        """Puts the parameters together, where they are not. Raises RuntimeError where another rank has gone."""
        if self.together:
            return
        self.together = True
        for some in _alike(self.shards):
            bounds = _bounds(shard.each(self._ranks) for shard in some)
            mine = torch.zeros(bounds[-1][1], dtype=some[0].local.dtype, device=some[0].local.device)
            for shard, (start, _) in zip(some, bounds, strict=True):
                mine[start : start + shard.local.numel()] = shard.local.detach().reshape(-1)
            rows = mine.new_empty(self._ranks, mine.numel())
            compat.all_gather(rows.view(-1), mine, self._group)
            for shard, (start, _) in zip(some, bounds, strict=True):
                storage = shard.whole.untyped_storage()
                storage.resize_(shard.whole.numel() * shard.whole.element_size())
                # By way of `data`: what autograd has kept of it counts as unchanged, and has the same values again.
                flat = shard.whole.data.view(-1)
                for row, (a, b) in zip(rows, shard.runs(self._ranks), strict=True):
                    flat[a:b] = row[start : start + b - a]
        self._show(whole=True)

    def release(self) -> None:
        """Gives up the memory of what was gathered."""
        if self.together:
            self._show(whole=False)
            for shard in self.shards:
                shard.whole.untyped_storage().resize_(0)
        self.together = self._in_backward = False

    def reduced(self, gradients: dict[int, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
        """Of this rank's rows the sum of all ranks' gradients. gradients: by id of the whole parameter; one that no
        rank has is not in the answer."""
        out = []
        for some in _alike([shard for shard in self.shards if shard.local.requires_grad]):
            wide = _wide(some[0].local.dtype)
            bounds = _bounds(shard.each(self._ranks) for shard in some)
            width = bounds[-1][1]
            # Behind each rank's rows, which parameters have a gradient here.
            rows = torch.zeros(self._ranks, width + len(some), dtype=wide, device=some[0].local.device)
            for place, (shard, (start, _)) in enumerate(zip(some, bounds, strict=True)):
                gradient = gradients.get(id(shard.whole))
                if gradient is None:
                    continue
                flat = gradient.detach().reshape(-1)
                for row, (a, b) in zip(rows, shard.runs(self._ranks), strict=True):
                    row[start : start + b - a] = flat[a:b]
                rows[:, width + place] = 1
            mine = rows.new_empty(rows.shape[1])
            compat.reduce_scatter(mine, rows.view(-1), self._group)
            for given, shard, (start, _) in zip(mine[width:].tolist(), some, bounds, strict=True):
                if given:
                    out.append((shard.local, mine[start : start + shard.local.numel()].view(shard.local.shape)))
        return out

    def _show(self, *, whole: bool) -> None:
        for shard in self.shards:
            for module, name in shard.owners:
                compat.own_parameters(module)[name] = shard.whole if whole else shard.local

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.gather()
        return _through(self._leave_backward, args, kwargs) if torch.is_grad_enabled() else (args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._in_backward:  # else it is computed again, under activation checkpointing
            self.release()
        if torch.is_grad_enabled():
            for tensor in _with_gradient(output):
                tensor.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]
        return output

    def _enter_backward(self, gradient: Tensor) -> None:
        self.gather()
        self._in_backward = True

    def _leave_backward(self) -> None:
        self.release()


class Layer:
    """What the ranks of a worker do together for one layer. units: in the order in which they are run. replicated:
    parameters that each rank has the whole of; their gradients are summed, too."""

    def __init__(self, units: Sequence[Unit], replicated: Sequence[nn.Parameter], group: Any) -> None:
        self.units, self.replicated, self.group = list(units), list(replicated), group


class OverRanks:
    """Of a stage whose micro-batches are divided over the ranks of its worker; of another one it does nothing."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self._layers: list[Layer] = [layer.over_ranks for layer in layers if hasattr(layer, "over_ranks")]
        self._units = [unit for layer in self._layers for unit in layer.units]

    @contextlib.contextmanager
    def op(self, *, together: bool = False) -> Iterator[None]:
        """Around an op: nothing is left together. together: all of it is, from the beginning."""
        try:
            if together:
                for unit in self._units:
                    unit.gather()
            yield
        finally:
            for unit in self._units:
                unit.release()

    @contextlib.contextmanager
    def summed(self, sums: Sums) -> Iterator[Sums]:
        """What is added within is added to `sums` at the end, summed over the ranks: all of it, or where an exchange
        breaks nothing."""
        if not self._layers:
            yield sums
            return
        sink = _Reduction(self._units, [p for layer in self._layers for p in layer.replicated], self._layers[0].group)
        yield sink
        sink.close(sums)


class _Reduction:
    """Takes one micro-batch's gradients of whole parameters, and gives those of this rank's rows to a sum.

    Units are exchanged in the same order on all ranks, that of a backward, each as soon as it is complete, so that its
    gradients' memory is there for as short a time as can be.
    """

    def __init__(self, units: Sequence[Unit], replicated: Sequence[nn.Parameter], group: Any) -> None:
        self._waiting = list(units)  # the last is the next one
        self._group, self._ranks = group, group.size()
        self._replicated = [p for p in replicated if p.requires_grad]
        self._gradients: dict[int, Tensor] = {}
        self._changes: list[tuple[Tensor, Tensor]] = []
        self._reduced: list[tuple[nn.Parameter, Tensor]] = []

    def add(self, tensor: Tensor, term: Tensor) -> None:
        self._gradients[id(tensor)] = term.detach()
        while self._waiting and all(
            id(s.whole) in self._gradients for s in self._waiting[-1].shards if s.local.requires_grad
        ):
            self._reduce(self._waiting.pop())

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        self.add(tensor, (left.detach() @ right.detach()).to(tensor.dtype))

    def add_change(self, buffer: Tensor, change: Tensor) -> None:
        """Their mean over the ranks counts."""
        self._changes.append((buffer, change))

    def close(self, sums: Sums) -> None:
        while self._waiting:
            self._reduce(self._waiting.pop())
        same = [(p, self._gradients.get(id(p))) for p in self._replicated]
        for dtype in sorted({_wide(p.dtype) for p, _ in same}, key=str):
            some = [(p, g) for p, g in same if _wide(p.dtype) == dtype]
            zeros = [torch.zeros(p.shape, dtype=dtype, device=p.device) if g is None else g for p, g in some]
            flags = torch.tensor([float(g is not None) for _, g in some], dtype=dtype).to(some[0][0].device)
            flat = torch.cat([*(g.reshape(-1).to(dtype) for g in zeros), flags])
            compat.all_reduce(flat, self._group)
            *parts, given_by = torch.split(flat, [*(p.numel() for p, _ in some), len(some)])
            for (parameter, _), part, given in zip(some, parts, given_by.tolist(), strict=True):
                if given:
                    self._reduced.append((parameter, part.view(parameter.shape)))
        if self._changes:
            flat = torch.cat([change.reshape(-1).to(torch.float64) for _, change in self._changes])
            compat.all_reduce(flat, self._group)
            means = torch.split(flat.div_(self._ranks), [change.numel() for _, change in self._changes])
            for (buffer, change), mean in zip(self._changes, means, strict=True):
                sums.add_change(buffer, mean.view(change.shape))
        for parameter, term in self._reduced:
            sums.add(parameter, term)

    def _reduce(self, unit: Unit) -> None:
        self._reduced += unit.reduced(self._gradients)
        for shard in unit.shards:
            self._gradients.pop(id(shard.whole), None)


class _Through(torch.autograd.Function):
    """Passes tensors on; what comes back through it has passed all that was computed with them."""

    @staticmethod
    def forward(ctx: Any, passed: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passed = passed
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.passed()
        return None, *gradients


def _through(passed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments. passed: is called when all that was computed with them has had its backward."""
    leaves, form = compat.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if places:
        on = _Through.apply(passed, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, on, strict=True):
            leaves[place] = tensor
    out: tuple[tuple[Any, ...], dict[str, Any]] = compat.tree_unflatten(leaves, form)
    return out


def _with_gradient(output: Any) -> list[Tensor]:
    return [leaf for leaf in compat.tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]


def _alike(shards: Sequence[Shard]) -> list[list[Shard]]:
    """By type, in order: what is exchanged at once."""
    out: dict[torch.dtype, list[Shard]] = {}
    for shard in shards:
        out.setdefault(shard.local.dtype, []).append(shard)
    return list(out.values())


def _bounds(sizes: Iterable[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(sizes, initial=0)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of that type are summed over ranks."""
    return torch.promote_types(dtype, torch.float32)
