"""Layers that are split over the ranks of a worker, as the workload's `parallelize` says: by tensor parallelism; by
fully_shard, where micro-batches are divided as well; or by both, over a mesh of two dimensions.

`parallelize` uses torch's own functions, which turn the parameters of a layer into DTensors: parallelize_module and its
plans (tensor parallel: each rank runs every sample), or fully_shard (data parallel: each rank runs a part of the
samples). But sums, steps, snapshots, hand-over and checkpoints work on plain tensors. So the module's parameter is this
rank's part of it, under the same name. With tensor parallelism, the part becomes a DTensor whenever the module reads
it, as in torchtitan's simple FSDP. Autograd gives the part its gradient, summed over the ranks where the parameter is
replicated and its gradient is not.

Fully sharded (FSDP2): each rank holds a run of rows of every parameter, and runs its own part of each micro-batch. Two
things are kept of what fully_shard has set up: which parameters are gathered at the same time (a unit), and which rank
has which rows. Its hooks are removed. They know one forward and the backward that follows it, while here F, I and W of
several micro-batches are interleaved, and most of W's gradients are made without autograd. So this file gathers a unit
before its forward and before its backward, in memory that is released afterwards. The gradient that W gives for a whole
parameter is summed over the ranks before it is added to the iteration's sum, which holds this rank's rows. This sum
over ranks is of floats, but always in the same order, so a micro-batch gives the same bits on whichever worker it runs.

The splits of the backward (agent.stages.backward) work on the whole parameters.

Divided micro-batches: rank r of R ranks gets the r-th of R equal runs of samples, which is that part of dimension 0 of
every tensor of inputs and targets. Each rank reads the whole micro-batch and keeps its part. The loss is the mean over
all ranks, which all of them know. Gradients are summed over the ranks.

Both, over a mesh of D x T ranks (`dp` and `tp`): micro-batches are divided into D parts, each of which T ranks run. A
rank holds rows of its tensor-parallel part. A unit gathers that part from the D ranks that have rows of it, and the
module reads it as a DTensor over the T others. What is not tensor parallel, all T ranks hold and sum alike: their
groups sum the same places in messages of the same sizes, and so in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.config.settings import spelled
from openrecycle.agent.models import compat
from openrecycle.agent.models.data import reseed
from openrecycle.agent.models.layers import (
    LayerStack,
    build_layer,
    copied,
    first_names,
    kind_of,
    nothing,
    owner_names,
    state_names,
    tied_of,
    without_memory,
)
from openrecycle.agent.models.state import Block, Split, StateError
from openrecycle.agent.models.workload import Metric, Workload
from openrecycle.planner.jobs.errors import InputError, in_a_line

# -- layers that fully_shard (FSDP2) has split over the ranks of a worker -----------------------


class Sums(Protocol):
    """Where gradients go, once per parameter and micro-batch. agent.stages.gradients has such sums."""

    def add(self, tensor: Tensor, term: Tensor) -> None:
        """term: the gradient of `tensor`, a parameter."""

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        """Adds the gradient left @ right, which need not be computed apart from the sum."""

    def add_change(self, buffer: Tensor, change: Tensor) -> None:
        """change: what a forward has added to a buffer."""


def computed(parameter: nn.Parameter) -> nn.Parameter:
    """Returns what a forward computes with in place of a module's parameter: the whole one, where it is sharded."""
    whole: nn.Parameter = getattr(parameter, "whole", parameter)
    return whole


