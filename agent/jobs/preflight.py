"""What can be known of a job's model, data and optimizer before any worker starts: it is said then, by its name.

Layers are built without memory where torch can (meta tensors), one at a time otherwise. Optimizers are tried on a
few numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import memory_limit
from openrecycle.agent.config.options import Optimization, TrainingOptions
from openrecycle.agent.launcher.bad_samples import named
from openrecycle.agent.messages.delivery import prints_anyway
from openrecycle.agent.models import compat
from openrecycle.agent.models.layers import (
    Partition,
    build_layer,
    kind_of,
    layer_count,
    partition_of,
    spans,
    tied_of,
)
from openrecycle.agent.models.parallelized import parts_of_a_rank
from openrecycle.agent.models.stage_io import StageIOError, TensorSpec, tensors_of
from openrecycle.agent.models.state import StateError, dtype_name, pack, unpack
from openrecycle.agent.models.workload import Workload
from openrecycle.agent.profiling.memory import (
    StageMemory,
    checkpoint_memory,
    hand_over_memory,
    micro_batch_memory,
    state_memory,
    with_activations,
)
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import (
    ELEMENTWISE,
    NamedParameters,
    StageOptimizer,
    make_optimizer,
    stage_optimizer,
)
from openrecycle.planner.jobs.errors import InfeasibleError, InputError, in_a_line
from openrecycle.planner.jobs.job import Job, Worker, parse_partition

_SIDE = 3
"""Elements along each dimension of the parameters that an optimizer is tried on."""
_MOST = 256
"""So many of a stage's parameters are enough."""
_STEPS = 6
"""Before what is tried, and after it: optimizers that do something every fifth step are not rare."""


@prints_anyway()
def check_workload(workload: Workload, options: TrainingOptions, here: Collection[Worker] | None = None) -> JobMemory:
    """Returns what memory workers take.

    Raises InputError for a torch that can't be used, for data that the layers can't be given, for what two layers share
    without saying so, for sparse gradients, for an optimizer or scheduler that can't be driven, or whose state can't be
    handed over, and for a model that this machine has no memory for. here: the workers on it; None: all."""
    compat.check_version()
    # The caller's own random numbers must not depend on what is tried out here.
    with torch.random.fork_rng(devices=[]):
        _check_data(workload, options.job, options.seed, skips=options.faults.on_bad_sample == "skip")
        stages = options.job.stages
        partition = partition_at_start(options, layer_count(workload, stages))
        shapes = _check_layers(workload, sum(partition), options.seed)
        by_stage = [[named for layer in span for named in shapes[layer]] for span in spans(partition)]
        kept = _check_optimizer(workload, by_stage, options.optimization)
        if options.platform.ranks_per_worker > 1:
            _check_splits(workload, by_stage[0], options.platform.ranks_per_worker)
        if options.optimization.sharding == "zero1" and not kept.apart:
            kind = type(make_optimizer(workload.optimizer, by_stage[0])).__name__
            expected = (
                f"none with this {kind}: each worker steps parts of parameters, which takes one of "
                f"{', '.join(sorted(ELEMENTWISE))} of torch.optim without own step hooks"
            )
            raise options.optimization.refuse("sharding", expected)
        return _check_memory(workload, partition, shapes, kept, options, here)


def partition_at_start(options: TrainingOptions, layers: int) -> Partition:
    """As it is asked for, or even. Raises InputError."""
    job = options.job
    return partition_of(job.partition or parse_partition(options.planning.partition or ""), layers, job.stages)


# -- data -------------------------------------------------------------------------------------


class _UnreadableError(InputError):
    """One micro-batch raises."""


def _check_data(workload: Workload, job: Job, seed: int, *, skips: bool) -> None:
    """The first and the last micro-batch of the first iteration. skips: one that raises is passed over, as long as
    there are others."""
    places = [(p, m) for p in range(job.pipelines) for m in range(job.micro_batches)]
    found = []
    for order in (places, places[::-1]):
        for place in order:
            try:
                found.append(_micro_batch(workload, seed, *place))
                break
            except _UnreadableError:
                if not skips or place == order[-1]:
                    raise
    first, other = found
    if getattr(workload, "varies", False):
        return  # each output is compared with the largest
    if other != first:
        raise InputError(
            "data",
            f"{_specs(first)} in the first micro-batch, {_specs(other)} in another",
            "inputs of one shape and type in all micro-batches; PadCollate pads samples to one length, or to one of "
            "several",
        )


