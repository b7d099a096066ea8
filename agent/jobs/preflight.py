"""What can be known of a job before any worker starts: mistakes in its model, data and optimizer, and the memory that
its workers need.

Each mistake is reported as an InputError that names the argument. Layers are built without memory where torch can do
that (meta tensors), and one at a time otherwise. Optimizers are tried on a few numbers.

Memory: parameters, optimizer state, sums, and what a step needs follow from the shapes of the parameters. What a
micro-batch holds between its forward and the end of its backward is measured: one runs through the stage as in
training, and every tensor that is made and not released counts. This run uses tensors without data; or real ones, if
the model is small or does something that works only with data.

tests/benchmarks/bench_memory.py compares the result with what workers really take.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrecycle.agent.checkpoints import Checkpoint
from openrecycle.agent.config.devices import Autocast, memory_limit
from openrecycle.agent.config.options import Optimization, TrainingOptions
from openrecycle.agent.config.settings import spelled
from openrecycle.agent.launcher.bad_samples import named
from openrecycle.agent.messages.client import prints_anyway
from openrecycle.agent.models import compat
from openrecycle.agent.models.data import alike, own_numbers
from openrecycle.agent.models.layers import (
    LayerStack,
    Partition,
    StageIOError,
    TensorSpec,
    build_layer,
    build_layers,
    kind_of,
    layer_count,
    owner_names,
    partition_of,
    precision,
    spans,
    taken_by,
    tensors_of,
    tied_of,
    without_memory,
)
from openrecycle.agent.models.parallelized import parts_of_a_rank
from openrecycle.agent.models.state import DTYPES, StateError, dtype_name, pack, unpack
from openrecycle.agent.models.torch_settings import kept_settings
from openrecycle.agent.models.workload import EvaluationData, Workload, probe_inputs, probe_targets
from openrecycle.agent.stages.backward import Deferred, Fused, Strategy
from openrecycle.agent.stages.gradients import SUM_OF, GradientSum
from openrecycle.agent.stages.memory import MicroBatchMemory, run_micro_batch
from openrecycle.agent.stages.optimizer import (
    BUCKET_BYTES,
    ELEMENTWISE,
    NamedParameters,
    StageOptimizer,
    make_optimizer,
    stage_optimizer,
)
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.group import scatter_memory
from openrecycle.agent.transport.transfers import PREFETCH
from openrecycle.agent.workers.state_transfer import PIECE_ELEMENTS
from openrecycle.planner.jobs.errors import InfeasibleError, InputError, in_a_line
from openrecycle.planner.jobs.job import Job, Problem, StageRoom, Worker, parse_partition
from openrecycle.planner.jobs.words import gigabytes as _size
from openrecycle.planner.layers.room import LayerRoom

# -- what memory a job's workers take -----------------------------------------------------------

SMALL_BYTES = 4 << 20
"""Bytes of parameters up to which a model runs for real, in less time than it takes to import tensors without data."""
LARGE_BYTES = 256 << 20
"""Bytes of parameters above which a model never runs for real: that may take minutes, and too much memory."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one worker of a stage takes, beside the program itself.

    parameters: without buffers.
    optimizer: its state; of this worker's shards, where that is sharded.
    sums: of gradients.
    undo: to undo a step, as far as that does not fit into the memory of the sums.
    gradients: those that are computed or stepped at a time; where gradients are clipped after a step, also all that are
        stepped beside it.
    activations: of as many micro-batches as a plan may have in flight, and what an op needs while it runs.
    transfers: what is sent to neighbours, for as long as it is kept, and what is received ahead.
    checkpoint: the copy of this worker's share, which is written.
    hand_over: pieces on their way to workers that join.
    terms: those of peers for the sums of a sharded optimizer, on their way.
    resume: what is read from a checkpoint, as far as it does not fit into the others; of a sharded optimizer, each
        worker reads the state of the whole stage.
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
    terms: int = 0
    resume: int = 0

    @property
    def copied(self) -> int:
        """Bytes of what a checkpoint copies."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))

    def times(self, ranks: int) -> StageMemory:
        return StageMemory(**{each.name: ranks * getattr(self, each.name) for each in fields(self)})


def state_memory(
    shapes: NamedParameters,
    kept_each: float,
    apart: bool,
    optimization: Optimization,
    peers: int,
    *,
    hooked: bool = False,
) -> StageMemory:
    """Returns the memory of a worker of a stage with these parameters, without activations.

    kept_each: bytes that the optimizer keeps per element. apart: are parameters stepped one after the other? peers: the
    number of workers of the stage, over which the optimizer's state may be sharded. hooked: may step hooks change
    parameters that are not trained?
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
    # A gradient that is multiplied before it is added to a sum; a step uses the same memory later.
    gradients = max(gradients, largest if optimization.mode == "deterministic" else 0)
    if optimization.clip_norm is not None and not optimization.synchronous:
        # Kept until their norm is known. Sums that only other workers need are used for that, where there are any.
        gradients += max(0, stepped - max(0, sums - max(stepped + kept, round(share * sums))))
    undo = max(0, stepped + kept - sums) + (frozen if hooked else 0)
    return StageMemory(frozen + size, kept, sums, undo, gradients)


