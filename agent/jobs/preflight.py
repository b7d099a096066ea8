"""What can be known of a job's model, data and optimizer before any worker starts: it is said then, by its name.

Layers are built without memory where torch can (meta tensors), one at a time otherwise. Optimizers are tried on a
few numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrecycle.agent.config.options import Optimization, TrainingOptions
from openrecycle.agent.launcher.bad_samples import named
from openrecycle.agent.models import compat
from openrecycle.agent.models.layers import build_layer, kind_of, layer_count, partition_of, spans, tied_of
from openrecycle.agent.models.stage_io import StageIOError, TensorSpec, tensors_of
from openrecycle.agent.models.state import StateError, dtype_name, pack, unpack
from openrecycle.agent.models.workload import Workload
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import (
    BUCKET_BYTES,
    ELEMENTWISE,
    NamedParameters,
    StageOptimizer,
    make_optimizer,
    stage_optimizer,
)
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job

_SIDE = 3
"""Elements along each dimension of the parameters that an optimizer is tried on."""
_MOST = 256
"""So many of a stage's parameters are enough."""
_STEPS = 6
"""Before what is tried, and after it: optimizers that do something every fifth step are not rare."""


def check_workload(workload: Workload, options: TrainingOptions, share: float = 1.0) -> str:
    """Returns a sentence on what memory workers take; "" where that is not known.

    Raises InputError for a torch that can't be used, for data that the layers can't be given, for what two layers share
    without saying so, for an optimizer or scheduler that can't be driven, or whose state can't be handed over, and for
    a model that this machine has no memory for. share: of the job's workers, those that are here."""
    compat.check_version()
    memory = ""
    # The caller's own random numbers must not depend on what is tried out here.
    with torch.random.fork_rng(devices=[]):
        _check_data(workload, options.job, options.seed, skips=options.faults.on_bad_sample == "skip")
        stages = options.job.stages
        partition = partition_of((), layer_count(workload, stages), stages)
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
        if options.platform.device == "cpu":
            memory = _check_memory(by_stage, kept, options, share)
    return memory


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
        text = f"{type(error).__name__}: {error}".splitlines()[0]
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
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InputError(f"{kind}s", text[:200], f"a builder that makes {kind} {layer}") from error
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
        scheduler = getattr(workload, "scheduler", None)
    except InputError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        expected = (
            "a function of a stage's parameters, or of (name, parameter) pairs where its argument is called "
            "named_parameters, that returns an optimizer"
        )
        raise InputError("optimizer", text[:200], expected) from error
    try:
        made = scheduler(optimizer) if scheduler is not None else None
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
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
    (header, body), (other_header, other_body) = pack(one.state()), pack(other.state())
    return header == other_header and torch.equal(body, other_body)


# -- memory -----------------------------------------------------------------------------------


def beside_activations(
    shapes: NamedParameters, kept_each: float, apart: bool, optimization: Optimization, peers: int
) -> int:
    """Bytes that a worker of a stage with these parameters holds beside activations: parameters, what the optimizer
    keeps of them, and the sums of their gradients; what a step changes once more, to go back to, as far as it does not
    fit where the sums are; and the gradients of what is stepped at a time, or where they are clipped of all of it.

    kept_each: bytes that the optimizer keeps per element. apart: are parameters stepped one after the other? peers:
    workers of the stage, over which the optimizer's state may be sharded.
    """
    trained = [p for _, p in shapes if p.requires_grad]
    elements, size = sum(p.numel() for p in trained), sum(map(_bytes, trained))
    frozen = sum(_bytes(p) for _, p in shapes if not p.requires_grad)
    sums = elements * (8 if optimization.mode == "deterministic" else 4)
    sharded = optimization.sharding == "zero1"
    share = min(1.0, 2 / peers) if sharded else 1.0
    kept = round(share * kept_each * elements)
    stepped = round(share * size) + kept
    at_a_time = BUCKET_BYTES if sharded or not trained else max(BUCKET_BYTES, *map(_bytes, trained))
    gradients = round(share * size)
    if apart and optimization.clip_norm is None:
        gradients = min(gradients, at_a_time)
    return frozen + size + kept + sums + max(0, stepped - sums) + gradients


def _check_memory(by_stage: list[NamedParameters], kept: _Kept, options: TrainingOptions, share: float) -> str:
    """share: of the job's workers, those that are on this machine. Returns what they take. Raises InputError."""
    pipelines = options.job.pipelines

    def needs(peers: int) -> list[int]:
        return [beside_activations(mine, kept.each, kept.apart, options.optimization, peers) for mine in by_stage]

    together, has = round(share * pipelines * sum(needs(pipelines))), memory_limit()
    fewer = ""
    if options.optimization.sharding == "zero1" and pipelines > 2:
        left = f"{_size(max(needs(2)))} with two workers of its stage left"
        less = f"{_size(max(needs(pipelines - 1)))} with one worker of its stage less, " if pipelines > 3 else ""
        fewer = f" ({less}{left})"
    each = _size(max(needs(pipelines)))
    text = f"a worker takes up to {each}{fewer} beside activations, all that are here {_size(together)}"
    if has is not None and together > has:
        workers = round(share * options.job.pipelines * options.job.stages)
        raise InputError(
            "job",
            f"{workers} workers on this machine, which take {_size(together)} beside activations",
            f"what goes into the {_size(has)} that they may have: fewer pipelines, a smaller model, or more machines",
        )
    return text


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the processes of this one's group may have: the memory and swap of the machine, or less, where a
    container, Slurm or systemd gives less (cgroup v2, or v1). None where the system does not say. root: its files'."""
    limits = []
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        limits.append(sum(1024 * int(lines[name].split()[0]) for name in ("MemTotal", "SwapTotal")))
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, KeyError, ValueError, IndexError):
        groups = []
    for _, controllers, path in (group.split(":", 2) for group in groups if group.count(":") >= 2):
        names = ("memory.max",) if not controllers else ("memory.limit_in_bytes",)
        if controllers and "memory" not in controllers.split(","):
            continue
        home = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = home / path.lstrip("/")
        # In a container the path may be one that is not there; its own group is mounted at the top then.
        for folder in {own, *(parent for parent in own.parents if parent.is_relative_to(home)), home}:
            for name in names:
                with contextlib.suppress(OSError, ValueError):  # "max": no limit
                    limits.append(int((folder / name).read_text()))
    return min(limits, default=None)