def _micro_batch(workload: Workload, seed: int, pipeline: int, micro_batch: int) -> tuple[tuple[int, ...] | str, ...]:
    try:
        inputs = tensors_of(workload.inputs(seed, 0, pipeline, micro_batch), "inputs")
        workload.targets(seed, 0, pipeline, micro_batch)
    except InputError:
        raise
    except StageIOError as error:
        raise InputError("data", str(error).partition("got ")[2].partition(",")[0], _TENSORS) from None
    except Exception as error:
        text = in_a_line(error)
        samples = getattr(workload, "samples", lambda *_: ())(0, pipeline, micro_batch)
        which = f"micro-batch {micro_batch} of pipeline {pipeline}" + named(samples)
        raise _UnreadableError("data", text[:200], f"{which} to be there") from error
    return tuple(part for t in inputs for part in (tuple(t.shape), dtype_name(t.dtype)))


_TENSORS = "inputs that are a tensor, or a tuple of tensors, the positional arguments of stage 0 (no dict)"


def _specs(parts: tuple[Any, ...]) -> str:
    return ", ".join(str(TensorSpec(shape, dtype)) for shape, dtype in zip(parts[::2], parts[1::2], strict=True))


# -- layers -----------------------------------------------------------------------------------


def _check_layers(workload: Workload, layers: int, seed: int) -> list[NamedParameters]:
    """Per layer its parameters' names and stand-ins, without memory; of all layers that could be built."""
    try:
        with torch.device("meta"):
            return _build(workload, layers, seed)
    except InputError:
        raise
    except Exception:  # a builder that reads a file, or looks at numbers, needs them
        return _build(workload, layers, seed)