def checkpoint_memory(whole: StageMemory, peers: int, *, copies: int) -> int:
    """Returns the bytes that each peer copies for a checkpoint; all write equal shares. whole: the memory of a worker
    that has all of the stage's state. copies: how many exist at a time."""
    return copies * -(-whole.copied // peers)


def hand_over_memory(state: StageMemory, kept_each: float, peers: int) -> int:
    """Returns the bytes of the pieces on their way: one to or from each of the other peers."""
    return min(state.copied, round((peers - 1) * PIECE_ELEMENTS * (4 + kept_each)))


Held = Sequence[tuple[int, int]]
"""How many micro-batches a worker may hold at a time, as alternatives: so many before the end of their I, and so many
after that, before the end of their W."""


def held_within(room: StageRoom, most: int, *, splits: bool) -> Held:
    """Returns the alternatives within `room`, of `most` micro-batches in all. splits: may several W be put off?"""
    later = most if splits else 1
    ahead = takewhile(lambda n: room.beside(n, later) >= 0, range(most + 1))
    return [(n, room.beside(n, min(later, most - n))) for n in ahead]


def activation_memory(one: MicroBatchMemory, held: Held) -> int:
    return one.beside + max(ahead * one.forward + later * one.backward for ahead, later in held)


def with_activations(
    state: StageMemory, one: MicroBatchMemory, held: Held, per_iteration: int, ranks: int
) -> StageMemory:
    """Adds activations and transfers to a worker's memory. per_iteration: micro-batches of a worker. ranks: how many
    ranks hold as much as one that is alone."""
    activations, in_flight = activation_memory(one, held), max(map(sum, held))
    # An output is kept until its gradient comes; a gradient until the end of the next iteration.
    transfers = PREFETCH * one.received + in_flight * one.given + 2 * per_iteration * one.back
    return replace(state, activations=ranks * activations, transfers=ranks * transfers)


# -- a micro-batch ----------------------------------------------------------------------------------


class _LossRaised(Exception):
    """The loss has raised an exception, which is the cause of this one, for `output`."""

    def __init__(self, output: Any) -> None:
        self.output = output


class _SparseGradient(Exception):
    """This parameter has got a sparse gradient, as of torch.nn.functional.embedding(..., sparse=True)."""


def micro_batch_memory(
    workload: Workload,
    partition: Partition,
    seed: int,
    autocast: Autocast | None,
    parameter_bytes: int,
    *,
    as_workers: bool = False,
) -> list[MicroBatchMemory] | None:
    """Returns the memory of a micro-batch on each stage. Returns None if the layers can't be run here; a later check
    reports that in better words. parameter_bytes: of the whole model. as_workers: do workers, too, run whole
    micro-batches on a CPU?

    Raises InputError for a loss or a metric that does not return a number, for a loss that has no class for a label,
    and for a parameter whose gradient is sparse; and, if a real run is as in workers, for a loss that raises there."""
    layers = sum(partition)
    try:
        read, wanted = tensors_of(probe_inputs(workload, seed), "data"), probe_targets(workload, seed)
    except Exception:
        return None

    form: Any = None
    """The form of what the last layer returns."""

    def run(take: Callable[[Tensor], Tensor]) -> list[MicroBatchMemory]:
        inputs, targets = tuple(map(take, read)), compat.copied(wanted, take)
        found: list[MicroBatchMemory] = []

        def measured(output: Any) -> Tensor:
            nonlocal form
            form = compat.copied(output, _form)  # not the output itself, whose memory is being measured
            try:
                loss = workload.loss(output, targets)
                if not loss.requires_grad and any(t.requires_grad for t in _tensors(output)):
                    expected = "one that depends on the output by operations with a gradient: no detach, item or argmax"
                    raise InputError("loss", "a number without a gradient", expected)
            except Exception as error:
                raise _LossRaised(output) from error
            return loss

        for stage, span in enumerate(spans(partition)):
            module = build_layers(workload, span, layers, seed, take)
            loss = measured if stage == len(partition) - 1 else None
            deferred = Deferred(module)
            split: Strategy = deferred if deferred.layers.parameters else Fused(module)
            with _nothing_compiled():
                memory, inputs = run_micro_batch(
                    Stage(module, _Dropped(module), split=split, autocast=autocast), inputs, loss, first=stage == 0
                )
            found.append(memory)
        return found

    ways = [compat.tensors_without_data, _real][: 1 if parameter_bytes > LARGE_BYTES else 2]
    if parameter_bytes <= SMALL_BYTES:
        ways.reverse()
    for way in ways:
        try:
            with kept_settings(), way() as take:
                torch.set_num_threads(1)  # as workers have
                memory = run(take)
        except _LossRaised as raised:
            error = raised.__cause__
            if isinstance(error, InputError):
                raise error from None
            if not as_workers or way is not _real:
                continue
            error = _raised(workload, raised.output, wanted, autocast)
        except _SparseGradient as sparse:
            layer, _, name = str(sparse).partition(".")
            got, kind = f"sparse gradients of {name} of {kind_of(workload)} {layer}", f"{kind_of(workload)}s"
            raise InputError(kind, got, "dense ones (sparse=False): gradients are summed as dense tensors") from None
        except Exception as wrong:
            # Tensors without data accept any types, so the next way would not find this.
            where, text = next(iter(getattr(wrong, "__notes__", ())), ""), in_a_line(wrong)
            if as_workers and way is _real and " from " in where and re.search(_OF_TYPES, text):
                expected = "layers that each return tensors of a type that the next one goes with"
                raise InputError(f"{kind_of(workload)}s", f"{text[:200]} ({where})", expected) from None
            continue
        else:
            error = None
            if way is not _real:  # without data, labels had no values to check
                error = _beyond(workload, form, wanted, autocast)
            if error is None:
                _check_metrics(workload, form, wanted, autocast)
                return memory
        if error is not None:
            got = f"{in_a_line(error)[:200]} (output {_forms(form)}; targets {_forms(compat.copied(wanted, _form))})"
            expected = "a function that takes what the last layer gives, and a micro-batch's targets"
            raise InputError("loss", got, expected) from error
    return None


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in what a layer or a loss takes, which may be a dict."""
    return [leaf for leaf in compat.tree_flatten(value)[0] if isinstance(leaf, Tensor)]


_NO_PLACE = "out of bounds|out of range|must be smaller than num_classes"
"""What torch says of an index that is out of range."""


def _beyond(workload: Workload, form: Any, targets: Any, autocast: Autocast | None) -> Exception | None:
    """Returns what the loss raises because a label is none of the classes. This does not depend on the model's numbers,
    so zeros in the form of its output will do. form: has a TensorSpec in place of each tensor."""
    leaves, tree = compat.tree_flatten(form)
    try:
        made = compat.tree_unflatten(list(map(_any_numbers, leaves)), tree)
        with kept_settings(), torch.no_grad(), precision(autocast):
            workload.loss(made, compat.copied(targets, torch.clone))
    except (IndexError, RuntimeError) as error:
        return error if re.search(_NO_PLACE, in_a_line(error)) else None
    except Exception:  # perhaps because of the zeros, and not the labels: the job itself will show
        pass
    return None


def _check_metrics(workload: Workload, form: Any, targets: Any, autocast: Autocast | None) -> None:
    """Raises InputError for a metric of the evaluation that returns more than one number, for zeros in the form of the
    model's output. What one raises is no error here: targets of the evaluation may be others."""
    leaves, tree = compat.tree_flatten(form)
    data: EvaluationData | None = getattr(workload, "evaluation", None)
    for name, metric in {} if data is None else data.metrics.items():
        try:
            made = compat.tree_unflatten(list(map(_any_numbers, leaves)), tree)
            with kept_settings(), torch.no_grad(), precision(autocast):
                found = metric(made, compat.copied(targets, torch.clone))
        except Exception:
            continue
        if isinstance(found, Tensor) and found.numel() != 1:
            got = f"{list(found.shape)} from {name}"
            raise InputError("evaluate.metrics", got, "functions that return one number, the mean over the micro-batch")


def _any_numbers(leaf: Any) -> Any:
    """Returns zeros of this form. Raises ValueError if they would take too much time or memory."""
    if not isinstance(leaf, TensorSpec):
        return leaf
    made = leaf.empty(torch.device("meta"))
    if made.nbytes > LARGE_BYTES:
        raise ValueError(made.nbytes)
    return torch.zeros_like(made, device="cpu")


def _raised(workload: Workload, output: Any, targets: Any, autocast: Autocast | None) -> Exception | None:
    """Returns what the loss itself raises, or None. The first exception may have come from what measures memory."""
    copies = compat.copied(output, lambda t: t.detach().requires_grad_(t.is_floating_point()).clone())
    try:
        with kept_settings(), precision(autocast):
            workload.loss(copies, compat.copied(targets, torch.clone))
    except Exception as error:
        return error
    return None


def _form(tensor: Tensor) -> Any:
    """Returns a TensorSpec. A nested tensor has none: its class's name is returned."""
    return type(tensor).__name__ if tensor.is_nested else TensorSpec.of(tensor)


def _forms(form: Any) -> str:
    """Lists forms in words, in the order in which the loss gets them."""
    leaves, _ = compat.tree_flatten(form)
    forms = [str(leaf) if isinstance(leaf, TensorSpec | str) else type(leaf).__name__ for leaf in leaves[:8]]
    return ", ".join([*forms, "..."] if len(leaves) > 8 else forms)


def _nothing_compiled() -> contextlib.AbstractContextManager[Any]:
    """Switches compilation off, since the run is only to be measured. If no layer is compiled, torch's compiler is not
    even imported for this, which would take 1.6 s."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def _real() -> Iterator[Callable[[Tensor], Tensor]]:
    yield torch.clone


class _Dropped(GradientSum):
    """A sum that takes every term and keeps none."""

    def __init__(self, module: LayerStack) -> None:
        super().__init__((), terms=1)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def add(self, tensor: Tensor, term: Tensor) -> None:
        if term.layout is not torch.strided:
            raise _SparseGradient(self._names.get(id(tensor), ""))

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        pass

    def add_change(self, buffer: Tensor, change: Tensor) -> None:
        pass

    def add_loss(self, loss: Tensor, weight: Tensor | None = None) -> None:
        pass

    def settle(self, key: tuple[int, int]) -> None:
        pass


# -- mistakes in a job's model, data and optimizer ----------------------------------------------

_SIDE = 3
"""An optimizer is tried on parameters with so many elements along each dimension."""
_MOST = 256
"""An optimizer is tried on at most so many of a stage's parameters."""
_STEPS = (6, 3, 1)
"""Steps before the state is handed over, and as many after that. Optimizers that act only on every fifth step are not
rare; fewer steps are tried where these raise, as those of a short schedule do at its end."""


@prints_anyway()
def check_workload(workload: Workload, options: TrainingOptions, here: Collection[Worker] | None = None) -> JobMemory:
    """Checks a job's model, data and optimizer. Returns what memory its workers need.

    Raises InputError for: a torch that can't be used; data that the layers can't take, to train or to evaluate on;
    parameters or buffers in two layers that are not named as tied; a model with nothing to train; sparse gradients and
    max_norm; an optimizer or scheduler that can't be used, or whose state can't be handed over; and a model that this
    machine has no memory for. here: the workers on this machine; None: all.
    """
    compat.check_version()
    # What is tried out here must not change the caller's random numbers, nor its settings of torch.
    with own_numbers("preflight", options.seed), kept_settings(), spelled(owner_names(workload)):
        _check_data(workload, options.job, options.seed, skips=options.faults.on_bad_sample == "skip")
        if options.evaluate_every:
            if getattr(workload, "evaluation", None) is None:
                raise options.refuse(
                    "evaluate_every", "0, since the workload has no data to evaluate on (`evaluation`)"
                )
            _check_evaluation(workload, options.seed)
        stages = options.job.stages
        partition = partition_at_start(options, layer_count(workload, stages))
        movable = _may_move(workload, partition, options)
        if options.planning.relayout == "always" and not movable:
            expected = (
                "auto or never: the model comes in stages, each stage has one layer, or op times are of whole stages"
            )
            raise options.planning.refuse("relayout", expected)
        shapes, looking_up = without_memory(functools.partial(_shapes, workload, sum(partition), options.seed))
        if not any(parameter.requires_grad for layer in shapes for _, parameter in layer):
            kind, count = kind_of(workload), sum(len(layer) for layer in shapes)
            got = f"{count} parameters, none of which requires a gradient"
            raise InputError(f"{kind}s", got, f"at least one {kind} with something to train")
        if options.platform.device == "cpu":
            _check_types(workload, shapes, looking_up, options)
        by_stage = [[named for layer in span for named in shapes[layer]] for span in spans(partition)]
        kept = _check_optimizer(workload, by_stage, options.optimization, movable=movable)
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
    """Returns the partition that the job begins with: as asked for, or even. Raises InputError."""
    job = options.job
    with spelled({"partition": "planning.partition"}):
        return partition_of(job.partition or parse_partition(options.planning.partition or ""), layers, job.stages)


# -- data -------------------------------------------------------------------------------------


class _Unreadable(Exception):
    """A micro-batch could not be read. Its argument is the error to raise."""


def _check_grid(workload: Workload, job: Job) -> None:
    """Raises InputError for data that are cut for another grid: some samples would come twice, and others never."""
    cut: tuple[int, int] | None = getattr(workload, "grid", None)
    for name, own, others in zip(
        ("pipelines", "micro_batches"), (job.pipelines, job.micro_batches), cut or (), strict=False
    ):
        if own != others:
            expected = f"{others}, as the trainer's job has it, for which its data are cut"
            raise InputError(f"job.{name}", own, expected)


def _check_data(workload: Workload, job: Job, seed: int, *, skips: bool) -> None:
    """Reads the first and the last micro-batch of the first iteration, and compares them. skips: a micro-batch that
    raises is skipped, as long as there are others."""
    _check_grid(workload, job)
    places = [(p, m) for p in range(job.pipelines) for m in range(job.micro_batches)]
    found = []
    for order in (places, places[::-1]):
        for place in order:
            try:
                found.append((place, _micro_batch(workload, seed, *place)))
                break
            except _Unreadable as one:
                if not skips or place == order[-1]:
                    raise one.args[0] from one.__cause__
    (place, first), (last, other) = found
    # Read again after another, since a workload may keep the last one. Streams have been checked before.
    if place != last and getattr(workload, "stream", None) is None:
        with contextlib.suppress(_Unreadable):
            if not alike(first, _micro_batch(workload, seed, *place)):
                raise InputError(
                    "data",
                    f"another {_named(workload, *place)} when it is read again",
                    "the same each time, in every process: one worker reads its inputs, and another its targets. What "
                    "has random numbers of its own must draw them by (iteration, pipeline, micro_batch), or by the "
                    "sample's index; give what can only be read in order as an IterableDataset",
                )
    if getattr(workload, "varies", False):
        return  # workers compare each output with the largest one
    if _parts(other) != _parts(first):
        raise InputError(
            "data",
            f"{_specs(first)} in the first micro-batch, {_specs(other)} in another",
            "inputs of one shape and type in all micro-batches; PadCollate pads samples to one length, or to one of "
            "several",
        )


def _micro_batch(workload: Workload, seed: int, pipeline: int, micro_batch: int) -> tuple[tuple[Tensor, ...], Any]:
    """Reads the inputs and targets of a micro-batch of the first iteration."""
    try:
        inputs = tensors_of(workload.inputs(seed, 0, pipeline, micro_batch), "inputs")
        targets = workload.targets(seed, 0, pipeline, micro_batch)
    except InputError:
        raise
    except StageIOError as error:
        raise InputError("data", str(error).partition("got ")[2].partition(",")[0], _TENSORS) from None
    except Exception as error:
        text = in_a_line(error)
        pads = "; PadCollate pads samples to one length" if "equal size" in text else ""  # words of torch's collation
        expected = f"{_named(workload, pipeline, micro_batch)} to be there{pads}"
        raise _Unreadable(InputError("data", text[:200], expected)) from error
    if elsewhere := {str(t.device) for t in [*inputs, *_tensors(targets)]} - {"cpu"}:
        got = f"tensors on {', '.join(sorted(elsewhere))}"
        raise InputError("data", got, "tensors on the CPU: each micro-batch is moved to the GPU for you")
    return inputs, targets


def _named(workload: Workload, pipeline: int, micro_batch: int) -> str:
    samples = getattr(workload, "samples", lambda *_: ())(0, pipeline, micro_batch)
    return f"micro-batch {micro_batch} of pipeline {pipeline}" + named(samples)


def _check_evaluation(workload: Workload, seed: int) -> None:
    """Raises InputError if the first micro-batch of the evaluation has more inputs than those that are trained on. One
    that can't be read is no error here: that is reported with the evaluation, and does not end the job."""
    data: EvaluationData = workload.evaluation  # type: ignore[attr-defined]
    try:
        given = tensors_of(data.inputs(seed, 0), "inputs")
        data.targets(seed, 0)
        trained_on = tensors_of(workload.inputs(seed, 0, 0, 0), "inputs")
    except InputError as error:
        raise InputError("evaluate.data", error.value, error.expected) from None
    except Exception:
        return
    if len(given) > len(trained_on):  # fewer may do, since a layer may have default arguments
        expected = f"no more than in the first micro-batch that is trained on, {len(trained_on)}"
        raise InputError("evaluate.data", f"inputs of {len(given)} tensors", expected)


_TENSORS = "inputs that are a tensor, or a tuple of tensors, the positional arguments of stage 0 (no dict)"


def _parts(read: tuple[tuple[Tensor, ...], Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(t.shape), t.dtype) for t in read[0]]


def _specs(read: tuple[tuple[Tensor, ...], Any]) -> str:
    return ", ".join(str(TensorSpec.of(t)) for t in read[0])


# -- layers -----------------------------------------------------------------------------------


def _shapes(workload: Workload, layers: int, seed: int) -> tuple[list[NamedParameters], set[int]]:
    """Builds and checks each layer. Returns, for each layer, the names of its parameters and stand-ins without memory;
    and the numbers of the layers that have an Embedding."""
    # Tensors that still exist after their layer is deleted: a later layer may hold the same ones.
    seen: list[tuple[weakref.ref[Tensor], int, str]] = []
    kind, shapes, looking_up = kind_of(workload), list[NamedParameters](), set[int]()
    tied = tied_of(workload, layers)
    members = {name: group for group in tied for name in group}
    forms: dict[str, str] = {}
    shared: Sequence[str] = getattr(workload, "shared_inputs", ())
    for layer in range(layers):
        try:
            module = build_layer(workload, layer, layers, seed)
        except InputError:
            raise
        except Exception as error:
            if torch.empty(0).device.type == "meta":
                raise
            raise InputError(f"{kind}s", in_a_line(error)[:200], f"a builder that makes {kind} {layer}") from error
        if layer and shared:
            shared = [name for name in shared if name not in taken_by(module, shared)]
        for name, part in module.named_modules():
            if not isinstance(part, nn.Embedding | nn.EmbeddingBag):
                continue
            looking_up.add(layer)
            if part.sparse:
                got = f"{type(part).__name__}(sparse=True), {name or 'which is the whole'} of {kind} {layer}"
                raise InputError(f"{kind}s", got, "sparse=False: gradients are summed as dense tensors")
            if part.max_norm is not None:
                got = f"{type(part).__name__}(max_norm=...), {name or 'which is the whole'} of {kind} {layer}"
                expected = (
                    "no max_norm: each forward would rescale the rows that it looks up, and peers look up others; "
                    "rescale all rows in a step hook of the optimizer"
                )
                raise InputError(f"{kind}s", got, expected)
        mine = [*module.named_parameters(), *module.named_buffers()]
        if lazy := next((name for name, tensor in mine if nn.parameter.is_lazy(tensor)), None):
            got = f"{lazy} of {kind} {layer}, whose shape its first input gives"
            raise InputError(f"{kind}s", got, "modules with given sizes, no lazy ones")
        for name, parameter in module.named_parameters():
            if parameter.is_complex():
                got = f"{name} of {kind} {layer}, which is {dtype_name(parameter.dtype)}"
                expected = "real parameters (torch.view_as_complex)"
                raise InputError(f"{kind}s", got, expected)
        for name, tensor in mine:
            if tensor.dtype not in DTYPES.values():
                got = f"{name} of {kind} {layer}, which is {dtype_name(tensor.dtype)}"
                raise InputError(f"{kind}s", got, f"a type that peers can be sent: {', '.join(DTYPES)}")
            if tensor.dtype == torch.float4_e2m1fn_x2 and not isinstance(tensor, nn.Parameter):
                got = f"{name} of {kind} {layer}, which is {dtype_name(tensor.dtype)}"
                expected = "no buffer of this type; keep uint8, and view it in a forward"
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
                expected = f"that it is said: tied=[['{other}.{its_name}', '{layer}.{name}']]"
                if not isinstance(tensor, nn.Parameter):
                    expected = f"no buffer in two {kind}s: give each a copy, or put what shares it into one {kind}"
                got = f"{its_name} of {kind} {other}, which is {name} of {kind} {layer}, too"
                raise InputError(f"{kind}s", got, expected)
        seen += [(weakref.ref(tensor), layer, name) for name, tensor in mine]
        shapes.append(
            [
                (f"{layer}.{name}", nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
                for name, p in module.named_parameters()
            ]
        )
        del module, mine, alive
    if shared and layers > 1:  # with one stage, nothing is behind the first
        raise InputError("data.shared", list(shared), f"names of arguments of a {kind} behind the first")
    for group in tied:
        for name in group:
            if name not in forms:
                raise InputError("tied", name, f"LAYER.NAME of a parameter, with LAYER from 0 to {layers - 1}")
            if forms[name] != forms[group[0]]:
                expected = f"the form of {group[0]}, which is {forms[group[0]]}"
                raise InputError("tied", f"{name}, which is {forms[name]}", expected)
    return shapes, looking_up


_OF_TYPES = "dtype|datatype|scalar type|Input type|not implemented for"
"""Words that torch and its modules use in errors where types do not fit together."""
_AS_INDICES = {torch.int64, torch.int32, torch.bool}


def _check_types(
    workload: Workload, shapes: Sequence[NamedParameters], looking_up: Collection[int], options: TrainingOptions
) -> None:
    """Raises InputError for inputs of a wrong type, such as float64 from NumPy. Tensors without data do not show this,
    since they accept any types. So if inputs have a type that none of the parameters has that they first meet, the
    layers up to there are run for real. looking_up: layers that may take indices."""
    first = next((i for i, layer in enumerate(shapes) if any(p.is_floating_point() for _, p in layer)), None)
    size = 0 if first is None else sum(p.nbytes for layer in shapes[: first + 1] for _, p in layer)
    if first is None or size > LARGE_BYTES:
        return
    # Types that indices may have are tried only on small layers: otherwise it takes seconds, and workers will show it.
    indices = _AS_INDICES if first in looking_up or size > SMALL_BYTES else set()
    types = {p.dtype for _, p in shapes[first] if p.is_floating_point()}
    try:
        inputs = tensors_of(probe_inputs(workload, options.seed), "data")
        if {t.dtype for t in inputs} <= types | indices:
            return
        module = build_layers(workload, range(first + 1), len(shapes), options.seed, torch.clone)
    except Exception:
        return  # another check reports it in better words
    try:
        with torch.no_grad(), _nothing_compiled(), precision(options.optimization.autocast):
            module(*inputs, seed=0)
    except Exception as error:
        text = in_a_line(error)
        if not isinstance(error, (RuntimeError, ValueError)) or not re.search(_OF_TYPES, text):
            return  # workers will report it
        given, wanted = ", ".join(str(TensorSpec.of(t)) for t in inputs), ", ".join(sorted(map(dtype_name, types)))
        odd, hint = {t.dtype for t in inputs} - types, ""
        if "indices" in text or "embedding" in text:
            hint = " (indices, such as tokens, are int64)"
        elif torch.float64 in odd:
            hint = " (NumPy's are float64)"
        elif torch.float32 in types and not any(dtype.is_floating_point for dtype in odd):
            hint = " (.float() makes such of them)"
        expected = f"inputs that parameters of {wanted} go with{hint}"
        raise InputError("data", f"inputs of {given} ({text[:200]})", expected) from None


# -- the optimizer ----------------------------------------------------------------------------


def _check_splits(workload: Workload, shapes: NamedParameters, ranks: int) -> None:
    """Raises InputError unless the layers can be split over ranks, and the optimizer can step their parts."""
    field = "platform.ranks_per_worker"
    if not hasattr(workload, "parallelize"):
        expected = "1, or `parallelize(layer, mesh)`: a method of the workload, or Model(parallelize=...)"
        raise InputError(field, ranks, expected)
    kind = type(make_optimizer(workload.optimizer, shapes))
    if not kind.__module__.startswith("torch.optim") or kind.__name__ not in ELEMENTWISE:
        expected = (
            f"1 with {kind.__name__}: each rank steps its part of a parameter, which takes one of "
            f"{', '.join(sorted(ELEMENTWISE))} of torch.optim"
        )
        raise InputError(field, ranks, expected)


class _Kept(NamedTuple):
    """What an optimizer keeps. each: bytes per element of a parameter, at least. apart: are parameters stepped one
    after the other? hooked: does a step call hooks that may do anything?"""

    each: float
    apart: bool
    hooked: bool = False


def _may_move(workload: Workload, partition: Partition, options: TrainingOptions) -> bool:
    """May layers come to another stage while the job trains?"""
    layers = sum(partition)
    cut = options.planning.layered(options.job, None if kind_of(workload) == "stage" else layers).layers
    return bool(cut) and layers > len(partition) and options.planning.relayout != "never"


def _check_optimizer(
    workload: Workload, shapes: list[NamedParameters], optimization: Optimization, *, movable: bool
) -> _Kept:
    """Tries the optimizer of each stage that differs from the stages before, on a few numbers: after a hand-over of its
    state, and after a roll-back, it must lead to the same bits. movable: may layers come to another stage? Then the
    groups must be the same however the model is cut: a layer that moves gets the options of the stage that it comes
    to."""
    tried, made, kept = set(), dict[str, _ParameterGroups](), list[_Kept]()
    for stage, mine in enumerate(shapes):
        small = [(tuple(min(_SIDE, n) for n in p.shape), p.dtype, p.requires_grad) for _, p in mine[:_MOST]]
        key = tuple(sorted({(len(shape), str(dtype), grad) for shape, dtype, grad in small}))
        made[f"stage {stage}"] = _make(workload, mine, optimization)
        if key not in tried:
            tried.add(key)
            kept.append(_try(workload, small, optimization))
    if not any(groups.of for groups in made.values()) and any(p.requires_grad for mine in shapes for _, p in mine):
        # Its steps would change nothing that is trained. A single stage may have nothing that it trains.
        expected = "one of the parameters that the function is given"
        raise InputError("optimizer", "an optimizer without the given parameters", expected)
    if movable:
        whole = [named for mine in shapes for named in mine]
        made["all layers in one stage"] = _make(workload, whole, optimization)
    counts = {len(groups.options): where for where, groups in made.items()}
    if len(counts) > 1:
        got = " and ".join(f"{count} for {where}" for count, where in sorted(counts.items()))
        expected = (
            "one number of them for any part of the model: one for each layer of the whole model, say; a group may "
            "have no parameters"
        )
        raise InputError("optimizer", f"parameter groups: {got}", expected)
    if movable:
        _check_alike(made)
    return min(kept, default=_Kept(0.0, True))


class _ParameterGroups(NamedTuple):
    """The parameter groups of an optimizer: the options of each, and the group of each parameter by its name."""

    options: Sequence[Mapping[str, Any]]
    of: Mapping[str, int]


def _check_alike(made: Mapping[str, _ParameterGroups]) -> None:
    """Raises InputError unless these optimizers, by what they are for, have the same options in their groups, and each
    parameter in the same group. The last one is that of all parameters."""
    expected = (
        "the same wherever the model is cut, so that layers can move: one group for each layer of the whole model, "
        "say; a group may have no parameters. Or relayout=never"
    )
    *stages, (all_layers, whole) = made.items()
    for where, groups in stages:
        for number, (mine, theirs) in enumerate(zip(groups.options, whole.options, strict=True)):
            for name in sorted(mine.keys() | theirs.keys()):
                one, other = mine.get(name), theirs.get(name)
                if not _same_option(one, other):
                    got = f"{name} of parameter group {number}: {one} for {where}, {other} for {all_layers}"
                    raise InputError("optimizer", got, expected)
        for name, number in groups.of.items():
            if whole.of.get(name) != number:
                got = f"{name} in parameter group {number} for {where}, in {whole.of.get(name)} for {all_layers}"
                raise InputError("optimizer", got, expected)


def _same_option(one: Any, other: Any) -> bool:
    """Says whether two values of an option of a parameter group mean the same. What is no number, such as a user's list
    of the parameters' names, does not: it may differ."""
    one, other = (value.tolist() if isinstance(value, Tensor) else value for value in (one, other))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        names = all(isinstance(value, str) for value in (*one, *other))
        return names or (len(one) == len(other) and all(map(_same_option, one, other)))
    plain = (bool, int, float, type(None))
    if not (isinstance(one, plain) and isinstance(other, plain)):
        return True
    return one == other or (one != one and other != other)


def _make(workload: Workload, named: NamedParameters, optimization: Optimization) -> _ParameterGroups:
    """Makes the optimizer and scheduler for the stage's own shapes, without memory. Returns its parameter groups.
    Raises InputError."""
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
        expected = (
            "a function of a stage's parameters, or of (name, parameter) pairs where its argument is called "
            "named_parameters, that returns an optimizer"
        )
        raise InputError("optimizer", in_a_line(error)[:200], expected) from error
    try:
        made = scheduler(optimizer) if scheduler is not None else None
    except Exception as error:
        expected = "a function of an optimizer that returns an LRScheduler"
        raise InputError("scheduler", in_a_line(error)[:200], expected) from error
    if scheduler is not None and not (hasattr(made, "step") and hasattr(made, "optimizer")):
        raise InputError("scheduler", type(made).__name__, "a function of an optimizer that returns an LRScheduler")
    StageOptimizer(nn.Module(), optimizer, SUM_OF[optimization.mode]((), terms=1), made)
    names = {id(parameter): name for name, parameter in named}
    groups = optimizer.param_groups
    of = {names[id(p)]: number for number, group in enumerate(groups) for p in group["params"] if id(p) in names}
    return _ParameterGroups(
        [{name: value for name, value in group.items() if name != "params"} for group in groups], of
    )


def check_schedule(
    workload: Workload, options: TrainingOptions, needed: JobMemory, resumed: Checkpoint | None = None
) -> None:
    """Raises InputError for a scheduler that can't take as many steps as the job has iterations, as OneCycleLR can't
    beyond its total_steps: the step that it lacks would end the job, and with it what was trained. Tried is the last
    step alone, of each part of a SequentialLR or ChainedScheduler its own. resumed: the checkpoint whose state the
    scheduler takes; that may say how many steps there are, whatever the script says."""
    scheduler = getattr(workload, "scheduler", None)
    if scheduler is None:
        return
    kept = resumed.scheduler() if resumed else None

    def made() -> Any:
        fresh = scheduler(make_optimizer(workload.optimizer, list(needed.first_stage)))
        if kept is not None:
            fresh.load_state_dict(copy.deepcopy(kept[1]))
        return fresh

    def parts() -> list[tuple[Any, int]]:
        return compat.parts_of_scheduler(made(), in_all)

    with own_numbers("schedule", options.seed), kept_settings(), warnings.catch_warnings(action="ignore"):
        if resumed and not (kept and _fits(made, kept[0])):
            return  # a state that does not fit is the workers' to refuse
        done = resumed.iteration if resumed else 0
        # Fewer than iterations, if updates were skipped.
        in_all = options.iterations - done + compat.steps_taken(made(), done)
        if part_class := compat.part_without_beginning(made(), in_all):
            got = f"{type(made()).__name__} with {part_class}, whose turn comes later: torch can't begin that one then"
            raise InputError("scheduler", got, "schedulers without parts behind the first milestone")
        for number in range(len(parts())):
            part, steps = parts()[number]
            if compat.steps_taken(part, 0) >= steps:  # its turn in a SequentialLR is over
                continue
            error = _last_step(part, steps)
            if error is None or not _can_jump(lambda number=number: parts()[number][0], steps):  # type: ignore[misc]
                continue
            whole, name = type(made()).__name__, type(part).__name__
            which = name if name == whole else f"{whole} with {name}"
            if resumed:
                which += f" with its state in {resumed.path}"
            got = f"{which}, whose last step of {steps} raises {in_a_line(error)[:200]}"
            expected = "one that has a step for each iteration of the job"
            if resumed:
                expected += ", or fewer iterations: that state counts, and not what the script says"
            raise InputError("scheduler", got, expected) from error


def _fits(made: Callable[[], Any], name: str) -> bool:
    """Says whether a scheduler of this class takes the state that it is made with, and each part of it can then take an
    early step."""
    try:
        scheduler = made()
    except Exception:
        return False
    parts = compat.parts_of_scheduler(scheduler, sys.maxsize)
    return type(scheduler).__name__ == name and all(_last_step(part, 2) is None for part, _ in parts)


def _last_step(scheduler: Any, steps: int) -> Exception | None:
    """Returns what the last of so many steps raises. The others are not made. None also for a scheduler of the user's
    own that counts in another way."""
    if not isinstance(getattr(scheduler, "last_epoch", None), int):
        return None
    try:
        scheduler.last_epoch = steps - 1
    except AttributeError:  # a property, which shows what another object counts
        return None
    try:
        scheduler.step()
    except Exception as error:
        return error
    return None


def _can_jump(made: Callable[[], Any], steps: int) -> bool:
    """Says whether a scheduler's last step fails also where the steps before it are made, as far as a few steps show
    that: one of the user's own may keep what it had in each step, and miss it, or count epochs and not steps."""
    scheduler = made()
    begin: int = scheduler.last_epoch  # -1 in a part whose turn comes later
    few = min(steps, begin + _FEW_STEPS)
    for number in range(begin, few):
        try:
            scheduler.step()
        except Exception:
            # Where the first step fails, nothing is shown: it may need an optimizer that has stepped. Then the newest
            # step of a checkpoint fails again, too.
            return number > begin or _last_step(made(), begin if begin > 0 else few) is None
        if scheduler.last_epoch != number + 1:
            return False
    return _last_step(made(), few) is None


_FEW_STEPS = 3


def _try(
    workload: Workload, small: list[tuple[tuple[int, ...], torch.dtype, bool]], optimization: Optimization
) -> _Kept:
    def stage() -> StageOptimizer:
        generator = torch.Generator().manual_seed(0)
        module = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator).to(dtype), grad) for shape, dtype, grad in small
        )
        return stage_optimizer(workload, module, SUM_OF[optimization.mode](module.parameters(), terms=1), optimization)

    for steps in _STEPS:
        try:
            _steps(stage(), range(2 * steps))
        except StageIOError:
            got = "one whose step makes parameters require a gradient"
            expected = "one that leaves that as it is: what is trained stays the same in a job"
            raise InputError("optimizer", got, expected) from None
        except Exception:
            continue
        break
    else:
        return _Kept(0.0, True)  # perhaps it needs its real parameters; peers are still compared while they train
    mine, peer = stage(), stage()
    name = type(mine.optimizer).__name__
    if mine.scheduler is not None:
        name += f" with {type(mine.scheduler).__name__}"
    advice = (
        "one that keeps all that a step depends on in `state` and `param_groups` (a scheduler: in its state_dict): a "
        "worker that re-joins is given that, and nothing else"
    )
    try:
        _steps(mine, range(steps))
        peer.load_state(unpack(*pack(mine.state())))
        _steps(mine, range(steps, 2 * steps))
        _steps(peer, range(steps, 2 * steps))
        if not _equal(mine, peer):
            raise InputError("optimizer", name, advice)
        mine.roll_back()
        _steps(mine, range(2 * steps - 1, 2 * steps))
        if not _equal(mine, peer):
            raise InputError("optimizer", name, advice)
    except (StateError, StageIOError) as error:
        raise InputError("optimizer", f"{name} ({error})", advice) from None
    elements, kept = 0, 0
    for parameter, state in mine.optimizer.state.items():
        elements += parameter.numel()
        kept += sum(t.nbytes for t in state.values() if isinstance(t, Tensor) and t.shape == parameter.shape)
    return _Kept(kept / elements if elements else 0.0, mine.steps_apart, mine.has_own_hooks)