class Shard:
    """A parameter of a unit. local: this rank's rows. whole: the whole parameter, which has memory only while the unit
    is gathered. owners: (module, name) of each place that has the parameter."""

    def __init__(self, local: nn.Parameter, shape: torch.Size, owners: Sequence[tuple[nn.Module, str]]) -> None:
        self.local, self.owners = local, owners
        self.whole = nn.Parameter(torch.empty(shape, dtype=local.dtype, device=local.device), local.requires_grad)
        self.whole.untyped_storage().resize_(0)
        local.whole = self.whole  # type: ignore[attr-defined]
        self._row = shape[1:].numel()
        self._rows = shape[0]

    def each(self, ranks: int) -> int:
        """Returns the largest number of elements that any rank holds."""
        return -(-self._rows // ranks) * self._row

    def runs(self, ranks: int) -> list[tuple[int, int]]:
        """Returns for each rank the start and end of the elements of `whole` that it holds. Rows are divided as by
        torch.chunk."""
        most = -(-self._rows // ranks)
        return [(min(r * most, self._rows) * self._row, min((r + 1) * most, self._rows) * self._row)
                for r in range(ranks)]  # fmt: skip


class Unit:
    """The parameters of one call of fully_shard. They are gathered, and released, at the same time.

    module: the one that was passed to fully_shard. group: the group of the ranks. together: are they gathered?
    """

    def __init__(self, module: nn.Module, shards: Sequence[Shard], group: Any) -> None:
        self.shards, self._group = list(shards), group
        self._ranks = group.size()
        self.together = self._in_backward = False
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after)

    def gather(self) -> None:
        """Gathers the parameters, unless they are gathered. Raises RuntimeError where another rank is gone."""
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
                shard.whole.untyped_storage().resize_(shard.whole.nbytes)
                # Through `data`, so that autograd sees no change: what it saved gets the same values again.
                flat = shard.whole.data.view(-1)
                for row, (a, b) in zip(rows, shard.runs(self._ranks), strict=True):
                    flat[a:b] = row[start : start + b - a]
        self._show(whole=True)

    def release(self) -> None:
        """Frees the memory of the gathered parameters."""
        if self.together:
            self._show(whole=False)
            for shard in self.shards:
                shard.whole.untyped_storage().resize_(0)
        self.together = self._in_backward = False

    def reduced(self, gradients: dict[int, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns this rank's rows of the gradients, summed over all ranks, with their parameters. gradients: by id of
        the whole parameter. A parameter for which no rank has a gradient is left out."""
        out = []
        for some in _alike([shard for shard in self.shards if shard.local.requires_grad]):
            wide = _wide(some[0].local.dtype)
            bounds = _bounds(shard.each(self._ranks) for shard in some)
            width = bounds[-1][1]
            # Behind the rows come flags that say which parameters have a gradient on this rank.
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
        return _through(self.release, args, kwargs) if torch.is_grad_enabled() else (args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._in_backward:  # within a backward, activation checkpointing runs the forward again
            self.release()
        if torch.is_grad_enabled():
            for tensor in _with_gradient(output):
                tensor.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]
        return output

    def _enter_backward(self, gradient: Tensor) -> None:
        self.gather()
        self._in_backward = True


class Layer:
    """What the ranks of a worker share for one layer. units: in the order in which they run. replicated: parameters
    that every rank has whole; their gradients are summed over the ranks, too."""

    def __init__(self, units: Sequence[Unit], replicated: Sequence[nn.Parameter], group: Any) -> None:
        self.units, self.replicated, self.group = list(units), list(replicated), group


class OverRanks:
    """Runs the ops of a stage whose micro-batches are divided over ranks. For any other stage it does nothing."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self._layers: list[Layer] = [layer.over_ranks for layer in layers if hasattr(layer, "over_ranks")]
        self._units = [unit for layer in self._layers for unit in layer.units]

    @contextlib.contextmanager
    def op(self, *, together: bool = False) -> Iterator[None]:
        """Runs an op inside the block, and releases all units after it. together: gather them all before it."""
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
        """Yields sums to add to. At the end of the block all of it is added to `sums`, summed over the ranks; if an
        exchange breaks, nothing is."""
        if not self._layers:
            yield sums
            return
        sink = _RankReduction(
            self._units, [p for layer in self._layers for p in layer.replicated], self._layers[0].group
        )
        yield sink
        sink.close(sums)


class _RankReduction:
    """Takes the gradients of one micro-batch for whole parameters, and gives those of this rank's rows to a sum.

    All ranks exchange the units in the same order, that of a backward. Each unit is exchanged as soon as it is
    complete, so that the memory of its gradients is soon free again.
    """

    def __init__(self, units: Sequence[Unit], replicated: Sequence[nn.Parameter], group: Any) -> None:
        self._waiting = list(units)  # the last one is exchanged next
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
        """Notes a change of a buffer; the mean over the ranks is added."""
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
    """Passes tensors on. When its backward runs, everything that was computed with them has had its backward."""

    @staticmethod
    def forward(ctx: Any, passed: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passed = passed
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.passed()
        return None, *gradients


def _through(passed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the same arguments. `passed` is called when all that was computed with them has had its backward."""
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
    """Groups shards by type, in order. Each group is one exchange."""
    out: dict[torch.dtype, list[Shard]] = {}
    for shard in shards:
        out.setdefault(shard.local.dtype, []).append(shard)
    return list(out.values())


def _bounds(sizes: Iterable[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(sizes, initial=0)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which gradients of this type are summed over ranks."""
    return torch.promote_types(dtype, torch.float32)


# -- micro-batches that are divided over the ranks of a worker ----------------------------------

Gather = Callable[[Tensor], Tensor]
"""A function that returns the numbers of all ranks, which all have one shape: (ranks, ...)."""


class DividedBatches:
    """A workload that returns only the part of `rank` of each micro-batch. All else is passed on to `workload`. gather:
    among the ranks; None: nothing will be computed."""

    def __init__(self, workload: Workload, rank: int, ranks: int, gather: Gather | None = None) -> None:
        self._workload, self._rank, self._ranks, self._gather = workload, rank, ranks, gather
        shape, declared = (getattr(workload, name, None) for name in ("stage_output_shape", "stage_io"))
        if shape is not None:
            self.stage_output_shape = (_samples_of_a_rank(shape[0], ranks), *shape[1:])
        if declared is not None:
            self.stage_io = tuple(
                tuple(
                    replace(spec, shape=(_samples_of_a_rank(spec.shape[0], ranks), *spec.shape[1:]))
                    for spec in boundary
                )
                for boundary in declared
            )
        data = getattr(workload, "evaluation", None)
        if data is not None:
            self.evaluation = _DividedEvaluation(self, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        return self.part(self._workload.inputs(seed, iteration, pipeline, micro_batch))

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        return self.part(self._workload.targets(seed, iteration, pipeline, micro_batch))

    def largest(self, seed: int) -> tuple[Any, Any]:
        inputs, targets = self._workload.largest(seed)  # type: ignore[attr-defined]
        return self.part(inputs), self.part(targets)

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Returns the mean over the whole micro-batch; its gradient is that of this rank's part."""
        return self._mean(self._workload.loss, output, targets)

    def weight(self, targets: Any) -> float:
        """Returns the weight of the whole micro-batch."""
        return float(self._gathered(self._own_weight(targets)).sum())

    def measured(self, metric: Metric) -> Metric:
        """Returns a metric of the whole micro-batch, made of one of the parts."""
        return lambda output, targets: self._mean(metric, output, targets)

    def part(self, data: Any) -> Any:
        """Returns this rank's part of the inputs or targets of a micro-batch. Raises InputError."""
        if isinstance(data, Tensor):
            if not data.dim():
                raise InputError("data", "a tensor of no dimensions", "samples in dimension 0, to divide over ranks")
            each = _samples_of_a_rank(data.shape[0], self._ranks)
            return data[self._rank * each : (self._rank + 1) * each]
        if isinstance(data, Mapping):
            return type(data)((key, self.part(value)) for key, value in data.items())  # type: ignore[call-arg]
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*map(self.part, data))
        if isinstance(data, (tuple, list)):
            return type(data)(map(self.part, data))
        return data

    def _own_weight(self, targets: Any) -> float:
        weighted = getattr(self._workload, "usual_weight", None) is not None
        return float(self._workload.weight(targets)) if weighted else 1.0  # type: ignore[attr-defined]

    def _mean(self, measure: Callable[[Any, Any], Any], output: Any, targets: Any) -> Tensor:
        """Returns the weighted mean of a measure over the ranks. If it raises here, the other ranks, which wait for
        this one, get NaN."""
        error, weight = None, 0.0
        own = torch.full((), math.nan)
        try:
            weight = self._own_weight(targets)
            found = measure(output, targets) if weight else nothing(output)
            own = found if isinstance(found, Tensor) else torch.tensor(float(found))
        except Exception as caught:
            error, weight = caught, 1.0
        # On the CPU, where the weights are.
        told = torch.tensor([float(own.detach()), weight], dtype=torch.float64)
        values, weights = self._gathered(told).unbind(1)
        if error is not None:
            raise error
        total = float(weights.sum())
        mean = (values * weights).sum() / total if total else values.sum()
        return _Mean.apply(own, mean, weight / total if total else 0.0)  # type: ignore[no-any-return, no-untyped-call]

    def _gathered(self, numbers: Tensor | float) -> Tensor:
        assert self._gather is not None, "there is nobody to gather from"
        return self._gather(torch.as_tensor(numbers, dtype=torch.float64))


class _DividedEvaluation:
    """EvaluationData that returns this rank's part, as DividedBatches does."""

    def __init__(self, batches: DividedBatches, data: Any) -> None:
        self._batches, self._data = batches, data
        self.micro_batches: int = data.micro_batches
        self.metrics: Mapping[str, Metric] = {name: batches.measured(m) for name, m in data.metrics.items()}

    def inputs(self, seed: int, index: int) -> Any:
        return self._batches.part(self._data.inputs(seed, index))

    def targets(self, seed: int, index: int) -> Any:
        return self._batches.part(self._data.targets(seed, index))


class _Mean(torch.autograd.Function):
    """The mean that all ranks have, in which this rank's own number counts `share`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mean: Tensor, share: float) -> Tensor:
        ctx.share, ctx.dtype, ctx.shape = share, own.dtype, own.shape
        return mean.to(own.device, own.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return (gradient * ctx.share).to(ctx.dtype).expand(ctx.shape), None, None


def _samples_of_a_rank(samples: int, ranks: int) -> int:
    """Raises InputError."""
    if samples % ranks:
        raise InputError(
            "data",
            f"size {samples} in dimension 0",
            f"a multiple of {ranks}: micro-batches are divided into {ranks} equal parts, which ranks run at the same "
            "time (layers are fully sharded, or `platform.mesh` has two dimensions)",
        )
    return samples // ranks


# -- a workload whose layers are split over the ranks of a worker -------------------------------

Way = Literal["whole", "tensor", "data"]
"""How a layer is split over ranks: not; by parallelize_module; by fully_shard (or over a mesh of two dimensions)."""
FIELD = "parallelize"


class OtherRankError(RuntimeError):
    """Another rank of this worker could not build a layer. That rank has reported the reason."""


class Parallelized:
    """A workload each of whose layers is built as this rank's part of it. All else is passed on to `workload`.

    mesh: a DeviceMesh of the worker's ranks. gather: among these ranks. divided: are micro-batches divided over the
    mesh's first dimension, too (see `parts_of_a_rank`)?
    """

    def __init__(self, workload: Workload, mesh: Any, gather: Gather, *, divided: bool) -> None:
        self._workload, self._mesh, self.divided = workload, mesh, divided
        self._gather, self._part = gather, mesh.get_coordinate()[0]
        self._device = torch.device(mesh.device_type)
        compat.keep_random_states(mesh)
        if divided:

            def of_parts(numbers: Tensor) -> Tensor:
                # The ranks of one part say the same, except that one may say NaN, which amax then returns.
                rows = gather(numbers)
                return rows.view(mesh.shape[0], -1, *rows.shape[1:]).amax(1)

            self._workload = DividedBatches(workload, self._part, mesh.shape[0], of_parts)
        # Either build_stage or build_layer, as the workload has it: others see by that what the model comes in.
        name = "build_stage" if kind_of(workload) == "stage" else "build_layer"
        setattr(self, name, self._build)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def _build(self, layer: int, layers: int, seed: int) -> nn.Module:
        problem: Exception | None = None
        try:
            # A copy, since a workload that was given modules returns the same one each time.
            built = copy.deepcopy(build_layer(self._workload, layer, layers, seed))
        except Exception as error:
            problem = error
        # All ranks must know of a failure: in `parallelize` they would wait for the rank that does not come.
        failed = self._gather(torch.tensor([int(problem is not None)]))
        if problem is not None:
            raise problem
        if failed.any():
            raise OtherRankError(f"another rank of this worker could not build layer {layer}")
        module: nn.Module = self._workload.parallelize(built, self._mesh)  # type: ignore[attr-defined]
        module = module if module is not None else built
        if not self.divided:
            return _local(module, self._mesh)
        module = _divided(module, self._mesh)
        # Each part has its own samples, and so its own random numbers.
        module.register_forward_pre_hook(self._seed)
        return module

    def _seed(self, module: nn.Module, args: Any) -> None:
        reseed(seed_for("rank", torch.default_generator.initial_seed(), self._part), self._device)


def parts_of_a_rank(
    workload: Workload, layers: int, shape: Sequence[int], seed: int
) -> tuple[bool, list[list[tuple[str, nn.Parameter]]]]:
    """Finds out whether micro-batches are divided over the ranks of a worker, which they are if the mesh has two
    dimensions or `parallelize` fully shards any layer. Also returns what the first rank holds: for each layer its
    parameters, by name, without memory. For this `parallelize` is called on modules without memory, in an imagined
    group. shape: of the mesh. Raises InputError for what can't be run."""
    with spelled(owner_names(workload)):
        return _parts_of_a_rank(workload, layers, shape, seed)


def _parts_of_a_rank(
    workload: Workload, layers: int, shape: Sequence[int], seed: int
) -> tuple[bool, list[list[tuple[str, nn.Parameter]]]]:
    ways: dict[Way, int] = {}
    parts = []
    tied = tied_of(workload, layers)
    members, splits = {name for group in tied for name in group}, dict[str, dict[str, Any]]()
    with compat.imagined_ranks(*shape) as mesh:
        for layer in range(layers):
            built = without_memory(functools.partial(build_layer, workload, layer, layers, seed))
            _check_computed(built, f"{kind_of(workload)}s", layer)
            built = copied(built, lambda t: torch.empty_like(t, device="meta"))
            shared = [pair for pair in first_names(built).items() if pair[0] != pair[1]]
            try:
                made: nn.Module = workload.parallelize(built, mesh)  # type: ignore[attr-defined]
            except Exception as error:
                expected = f"a function that splits layer {layer} over {'x'.join(map(str, shape))} ranks"
                raise InputError(FIELD, in_a_line(error)[:200], expected) from error
            made = made if made is not None else built
            ways.setdefault(_way(made, layer, mesh), layer)
            _check_shared(made, shared, layer)
            # The names are those that a stage uses: a wrapper may hide the name that it adds in front of them.
            for full, parameter in LayerStack({layer: made}).named_parameters(remove_duplicate=False):
                if full in members:
                    splits[full] = _split_by(parameter)
            held = ((f"{layer}.{name}", p, getattr(p, "to_local", p.detach)()) for name, p in made.named_parameters())
            parts.append([(name, nn.Parameter(local.detach(), p.requires_grad)) for name, p, local in held])
    if "data" in ways and "tensor" in ways:
        got = f"layer {ways['data']} by fully_shard, layer {ways['tensor']} by parallelize_module"
        raise InputError(FIELD, got, f"one of the two for all layers{_OR_BOTH}")
    for group in tied:
        if gone := next((name for name in group if name not in splits), None):
            expected = "names that `parallelize` leaves alone: a wrapper changes them, and layer.compile() does not"
            raise InputError("tied", f"{gone}, which is not there after `parallelize`", expected)
        for one, other in pairwise(group):
            if splits[one] != splits[other]:
                raise InputError("tied", f"{one} and {other}, split in different ways", "the same split of both")
    return "data" in ways, parts


_OR_BOTH = ", or both over a mesh of two dimensions (`platform.mesh`)"


def _way(module: nn.Module, layer: int, mesh: Any) -> Way:
    """Returns how a layer is split. Raises InputError for a split that can't be run."""
    units = compat.fully_sharded_units(module)
    split: list[tuple[str, Any]] = [(name, p) for name, p in module.named_parameters() if hasattr(p, "placements")]
    given = _lines(mesh, named=mesh.ndim == 2)
    for name, parameter in split:
        # After a failure only the groups of the given mesh are connected anew, and here they are known by their names.
        if not _lines(parameter.device_mesh, named=mesh.ndim == 2) <= given:
            got = f"{layer}.{name} over another mesh, of shape {tuple(parameter.device_mesh.shape)}"
            raise InputError(FIELD, got, "a split over the mesh given, which `platform.mesh` gives two dimensions")
    if not units and mesh.ndim == 1:
        return "tensor" if split else "whole"
    within = {id(p) for unit in units for p in unit.parameters()}
    for name, parameter in split:
        if mesh.ndim == 1 and id(parameter) not in within:
            got = f"{layer}.{name} by parallelize_module, others of the layer by fully_shard"
            raise InputError(FIELD, got, f"one of the two for all layers{_OR_BOTH}")
        if not _runs(parameter, mesh, sharded=id(parameter) in within):
            how = ", ".join(map(str, parameter.placements))
            got = f"{layer}.{name} of shape {tuple(parameter.shape)} as {how}"
            expected = "fully_shard(layer, mesh=mesh), with the mesh given, which splits dimension 0"
            if mesh.ndim == 2:
                expected = (
                    'parallelize_module(..., mesh["tp"], ...), in equal parts, and then fully_shard(..., '
                    'mesh=mesh["dp"]), which splits dimension 0'
                )
            raise InputError(FIELD, got, expected)
    for unit in units:
        if other := compat.other_policies(unit):
            got = f"fully_shard(..., {other}) in layer {layer}"
            raise InputError(FIELD, got, "fully_shard without it; `optimization.autocast` sets the types to compute in")
    return "data"


def _check_computed(module: nn.Module, field: str, layer: int) -> None:
    """Raises InputError for a module that computes what it reads as its parameter in each forward: torch can neither
    copy it nor split what it computes."""
    for name, part in module.named_modules():
        computed = [key for key, value in vars(part).items() if isinstance(value, Tensor) and value.grad_fn is not None]
        innermost = next(part.children(), None) is None
        if computed or (innermost and prune.is_pruned(part)):
            got = f"{type(part).__name__}, {name or 'which is the whole'} of {field[:-1]} {layer}, which computes "
            got += ", ".join(computed or ["a parameter"])
            expected = (
                "with several ranks, parameters that modules read as they are: end pruning with "
                "torch.nn.utils.prune.remove, and weight_norm or spectral_norm likewise"
            )
            raise InputError(field, got, expected)


def _check_shared(module: nn.Module, shared: Iterable[tuple[str, str]], layer: int) -> None:
    """Raises InputError if a parameter is no longer shared. parallelize_module makes a new parameter for each module
    that its plan names, and these would be trained apart. shared: pairs of names that had one parameter before
    `module` was split."""
    named = dict(module.named_parameters(remove_duplicate=False))
    for one, other in shared:
        if one in named and other in named and named[one] is not named[other]:
            got = f"layer {layer}, where {other} and {one} are one parameter before it and two after"
            raise InputError(FIELD, got, f"what sets {one} to {other}'s parameter again after parallelize_module")


def _lines(mesh: Any, *, named: bool) -> set[tuple[str | None, str]]:
    """Returns the dimensions of a mesh: the name of each, if `named`, and its group."""
    groups = [group.group_name for group in mesh.get_all_groups()]
    names = mesh.mesh_dim_names if named else None
    return set(zip(names or [None] * len(groups), groups, strict=True))


def _split_by(parameter: Any) -> dict[str, Any]:
    """Returns the groups that a parameter is split over, with how it is split."""
    if not hasattr(parameter, "placements"):
        return {}
    groups = (group.group_name for group in parameter.device_mesh.get_all_groups())
    return {group: p for group, p in zip(groups, parameter.placements, strict=True) if not p.is_replicate()}


def _runs(parameter: Any, mesh: Any, *, sharded: bool) -> bool:
    """Can this DTensor be run in a job with divided micro-batches? sharded: has fully_shard split it?"""
    if mesh.ndim == 1:
        return all(p.is_shard(0) for p in parameter.placements)
    rows, ranks = mesh.mesh_dim_names
    over = dict(zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True))
    if (rows in over) != sharded or (sharded and _cut(over[rows]) != 0):
        return False
    if (tensor := over.get(ranks)) is None or tensor.is_replicate():
        return True
    # With unequal parts, ranks would sum what all of them hold in different orders.
    return tensor.is_shard() and parameter.shape[tensor.dim] % mesh[ranks].size() == 0  # type: ignore[no-any-return]


def _cut(placement: Any) -> int | None:
    """Returns the dimension of a tensor that a placement splits; None if it splits none."""
    dimension: int | None = getattr(placement, "dim", None)
    return dimension


def _divided(module: nn.Module, mesh: Any) -> nn.Module:
    """Prepares a module of a job with divided micro-batches, in place: its parameters become this rank's rows, which
    are gathered when it runs. For parameters that are tensor parallel as well, they are rows of this rank's part."""
    group = mesh.get_group(0)
    units = []
    for part in reversed(compat.fully_sharded_units(module)):  # inner units before those that contain them
        compat.take_off_hooks(part)
        owners: dict[int, tuple[Any, list[tuple[nn.Module, str]]]] = {}
        for owner in part.modules():
            for name, parameter in compat.own_parameters(owner).items():
                if hasattr(parameter, "placements"):
                    owners.setdefault(id(parameter), (parameter, []))[1].append((owner, name))
        shards = []
        for parameter, places in owners.values():
            local = _part_of(parameter, mesh)
            together = local.placed.gathered  # type: ignore[attr-defined]
            shards.append(Shard(local, parameter.shape if together is None else together.part_shape, places))
            for owner, name in places:
                compat.own_parameters(owner)[name] = local
                if together is not None:
                    owner.__class__ = _reading(type(owner), {name: together})
        if shards:
            units.append(Unit(part, shards, group))
    held = {id(shard.local) for unit in units for shard in unit.shards}
    _local(module, mesh)
    replicated = [p for p in module.parameters() if id(p) not in held]
    module.over_ranks = Layer(units[::-1], replicated, group)  # type: ignore[assignment]
    return module


def _part_of(parameter: Any, mesh: Any) -> nn.Parameter:
    """Returns this rank's part of a DTensor."""
    # A copy, since a view would keep all of the memory alive.
    local = parameter.to_local().detach().clone(memory_format=torch.contiguous_format)
    own = nn.Parameter(local, parameter.requires_grad)
    own.placed = placed = _SplitOf(  # type: ignore[attr-defined]
        parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    )
    _mark(own, mesh, placed)
    return own


def _local(module: nn.Module, mesh: Any) -> nn.Module:
    """Replaces the DTensor parameters of a module, in place, by this rank's parts, which are DTensors when read."""
    from torch.distributed.tensor import DTensor  # takes a second to import, and most jobs do not need it

    parts: dict[int, nn.Parameter] = {}
    for part in list(module.modules()):
        split: dict[str, _SplitOf] = {}
        for name, parameter in list(compat.own_parameters(part).items()):
            if parameter is None or hasattr(parameter, "placed"):
                continue
            if not isinstance(parameter, DTensor):
                _mark(parameter, mesh)
                continue
            if id(parameter) not in parts:
                parts[id(parameter)] = _part_of(parameter, mesh)
            compat.own_parameters(part)[name] = own = parts[id(parameter)]
            split[name] = own.placed  # type: ignore[attr-defined]
        if split:
            part.__class__ = _reading(type(part), split)
    return module


def _mark(parameter: nn.Parameter, mesh: Any, placed: _SplitOf | None = None) -> None:
    """Sets `duplicate`: is another rank, the first of those that hold the same, responsible for this parameter? That
    rank counts it in the norm of the gradients and writes it into checkpoints."""
    numbers, alike = mesh.get_coordinate(), [True] * mesh.ndim
    if placed is not None and mesh.ndim == 1:
        alike = [not placed.split]
    elif placed is not None:
        cut = {
            name for name, p in zip(placed.mesh.mesh_dim_names, placed.placements, strict=True) if not p.is_replicate()
        }
        alike = [name not in cut for name in mesh.mesh_dim_names]
    parameter.duplicate = any(same and number for same, number in zip(alike, numbers, strict=True))  # type: ignore[attr-defined]


class _SplitOf:
    """How a DTensor is split over the ranks."""

    def __init__(self, mesh: Any, placements: Sequence[Any], shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.mesh, self.placements, self.shape, self.stride = mesh, tuple(placements), shape, stride

    def of_part(self, part: Tensor) -> Any:
        """Returns the DTensor of which this is the part on this rank."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def whole(self, part: Tensor) -> Tensor:
        """Returns the whole tensor. All ranks must call it."""
        if (gathered := self.gathered) is not None:
            # One mesh dimension after the other, since torch warns about both at once.
            from torch.distributed.tensor import Shard as Split

            shape, over = gathered.part_shape, self.mesh[self.mesh.mesh_dim_names[0]]
            rows = _SplitOf(over, [Split(0)], shape, torch.empty(shape, device="meta").stride())
            return gathered.whole(rows.whole(part))
        found: Tensor = self.of_part(part).full_tensor()
        return found

    @property
    def split(self) -> bool:
        """Is it split at all, or does each rank have all of it?"""
        return any(_cut(placement) is not None for placement in self.placements)

    @property
    def gathered(self) -> _SplitOf | None:
        """For one that is fully sharded and tensor parallel: how it is split while its rows are gathered. Else None."""
        if self.mesh.ndim == 1:
            return None
        return _SplitOf(self.mesh[self.mesh.mesh_dim_names[1]], self.placements[1:], self.shape, self.stride)

    @property
    def block(self) -> Block:
        """The block of the whole that is this rank's part."""
        block = [(0, size) for size in self.shape]
        cuts = list(zip(self.placements, self.mesh.get_coordinate(), self.mesh.shape, strict=True))
        # Tensor parallelism first: fully_shard splits the rows of what that leaves.
        for placement, number, ranks in reversed(cuts):
            if (dimension := _cut(placement)) is not None:
                dimension %= len(block)
                start, end = block[dimension]
                each = -(-(end - start) // ranks)  # as torch.chunk divides them
                block[dimension] = min(start + number * each, end), min(start + (number + 1) * each, end)
        return tuple(block)

    @property
    def part_shape(self) -> torch.Size:
        """The shape of this rank's part."""
        return torch.Size(end - start for start, end in self.block)


def split_over_ranks(module: nn.Module) -> Split:
    """Returns the parts of a stage's parameters that this rank holds, and is the first to hold. Raises StateError where
    a part is no block."""
    out: dict[str, tuple[Sequence[int], Block]] = {}
    for name, parameter in module.named_parameters():
        placed: _SplitOf | None = getattr(parameter, "placed", None)
        if placed is None or not placed.split or parameter.duplicate:  # type: ignore[attr-defined]
            continue
        if placed.part_shape != parameter.shape:
            how = f"is split as {placed.placements}, which is no block"
            raise StateError(f"{name}: a parameter of shape {tuple(placed.shape)} {how}")
        out[name] = placed.shape, placed.block
    return out


def part_of_rank(module: nn.Module) -> Callable[[str, Tensor], Tensor]:
    """Returns a function that cuts this rank's part out of the tensors of a state without ranks, by their names. Split
    parameters are cut, and so is optimizer state with one value per element of these; all else stays whole."""
    split = {name: p for name, p in module.named_parameters() if hasattr(p, "placed")}

    def part(key: str, tensor: Tensor) -> Tensor:
        kind, _, name = key.partition(".")
        owner = split.get(name) if kind == "model" else None
        if kind == "optimizer":
            owner = next((p for n, p in split.items() if name.startswith(f"{n}.")), None)
        if owner is None or tensor.shape != owner.placed.shape:  # type: ignore[attr-defined]
            return tensor
        return tensor[tuple(slice(*run) for run in owner.placed.block)]  # type: ignore[attr-defined]

    return part


def gathered_tensors(module: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the whole tensors of a state dict, or of averages, from those of the ranks. All ranks must call it."""
    parameters, names = dict(module.named_parameters()), state_names(module)

    def whole(name: str, value: Any) -> Any:
        split = getattr(parameters.get(names.get(name, name)), "placed", None)
        return value if split is None else split.whole(value.detach())

    return {name: whole(name, value) for name, value in tensors.items()}


def _reading(kind: type[nn.Module], split: Mapping[str, _SplitOf]) -> type[nn.Module]:
    """Makes a subclass of `kind` that returns DTensors for the names of `split`."""

    def reader(name: str) -> property:
        def read(module: nn.Module) -> Any:
            part = compat.own_parameters(module)[name]
            assert part is not None
            return split[name].of_part(part)

        return property(read)

    return type(kind.__name__, (kind,), {name: reader(name) for name in split} | {"__module__": kind.__module__})