def _build(workload: Workload, layers: int, seed: int) -> list[NamedParameters]:
    # Of what is still alive when its layer is gone, a later layer may hold the same.
    seen: list[tuple[weakref.ref[Tensor], int, str]] = []
    kind, shapes = kind_of(workload), list[NamedParameters]()
    tied = tied_of(workload, layers)
    members = {name: group for group in tied for name in group}
    forms: dict[str, str] = {}
    for layer in range(layers):
        try:
            module = build_layer(workload, layer, layers, seed)
        except InputError:
            raise
        except Exception as error:
            if torch.empty(0).device.type == "meta":
                raise
            text = in_a_line(error)
            raise InputError(f"{kind}s", text[:200], f"a builder that makes {kind} {layer}") from error
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                got = f"{type(part).__name__}(sparse=True), {name or 'which is the whole'} of {kind} {layer}"
                raise InputError(f"{kind}s", got, "sparse=False: gradients are summed as dense tensors")
        mine = [*module.named_parameters(), *module.named_buffers()]
        for name, parameter in module.named_parameters():
            if parameter.is_complex():
                got = f"{name} of {kind} {layer}, which is {dtype_name(parameter.dtype)}"
                expected = "real parameters (torch.view_as_complex)"
                raise InputError(f"{kind}s", got, expected)
        alive = {id(t): (other, name) for ref, other, name in seen if (t := ref()) is not None}
        for name, tensor in mine:
            full = f"{layer}.{name}"
            if full in members and isinstance(tensor, nn.Parameter):
                forms[full] = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            if id(tensor) in alive:
                other, its_name = alive[id(tensor)]
                if members.get(full, ()) and f"{other}.{its_name}" in members[full]:
                    continue
                raise InputError(
                    f"{kind}s",
                    f"{its_name} of {kind} {other}, which is {name} of {kind} {layer}, too",
                    f"that it is said: tied=[['{other}.{its_name}', '{layer}.{name}']]; buffers can't be shared (give "
                    f"each {kind} a copy, or put what shares them into one {kind})",
                )
        seen += [(weakref.ref(tensor), layer, name) for name, tensor in mine]
        shapes.append(
            [
                (f"{layer}.{name}", nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
                for name, p in module.named_parameters()
            ]
        )
        del module, mine, alive
    for group in tied:
        for name in group:
            if name not in forms:
                raise InputError("tied", name, f"LAYER.NAME of a parameter, with LAYER from 0 to {layers - 1}")
            if forms[name] != forms[group[0]]:
                expected = f"the form of {group[0]}, which is {forms[group[0]]}"
                raise InputError("tied", f"{name}, which is {forms[name]}", expected)
    return shapes


# -- the optimizer ----------------------------------------------------------------------------


def _check_splits(workload: Workload, shapes: NamedParameters, ranks: int) -> None:
    """Can its layers be split over ranks, and its optimizer step their parts? Raises InputError."""
    field = "platform.ranks_per_worker"
    if not hasattr(workload, "parallelize"):
        expected = "1, or `parallelize(layer, mesh)`: a method of the workload, or an argument of ResilientTrainer"
        raise InputError(field, ranks, expected)
    kind = type(make_optimizer(workload.optimizer, shapes))
    if not kind.__module__.startswith("torch.optim") or kind.__name__ not in ELEMENTWISE:
        expected = (
            f"1 with {kind.__name__}: each rank steps its part of a parameter, which takes one of "
            f"{', '.join(sorted(ELEMENTWISE))} of torch.optim"
        )
        raise InputError(field, ranks, expected)


class _Kept(NamedTuple):
    """each: how many bytes an optimizer keeps per element of a parameter, at least. apart: are parameters stepped one
    after the other?"""

    each: float
    apart: bool


def _check_optimizer(workload: Workload, shapes: list[NamedParameters], optimization: Optimization) -> _Kept:
    """Tries each stage's, where it differs from those before, on a few numbers: a state that was handed over, or
    taken back, must lead to the same bits."""
    tried, groups, kept = set(), dict[int, int](), list[_Kept]()
    for stage, mine in enumerate(shapes):
        small = [(tuple(min(_SIDE, n) for n in p.shape), p.dtype, p.requires_grad) for _, p in mine[:_MOST]]
        key = tuple(sorted({(len(shape), str(dtype), grad) for shape, dtype, grad in small}))
        groups[_make(workload, mine, optimization)] = stage
        if key not in tried:
            tried.add(key)
            kept.append(_try(workload, small, optimization))
    if len(groups) > 1:
        counts = " and ".join(f"{count} for stage {stage}" for count, stage in sorted(groups.items()))
        expected = "one number of them for all stages, so that layers can move; a group may have no parameters"
        raise InputError("optimizer", f"parameter groups: {counts}", expected)
    return min(kept, default=_Kept(0.0, True))


def _make(workload: Workload, named: NamedParameters, optimization: Optimization) -> int:
    """On the stage's own shapes, without memory; returns how many groups of parameters there are. Raises
    InputError."""
    try:
        optimizer = make_optimizer(workload.optimizer, named)
        text = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError("optimizer", text, "a function that returns a torch.optim.Optimizer")
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise InputError("optimizer", text, "one for dense gradients, such as AdamW: no others are summed")
        scheduler = getattr(workload, "scheduler", None)
    except InputError:
        raise
    except Exception as error:
        text = in_a_line(error)
        expected = (
            "a function of a stage's parameters, or of (name, parameter) pairs where its argument is called "
            "named_parameters, that returns an optimizer"
        )
        raise InputError("optimizer", text[:200], expected) from error
    try:
        made = scheduler(optimizer) if scheduler is not None else None
    except Exception as error:
        text = in_a_line(error)
        raise InputError("scheduler", text[:200], "a function of an optimizer that returns an LRScheduler") from error
    StageOptimizer(nn.Module(), optimizer, SUM_OF[optimization.mode]((), terms=1), made)
    return len(optimizer.param_groups)


def _try(
    workload: Workload, small: list[tuple[tuple[int, ...], torch.dtype, bool]], optimization: Optimization
) -> _Kept:
    def stage() -> StageOptimizer:
        generator = torch.Generator().manual_seed(0)
        module = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator).to(dtype), grad) for shape, dtype, grad in small
        )
        return stage_optimizer(workload, module, SUM_OF[optimization.mode](module.parameters(), terms=1), optimization)

    try:
        mine, peer = stage(), stage()
        _steps(mine, range(_STEPS))
    except Exception:
        return _Kept(0.0, True)  # it wants its real parameters: the comparison of peers while they train is left
    name = type(mine.optimizer).__name__
    if mine.scheduler is not None:
        name += f" with {type(mine.scheduler).__name__}"
    advice = (
        "one that keeps all that a step depends on in `state` and `param_groups` (a scheduler: in its state_dict): a "
        "worker that re-joins is given that, and nothing else"
    )
    try:
        peer.load_state(unpack(*pack(mine.state())))
        _steps(mine, range(_STEPS, 2 * _STEPS))
        _steps(peer, range(_STEPS, 2 * _STEPS))
        if not _equal(mine, peer):
            raise InputError("optimizer", name, advice)
        mine.roll_back()
        _steps(mine, range(2 * _STEPS - 1, 2 * _STEPS))
        if not _equal(mine, peer):
            raise InputError("optimizer", name, advice)
    except StateError as error:
        raise InputError("optimizer", f"{name} ({error})", advice) from None
    elements, kept = 0, 0
    for parameter, state in mine.optimizer.state.items():
        elements += parameter.numel()
        kept += sum(_bytes(t) for t in state.values() if isinstance(t, Tensor) and t.shape == parameter.shape)
    return _Kept(kept / elements if elements else 0.0, mine.steps_apart)