def _steps(stage: StageOptimizer, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in stage.gradients.parameters:
            stage.gradients.add(parameter, torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        stage.step()


def _equal(one: StageOptimizer, other: StageOptimizer) -> bool:
    return pack(one.state())[0] == pack(other.state())[0]  # the header has a checksum of everything


# -- do the workers fit into memory? ------------------------------------------------------------


class Machine(NamedTuple):
    """A machine. workers: those that run on it at the start. has: the bytes that its workers may have in all, where
    that is known. host: a name by which workers on it know it, and which no other machine has."""

    workers: Collection[Worker]
    has: int | None
    host: str = ""


@dataclass(frozen=True)
class JobMemory:
    """The bytes that the workers of each stage need. least: those of a worker that has one micro-batch in flight, and
    neither gives nor writes anything. text: all of it in a sentence. warning: may workers need more than there is, if
    they need all of it at the same time?

    partition: at the start. layers, held, resumed: as in LayerRoom. parameter_bytes: of the whole model. first_stage:
    its parameters by name, without memory."""

    stages: tuple[StageMemory, ...]
    least: tuple[int, ...]
    text: str
    warning: bool = False
    partition: Partition = ()
    layers: tuple[tuple[int, int], ...] = ()
    held: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    parameter_bytes: int = 0
    first_stage: Sequence[tuple[str, nn.Parameter]] = ()

    @property
    def told(self) -> tuple[int, ...]:
        """What a console is told: by stage, the bytes that a worker may need; () where activations are not known."""
        return tuple(s.total for s in self.stages) if all(s.activations for s in self.stages) else ()

    def of(self, workers: Collection[Worker]) -> int:
        """Returns the bytes that these workers may need together."""
        return sum(self.stages[worker.stage].total for worker in workers)

    def room(self, workload: Workload, options: TrainingOptions, machines: Collection[Machine]) -> LayerRoom | None:
        """Returns the room for layers that move to another stage. Returns None if there is enough for any layers, or if
        it is not known how much there is."""
        stages = len(self.stages)
        places = [
            (has, tuple(int(s == stage) for s in range(stages)), "")
            for stage, has in enumerate(options.job.capacity_bytes)
        ]
        for workers, has, host in machines:
            if workers and has is not None:
                places.append((has, tuple(sum(w.stage == s for w in workers) for s in range(stages)), host))
        # A checkpoint is read before anything else.
        totals = [stage.total - stage.resume for stage in self.stages]
        everything = max(sum(totals) + sum(most - least for least, most in self.layers), sum(self.resumed))
        # On a machine with a name there may come to be more workers than at the start.
        most = [(has, options.job.pipelines * stages if host else sum(workers)) for has, workers, host in places]
        if all(workers * everything <= has for has, workers in most):
            return None
        if options.planning.limits[1].text == "bytes":  # plans themselves keep to the memory, in each partition
            each = (0,) * len(self.layers)
        else:
            with own_numbers("room", options.seed), kept_settings():
                each = self._activations(workload, options)
        room = LayerRoom(
            (0,) * stages,
            self.layers,
            each,
            self.held,
            tuple(places),
            self.resumed,
        )
        by_layers = room.taken(self.partition, self.partition, (options.job.pipelines,) * stages)
        beside = tuple(max(0, total - known) for total, known in zip(totals, by_layers, strict=True))
        return replace(room, beside=beside)

    def _activations(self, workload: Workload, options: TrainingOptions) -> tuple[int, ...]:
        """Returns, for each layer, the bytes of activations of a micro-batch. Where the layers can't be run one by one,
        each gets an equal share of its stage's."""
        alone, autocast = (1,) * len(self.layers), options.optimization.autocast
        found = micro_batch_memory(workload, alone, options.seed, autocast, self.parameter_bytes)
        if found is not None:
            return tuple(max(one.forward, one.backward) for one in found)
        shares = zip(self.stages, self.held, self.partition, strict=True)
        return tuple(one for s, held, n in shares for one in [-(-s.activations // max(1, held * n))] * n)

    def check(self, workers: Collection[Worker], has: int | None, where: str) -> str:
        """Returns a warning, or "". has: the bytes that the workers may have. where: where they are, in words. Raises
        InputError where not even the least fits."""
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
    """Reckons the job's memory, and checks it. here: the workers on this machine. Raises InputError."""
    job, optimization, ranks = options.job, options.optimization, options.platform.ranks_per_worker
    workers = list(job.workers()) if here is None else here
    on_cpu = options.platform.device == "cpu"
    has, where = memory_limit() if on_cpu else None, "on this machine"
    divided, own = False, shapes
    if ranks > 1:
        divided, own = parts_of_a_rank(workload, sum(partition), options.platform.shape, options.seed)

    copies = 0 if options.checkpoints.directory is None or not on_cpu else 1 + (options.checkpoints.every == 1)

    def checkpoint(span: Iterable[int]) -> int:
        mine = [parameter for layer in span for parameter in shapes[layer]]
        return checkpoint_memory(
            state_memory(mine, kept.each, kept.apart, optimization, 1, hooked=kept.hooked), job.pipelines, copies=copies
        )

    def resumed(whole: StageMemory, span: Iterable[int]) -> int:
        """Returns the bytes that a worker needs to read a checkpoint. whole: the memory of a worker that has all of the
        stage's state."""
        # Each rank puts together whole parameters, one at a time, and keeps its part.
        largest = max((p.nbytes for layer in span for _, p in shapes[layer]), default=0) if ranks > 1 else 0
        return whole.parameters + whole.sums + whole.copied + ranks * largest

    def states(peers: int) -> list[StageMemory]:
        by_stage = [[named for layer in span for named in own[layer]] for span in spans(partition)]
        return [
            state_memory(mine, kept.each, kept.apart, optimization, peers, hooked=kept.hooked).times(ranks)
            for mine in by_stage
        ]

    plain, alone = states(job.pipelines), states(1)
    if has is not None:
        # Checked before a micro-batch is tried, which may itself take more memory than there is.
        _refuse_above(sum(plain[w.stage].total for w in workers), workers, has, "beside activations", where)
    size = sum(p.nbytes for layer in shapes for _, p in layer)
    micro_batches = micro_batch_memory(
        workload, partition, options.seed, optimization.autocast, size, as_workers=on_cpu and ranks == 1
    )
    # Ranks of tensor parallelism run every sample; in the worst case each of them holds all of its activations.
    ranks_that_hold = ranks // options.platform.shape[0] if divided else ranks
    each, least, held = list[StageMemory](), list[int](), _held(options)
    for stage, state in enumerate(plain):
        one = state
        if micro_batches is not None:
            mine = micro_batches[stage]
            one = with_activations(state, replace(mine, received=0), [(1, 0), (0, 1)], 0, 1)
            state = with_activations(state, mine, held[stage], job.micro_batches, ranks_that_hold)
        state = replace(state, checkpoint=checkpoint(spans(partition)[stage]))
        state = replace(state, hand_over=hand_over_memory(state, kept.each, job.pipelines))
        if on_cpu and optimization.sharding == "zero1" and job.pipelines > 2:  # of two peers, both need all sums
            others = job.pipelines - 1
            state = replace(state, terms=min(scatter_memory(job.pipelines), state.sums * others // job.pipelines))
        if copies:
            state = replace(state, resume=max(0, resumed(alone[stage], spans(partition)[stage]) - state.total))
        each.append(state)
        least.append(one.total)

    def layer(number: int, peers: int) -> StageMemory:
        return state_memory(own[number], kept.each, kept.apart, optimization, peers, hooked=kept.hooked).times(ranks)

    def of_layer(number: int, peers: int) -> int:
        state = layer(number, peers)
        # The memory for what is computed or stepped at a time need not grow with the number of layers.
        once = state.gradients if kept.apart and optimization.clip_norm is None else 0
        return state.total - once + checkpoint([number])

    in_flight = tuple(ranks_that_hold * max(map(sum, stage)) for stage in held)
    by_layer = tuple((of_layer(k, _MANY), of_layer(k, 1)) for k in range(len(own)))
    read = tuple(resumed(layer(k, 1), [k]) for k in range(len(own))) if copies else ()
    made = JobMemory(tuple(each), tuple(least), "", False, partition, by_layer, in_flight, read, size)
    made = replace(made, first_stage=tuple(named for layer in spans(partition)[0] for named in shapes[layer]))
    told = [_said(made, held, micro_batches is not None, states, options)]
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


def _held(options: TrainingOptions) -> list[Held]:
    """Returns what a worker of each stage may hold, within the plans' limit. Without a limit, it may hold as many
    micro-batches as its pipeline has."""
    job, (technique, memory) = options.job, options.planning.limits
    try:
        rooms = Problem(job, technique=technique, memory=memory).room
    except (InputError, InfeasibleError):  # reported where plans are made
        rooms = (StageRoom(0, 0, 0),) * job.stages
    all_of_one, most = StageRoom(job.micro_batches, 1, 1), job.pipelines * job.micro_batches
    kept = {
        room: held_within(room if room.need or room.keep else all_of_one, most, splits=technique.splits)
        for room in set(rooms)
    }
    return [kept[room] for room in rooms]


def _said(
    memory: JobMemory,
    held: Sequence[Held],
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
            times = f" of {max(map(sum, held[largest]))} micro-batches" if part.name == "activations" else ""
            parts.append(f"{_WORDS.get(part.name, part.name)}{times} {_size(count)}")
    text = f"a worker takes up to {_size(worst.total)} ({', '.join(parts)})"
    if not measured:
        text += " beside activations, which are not known"
    if len({_size(total) for total in totals}) > 1:
        shown = ", ".join(map(_size, totals)) if len(totals) <= 8 else f"{_size(min(totals))} to {_size(max(totals))}"
        text += f", by stage {shown}"
    if options.optimization.sharding == "zero1" and peers > 2:

        def with_peers(count: int) -> str:
            # Only state and the checkpoint's copy change with the number of workers: each has a larger share.
            copies = [stage.checkpoint * peers // count - stage.checkpoint for stage in memory.stages]
            fewer = zip(states(count), states(peers), memory.stages, copies, strict=True)
            return _size(max(max(m.total, f.total - s.total + m.total - m.resume + c) for f, s, m, c in fewer))

        less = f"{with_peers(peers - 1)} once its stage has lost one worker, " if peers > 3 else ""
        text += f", {less}{with_peers(2)} once its stage has two workers left"
    return text


_MANY = 1 << 40
"""A number of workers so large that each has next to nothing of what is sharded over them."""
_WORDS = {
    "sums": "sums of gradients",
    "undo": "to undo a step",
    "hand_over": "hand-over of state",
    "terms": "peers' terms on their way",
    "resume": "to resume",
}