def _steps(stage: StageOptimizer, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in stage.gradients.parameters:
            stage.gradients.add(parameter, torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        torch.manual_seed(number)  # of steps that draw noise
        stage.step()


def _equal(one: StageOptimizer, other: StageOptimizer) -> bool:
    return pack(one.state())[0] == pack(other.state())[0]  # which has a checksum of everything


# -- memory -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobMemory:
    """What the workers of each stage take, in bytes. least: that of a worker that has one micro-batch in flight, and
    gives or writes nothing. text: all of it in a sentence. warning: is it more than there is, if all that may be needed
    at a time is?"""

    stages: tuple[StageMemory, ...]
    least: tuple[int, ...]
    text: str
    warning: bool = False

    @property
    def told(self) -> tuple[int, ...]:
        """To a console, by stage: what a worker may come to take; () where activations are not known."""
        return tuple(s.total for s in self.stages) if all(s.activations for s in self.stages) else ()

    def of(self, workers: Collection[Worker]) -> int:
        """All of them together."""
        return sum(self.stages[worker.stage].total for worker in workers)

    def check(self, workers: Collection[Worker], has: int | None, where: str) -> str:
        """Returns a warning, or "". has: bytes that they may have. where: they are. Raises InputError where not even
        the least fits."""
        if has is None:
            return ""
        _refuse_above(sum(self.least[worker.stage] for worker in workers), workers, has, "or more", where)
        if (together := self.of(workers)) <= has:
            return ""
        return (
            f"warning: the {len(workers)} workers {where} may come to take {_size(together)} together, and may have "
            f"{_size(has)}; to be safe: fewer micro-batches in flight (--memory), fewer workers, or more machines"
        )


def _refuse_above(together: int, workers: Collection[Worker], has: int, how: str, where: str) -> None:
    if together > has:
        raise InputError(
            "job",
            f"{len(workers)} workers {where}, which take {_size(together)} {how}",
            f"what fits into the {_size(has)} that they may have: fewer pipelines, a smaller model, or more machines",
        )


def _check_memory(
    workload: Workload,
    partition: Partition,
    shapes: Sequence[NamedParameters],
    kept: _Kept,
    options: TrainingOptions,
    here: Collection[Worker] | None,
) -> JobMemory:
    """here: the workers on this machine. Raises InputError."""
    job, optimization, ranks = options.job, options.optimization, options.platform.ranks_per_worker
    workers = list(job.workers()) if here is None else here
    on_cpu = options.platform.device == "cpu"
    has, where = memory_limit() if on_cpu else None, "on this machine"
    divided, own = False, shapes
    if ranks > 1:
        divided, own = parts_of_a_rank(workload, sum(partition), ranks, options.seed)

    def states(peers: int) -> list[StageMemory]:
        by_stage = [[named for layer in span for named in own[layer]] for span in spans(partition)]
        return [state_memory(mine, kept.each, kept.apart, optimization, peers).times(ranks) for mine in by_stage]

    plain = states(job.pipelines)
    if has is not None:
        # Before a micro-batch is tried, which may take the memory that there is not.
        _refuse_above(sum(plain[w.stage].total for w in workers), workers, has, "beside activations", where)
    size = sum(_bytes(p) for layer in shapes for _, p in layer)
    micro_batches = micro_batch_memory(workload, partition, options.seed, optimization.autocast, size)
    each, least, in_flight = list[StageMemory](), list[int](), _in_flight(options)
    for stage, state in enumerate(plain):
        one, count = state, in_flight[stage]
        if micro_batches is not None:
            # Tensor parallel ranks run every sample, and split some of what they hold of it, or nothing.
            times = 1 if divided else ranks
            splits, mine = options.planning.limits[0].splits, micro_batches[stage]
            one = with_activations(state, replace(mine, received=0), 1, 0, 1, splits=splits)
            state = with_activations(state, mine, count, job.micro_batches, times, splits=splits)
        if options.checkpoints.directory is not None and on_cpu:
            named = [parameter for layer in spans(partition)[stage] for parameter in shapes[layer]]
            whole = state_memory(named, kept.each, kept.apart, optimization, 1)
            copies = 1 + (options.checkpoints.every == 1)
            state = replace(state, checkpoint=checkpoint_memory(whole, job.pipelines, copies=copies))
        each.append(replace(state, hand_over=hand_over_memory(state, kept.each, job.pipelines)))
        least.append(one.total)
    made = JobMemory(tuple(each), tuple(least), "")
    told = [_said(made, in_flight, micro_batches is not None, states, options)]
    told.append(f"all {len(workers)} that are here {_size(made.of(workers))}")
    if has is not None:
        told[-1] += f" of {_size(has)}"
    warnings = [made.check(workers, has, where)]
    for stage, capacity in enumerate(job.capacity_bytes):
        if made.stages[stage].total > capacity:
            took = f"a worker of stage {stage} may come to take {_size(made.stages[stage].total)}"
            warnings.append(f"warning: {took}, and its capacity is {_size(capacity)}")
            break
    warnings = [text for text in warnings if text]
    return replace(made, text="; ".join([", ".join(told), *warnings]), warning=bool(warnings))


def _in_flight(options: TrainingOptions) -> list[int]:
    """Micro-batches that a worker of each stage may hold at a time, by the limit that plans keep; without one, as many
    as its pipeline has."""
    job, (technique, memory) = options.job, options.planning.limits
    try:
        limits = memory.limits(job, technique)
    except (InputError, InfeasibleError):  # said where plans are made
        limits = (None,) * job.stages
    most = job.pipelines * job.micro_batches
    return [job.micro_batches if limit is None else min(limit, most) for limit in limits]


def _said(
    memory: JobMemory,
    in_flight: Sequence[int],
    measured: bool,
    states: Callable[[int], list[StageMemory]],
    options: TrainingOptions,
) -> str:
    totals = [stage.total for stage in memory.stages]
    largest = max(range(len(totals)), key=totals.__getitem__)
    worst, peers = memory.stages[largest], options.job.pipelines
    parts = []
    for part in fields(worst):
        if count := getattr(worst, part.name):
            times = f" of {in_flight[largest]} micro-batches" if part.name == "activations" else ""
            parts.append(f"{_WORDS.get(part.name, part.name)}{times} {_size(count)}")
    text = f"a worker takes up to {_size(worst.total)} ({', '.join(parts)})"
    if not measured:
        text += " beside activations, which are not known"
    if len({_size(total) for total in totals}) > 1:
        shown = ", ".join(map(_size, totals)) if len(totals) <= 8 else f"{_size(min(totals))} to {_size(max(totals))}"
        text += f", by stage {shown}"
    if options.optimization.sharding == "zero1" and peers > 2:

        def with_peers(count: int) -> str:
            # What there is else stays, but for the checkpoint's copy, of which each has a larger share.
            copies = [stage.checkpoint * peers // count - stage.checkpoint for stage in memory.stages]
            fewer = zip(states(count), states(peers), totals, copies, strict=True)
            return _size(max(f.total - s.total + t + copy for f, s, t, copy in fewer))

        less = f"{with_peers(peers - 1)} once its stage has lost one worker, " if peers > 3 else ""
        text += f", {less}{with_peers(2)} once its stage has two workers left"
    return text


_WORDS = {"sums": "sums of gradients", "undo": "to undo a step", "hand_over": "hand-over of state"}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
