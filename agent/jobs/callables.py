"""A workload made of plain functions, and how it travels to worker processes of the same machine."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Union

import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.models import compat, torch_pipelining
from openrecycle.agent.models.data import (
    Data,
    DatasetBatches,
    InOrder,
    Read,
    ReadAhead,
    StreamBatches,
    are_names,
    cuts_from,
    first_length,
    kind_name,
    own_numbers,
    read_cuts,
)
from openrecycle.agent.models.layers import StageIO, TensorSpec, Tied, tensors_of
from openrecycle.agent.models.state import StageState
from openrecycle.agent.models.workload import Metric, first_readable, weight_of
from openrecycle.agent.stages.optimizer import NamedParameters, make_optimizer
from openrecycle.planner.jobs.errors import InputError, as_whole, check_whole, in_a_line

if TYPE_CHECKING:  # torch takes seconds to import these
    from torch.distributed.pipelining import Pipe, PipelineStage

Built = Union[nn.Module, "PipelineStage"]
LayerBuilder = Callable[[int, int], Built]
Layers = LayerBuilder | Sequence[nn.Module | Callable[[], Built]]
"""Builds or lists the layers; or stages, which can't be cut."""
GivenLayers = Union[Layers, "Pipe", Sequence["PipelineStage"]]
"""What Model takes as layers or stages; for Pipe and PipelineStage see agent.models.torch_pipelining."""
Loss = Callable[[Any, Any], Tensor]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
"""A function of a stage's parameters; of (name, parameter) pairs, if its argument is called `named_parameters`."""
Parallelize = Callable[[nn.Module, Any], Any]
"""A function of (layer, DeviceMesh of a worker's ranks) that returns the layer split over these ranks."""
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """What a job trains: a model cut into layers, and its loss.

    layers: a function of (layer, layers) that returns a torch.nn.Module, with layer_count, the number of layers. Or a
        sequence with one module, or one builder without arguments, per layer. A layer takes what the previous one
        returns: a tensor, or several as positional arguments. The random numbers of a builder are seeded per layer.
        A stage is a run of consecutive layers; where the model is cut has no influence on the numbers. Or a Pipe of
        torch.distributed.pipelining, each of whose stages counts as a layer; a PipelineStage stands for its module.
    stages: instead of layers, in the same forms, one module per stage; such a model can't be cut elsewhere.
    loss: a function of (output of the last layer, targets) that returns the mean loss of a micro-batch.
    tied: parameters that several layers share, as groups of LAYER.NAME, such as
        [["0.embedding.weight", "11.head.weight"]]. Not needed where the layers are given as modules. Each layer has a
        copy, and each copy gets the sum of all the copies' gradients, so that all of them take the same steps.
    parallelize: a function of (layer, torch DeviceMesh) that returns the layer split over the ranks of a worker, by
        torch's parallelize_module or fully_shard, or with mesh=... by both. It needs
        platform=Platform(ranks_per_worker=...).
    stage_io: the TensorSpecs of what passes between each pair of neighbouring layers (or stages); found out if not
        given.
    """

    layers: GivenLayers | None = None
    layer_count: int | None = None
    stages: GivenLayers | None = None
    loss: Loss
    tied: Sequence[Sequence[str]] = ()
    parallelize: Parallelize | None = None
    stage_io: StageIO | None = None

    def __post_init__(self) -> None:
        """Turns what comes from torch.distributed.pipelining into modules. Raises InputError."""
        if (self.stages is None) == (self.layers is None):
            given = "neither" if self.stages is None else "both"
            raise InputError("model.layers", given, "layers, or stages that can't be cut")
        field, count = f"model.{self.kind}s", self.layer_count
        parts = torch_pipelining.modules_of(self.parts, field)
        listed = isinstance(parts, Sequence) and not isinstance(parts, str | bytes)
        if not listed and not callable(parts):
            raise InputError(field, kind_name(parts), "a list of modules, or a function that builds them")
        for number, part in enumerate(parts if listed else ()):
            if not callable(part):
                got = f"{kind_name(part)} of number {number}"
                raise InputError(field, got, "modules, or functions that build them")
        if self.stages is not None and count is not None:
            raise InputError("model.layer_count", count, "nothing beside stages")
        if self.layers is not None and not listed:
            expected = "an int of at least 1, the number of layers that the function builds"
            object.__setattr__(self, "layer_count", check_whole("model.layer_count", count, 1, expected))
        elif self.layers is not None and count is not None and as_whole(count) != len(parts):
            raise InputError("model.layer_count", count, f"the number of layers given, {len(parts)}")
        _check_loss(self.loss)
        if not isinstance(self.tied, list | tuple) or not all(map(are_names, self.tied)):
            expected = 'groups of LAYER.NAME, such as [["0.embedding.weight", "11.head.weight"]]'
            raise InputError("model.tied", self.tied, expected)
        if alone := [group for group in self.tied if len(set(group)) < 2]:
            raise InputError("model.tied", alone[0], "several parameters in a group, which share their numbers")
        if self.parallelize is not None and not callable(self.parallelize):
            raise InputError("model.parallelize", self.parallelize, "a function of (layer, mesh)")
        if self.stage_io is not None and not _are_specs(self.stage_io):
            expected = "for each pair of neighbouring layers, or stages, a list of TensorSpecs"
            raise InputError("model.stage_io", self.stage_io, expected)
        object.__setattr__(self, f"{self.kind}s", parts)
        object.__setattr__(self, "tied", tuple(map(tuple, self.tied)))

    @property
    def kind(self) -> str:
        return "stage" if self.layers is None else "layer"

    @property
    def parts(self) -> Any:
        """The layers; or the stages, which can't be cut."""
        return self.stages if self.layers is None else self.layers

    @property
    def count(self) -> int | None:
        """The number of layers; None where stages are given, of which a job has one each."""
        return len(self.layers) if isinstance(self.layers, Sequence) else self.layer_count

    def check(self, stages: int) -> None:
        """Raises InputError unless a job of so many stages can train this model."""
        if (count := self.count) is not None and count < stages:
            field = "model.layers" if isinstance(self.layers, Sequence) else "model.layer_count"
            raise InputError(field, count, f"at least one layer per stage of the job, {stages} in all")
        if isinstance(self.stages, Sequence) and (given := len(self.stages)) != stages:
            more = "; as layers=, a stage may hold several" if given > stages else ""
            raise InputError("model.stages", given, f"one per stage of the job, {stages} in all{more}")


def _are_specs(given: Any) -> bool:
    lists = isinstance(given, list | tuple) and all(isinstance(specs, list | tuple) for specs in given)
    return lists and all(isinstance(spec, TensorSpec) for specs in given for spec in specs)


def _check_loss(loss: Any) -> None:
    """Raises InputError for what is no function, and for a loss with parameters that no optimizer would get."""
    if not callable(loss):
        raise InputError("model.loss", loss, "something that can be called")
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise InputError("model.loss", f"the class {loss.__name__}", f"a module of it: {loss.__name__}()")
    named = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if names := [name for name, parameter in named if parameter.requires_grad]:
        got = f"a {type(loss).__name__} with {names[0]}, a parameter that requires a gradient"
        expected = (
            "one without, since only parameters of layers are trained: have the last layer hold them, and return them "
            "beside its output; or, if they are to stay as they are, loss.requires_grad_(False)"
        )
        raise InputError("model.loss", got, expected)


@dataclass
class CallableWorkload:
    """A Workload (see there) made of functions.

    data: cut, so that its `samples` are a function of (iteration, pipeline, micro-batch). input_names, usual_weight:
    set by `as_found`.
    """

    model: Model
    data: Data
    make_optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None
    seed: int
    evaluation: EvaluationBatches | None = None
    input_names: tuple[str, ...] = ()
    usual_weight: float | None = None

    owner_names: ClassVar[Mapping[str, str]] = {own.name: f"model.{own.name}" for own in fields(Model)}

    def __post_init__(self) -> None:
        self._batch: tuple[tuple[int, int, int], tuple[Any, Any]] | None = None
        self._ahead: ReadAhead | None = None
        # Found out before any layer becomes part of a stage, where it gets its own copies.
        self._shared = _shared(self.model.parts)

    def upcoming(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Says which micro-batches this worker will need next, in this order. The first call starts the process that
        reads ahead, if there is to be one."""
        if self._ahead is None and self.data.prefetch:
            self._ahead = ReadAhead(Read(self.data.samples, self.seed), self.data.prefetch)
        if self._ahead is not None:
            self._ahead.expect(places)

    @property
    def stream(self) -> StreamBatches | None:
        """The part of its data that has a position: a stream."""
        return Read(self.data.samples, self.seed).stream

    @property
    def grid(self) -> tuple[int, int] | None:
        """(pipelines, micro-batches) of the grid that the data are cut for; None: for none."""
        cut = Read(self.data.samples, self.seed).cut
        return None if cut is None else cut.grid

    def data_position(self, iteration: int) -> StageState | None:
        """Returns where the data go on at an iteration, for checkpoints and peers: how iterations were cut until now,
        and the position of a stream, if it is known. None where a user's function cuts them."""
        cut, position = Read(self.data.samples, self.seed).cut, None
        if cut is None:
            return None
        if isinstance(cut, StreamBatches):
            position = cut.position(iteration)
        document = {"cuts": list(map(list, cut.cuts))}
        if position is None:
            return StageState(document, {})
        return StageState(document | {"data": position.document}, position.tensors)

    def take_data_position(self, iteration: int, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `data_position` of a peer, or of the job that wrote a checkpoint, has returned. Raises
        KeyError, TypeError or ValueError where it is wrong."""
        cut = Read(self.data.samples, self.seed).cut
        if cut is None:
            return
        if "cuts" in document:  # none where a function of the user cut the data until now
            cuts = cuts_from(read_cuts(document["cuts"]), cut.cuts[-1], iteration)
            if cuts != cut.cuts:
                cut.cut_as(cuts)
                self._batch = None
                if self._ahead is not None:  # it reads what was there before
                    self._ahead.end()
                    self._ahead = None
        if isinstance(cut, StreamBatches) and document.get("data") is not None:
            cut.go_on(document["data"], tensors)

    @property
    def parallelize(self) -> Parallelize:
        """The user's function. Raises AttributeError if there is none, since only some workloads have it."""
        if self.model.parallelize is None:
            raise AttributeError("parallelize")
        return self.model.parallelize

    @property
    def stage_io(self) -> StageIO | None:
        return self.model.stage_io

    @property
    def varies(self) -> bool:
        """Do inputs have several shapes?"""
        return bool(getattr(self.data.collate, "varies", False))

    def largest(self, seed: int) -> tuple[Any, Any]:
        """Returns the (inputs, targets) of a micro-batch, padded to the largest possible length."""
        made = compat.copied(first_readable(partial(self._made, seed)))
        inputs, targets = self.data.split(self._widest(made))
        return _passed_on(inputs, self.input_names), targets

    @property
    def shared_inputs(self) -> tuple[str, ...]:
        return tuple(self.data.shared)

    def weight(self, targets: Any) -> Any:
        assert self.data.weight is not None
        return self.data.weight(compat.copied(targets))

    def as_found(self) -> CallableWorkload:
        """Returns a workload that also knows what the data show: the names of the inputs, where these are keyword
        arguments; and, where micro-batches are weighted, how much one counts. Raises InputError."""

        def read(*place: int) -> tuple[Any, Any, Any]:
            batch = self._made(self.seed, *place)
            return batch, *self.data.split(batch)

        batch, inputs, targets = first_readable(read)
        self.data.check_targets(batch)
        names, evaluation, usual = self.data.names(inputs), self.evaluation, None
        if self.data.weight is not None:
            try:
                usual = float(weight_of(self, targets)) or 1.0
            except Exception as error:
                expected = "a function of targets to a number"
                raise InputError("data.weight", in_a_line(error)[:200], expected) from error
        found = evaluation and replace(evaluation, input_names=names)
        return replace(self, input_names=names, usual_weight=usual, evaluation=found)

    @property
    def samples_per_micro_batch(self) -> int:
        return first_length(first_readable(partial(self.inputs, self.seed)))

    @property
    def kind(self) -> str:
        return self.model.kind

    def layer_count(self, stages: int) -> int:
        return self.model.count or stages

    def tied(self, layers: int) -> Tied:
        """Returns the parameters that are one in the given modules, and those that the user has named as tied."""
        return (*map(tuple, self.model.tied), *self._shared)

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        def build() -> Any:
            torch.manual_seed(seed_for("parameters", seed, layer))
            parts = self.model.parts
            if isinstance(parts, Sequence):
                return parts[layer] if isinstance(parts[layer], nn.Module) else parts[layer]()
            return parts(layer, layers)

        field = f"model.{self.kind}s"
        module = torch_pipelining.built(build, layer, layers, field)
        if not isinstance(module, nn.Module):
            raise InputError(field, type(module).__name__, f"a torch.nn.Module for {self.kind} {layer}")
        return module

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor | tuple[Tensor, ...]:
        inputs = compat.copied(self._of(seed, iteration, pipeline, micro_batch)[0])
        return _passed_on(inputs, self.input_names)

    def samples(self, iteration: int, pipeline: int, micro_batch: int) -> tuple[int, ...]:
        """Returns the indices of the samples in a micro-batch; () where data is no map-style data set."""
        if not isinstance(self.data.samples, DatasetBatches):
            return ()
        return tuple(map(int, self.data.samples.sampler(iteration, pipeline, micro_batch)))

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        return self._of(seed, iteration, pipeline, micro_batch)[1]

    def loss(self, output: Any, targets: Any) -> Tensor:
        loss = self.model.loss(output, compat.copied(targets))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError("model.loss", got, "a tensor with one number, the mean over the micro-batch")
        return loss

    def optimizer(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        return make_optimizer(self.make_optimizer, named_parameters)

    def _of(self, seed: int, *place: int) -> tuple[Any, Any]:
        """Returns a micro-batch's (inputs, targets). The last one is kept, since one worker may ask for both, or again
        after a failure. A first layer or a loss may change its arguments in place, so callers pass on copies."""
        iteration, pipeline, micro_batch = place
        key = iteration, pipeline, micro_batch
        if self._batch is None or self._batch[0] != key:
            self._batch = key, self.data.split(self._made(seed, *key))
        return self._batch[1]

    def _made(self, seed: int, *place: int) -> Any:
        """Returns a micro-batch as the data give it, not yet split."""
        iteration, pipeline, micro_batch = place
        key = iteration, pipeline, micro_batch
        return Read(self.data.samples, seed)(key) if self._ahead is None else self._ahead.take(key)

    def _widest(self, made: Any) -> Any:
        collate: Any = self.data.collate
        return collate.widest(made)


@dataclass
class EvaluationBatches:
    """EvaluationData (see there) made of functions. make_batch: returns the micro-batch of a number. data: what is
    trained on, which says how a micro-batch is split."""

    make_batch: Callable[[int], Any]
    micro_batches: int
    metrics: Mapping[str, Metric]
    data: Data
    input_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._batch: tuple[int, tuple[Any, Any]] | None = None

    def inputs(self, seed: int, index: int) -> Tensor | tuple[Tensor, ...]:
        return _passed_on(compat.copied(self._of(seed, index)[0]), self.input_names)

    def targets(self, seed: int, index: int) -> Any:
        return compat.copied(self._of(seed, index)[1])

    def _of(self, seed: int, index: int) -> tuple[Any, Any]:
        """Returns a micro-batch's (inputs, targets). The last one is kept, since both are asked for; and for the next
        evaluation, if there is only one. Layers and metrics may change their arguments in place, so callers get
        copies."""
        if self._batch is None or self._batch[0] != index:
            with own_numbers("evaluation data", seed, index):
                made = self.make_batch(index)
            self._batch = index, self.data.split(made)
        return self._batch[1]


def _passed_on(inputs: Any, names: tuple[str, ...]) -> Tensor | tuple[Tensor, ...]:
    """Returns inputs as layer 0 gets them. names: of the keyword arguments. Raises InputError or StageIOError."""
    if isinstance(inputs, Mapping) or names:
        if not isinstance(inputs, Mapping) or set(inputs) != set(names):
            got = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
            raise InputError(
                "data", got, f"{', '.join(names) or 'no dict'}, as in the first micro-batch that is trained on"
            )
        inputs = tuple(inputs[name] for name in names)
    tensors = tensors_of(inputs, "inputs from data")
    return tensors[0] if len(tensors) == 1 else tensors


def _shared(layers: Layers) -> Tied:
    """Returns the parameters that several of the given modules have, or had in the Pipe that they come from."""
    if isinstance(layers, torch_pipelining.PipeLayers):
        return layers.shared
    holders: dict[int, list[str]] = {}
    if isinstance(layers, Sequence):
        for layer, part in enumerate(layers):
            for name, parameter in part.named_parameters() if isinstance(part, nn.Module) else ():
                holders.setdefault(id(parameter), []).append(f"{layer}.{name}")
    return tuple(tuple(names) for names in holders.values() if len(names) > 1)


@dataclass(frozen=True)
class SentWorkload:
    """A CallableWorkload as bytes, for worker processes that this process starts itself.

    It must never come from another host, since unpickling runs code. path: a name for the model, for checkpoints.
    """

    path: str
    payload: bytes
    modules: tuple[str, ...]

    @classmethod
    def of(cls, workload: CallableWorkload) -> SentWorkload:
        """Pickles a workload that has passed `check_sendable`."""
        parts = workload.model.parts
        path = getattr(parts, "__qualname__", type(parts).__name__)
        return cls(path, pickle.dumps(workload), _modules_of_script())

    def load(self) -> CallableWorkload:
        workload: CallableWorkload = pickle.loads(self.payload)
        return workload


def check_sendable(workload: CallableWorkload) -> None:
    """Raises InputError that names an argument which can't be sent to workers."""
    for argument, value in _arguments(workload):
        _check_sendable(argument, value)


def _arguments(workload: CallableWorkload) -> Iterator[tuple[str, Any]]:
    """Yields what the user gave, by the names that the user knows."""
    yield from ((f"model.{own.name}", getattr(workload.model, own.name)) for own in fields(Model))
    how = {own.name: getattr(workload.data, own.name) for own in fields(Data)}
    samples = how.pop("samples")  # after the others, which it may have in it
    yield from ((f"data.{name}", value) for name, value in how.items())
    # What the user gave, not what was made of it: where its class comes from also counts.
    yield "data", samples.dataset if isinstance(samples, DatasetBatches) else samples
    yield from (("optimizer", workload.make_optimizer), ("scheduler", workload.scheduler))
    if workload.evaluation is not None:
        yield from (("evaluate.metrics", metric) for metric in workload.evaluation.metrics.values())
        made = workload.evaluation.make_batch
        parts = (made.dataset, made.collate) if isinstance(made, InOrder) else (made,)
        yield from (("evaluate.data", part) for part in parts)


def _check_sendable(argument: str, value: Any) -> None:
    name = _name(value)
    if not _has_file(sys.modules["__main__"]) and getattr(value, "__module__", None) == "__main__":
        raise InputError(
            argument,
            name,
            "something from a file: worker processes can't import what was typed at a prompt or notebook, or read from "
            "standard input",
        )
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        reason = in_a_line(error)[:200]
        if "parametrized modules" in reason:  # as made by torch.nn.utils.parametrizations
            expected = "a function of (layer, layers) that makes it, which workers can be sent"
            raise InputError(argument, f"{name} with a parametrized module", expected) from None
        name = _unsendable(value) or name
        if "cannot pickle" in reason:
            expected = (
                "something that can be copied to worker processes: have it make locks, open files and connections when "
                f"it first needs them ({reason})"
            )
            raise InputError(argument, name, expected) from None
        raise InputError(
            argument,
            name,
            "something that worker processes can import: a function or class at the top level of a file "
            f"(functools.partial of one will do), no lambda and nothing defined inside a function ({reason})",
        ) from None


def _unsendable(value: Any) -> str | None:
    """Returns the name of the part that can't be pickled, where a value is made of several that the user gave."""
    parts: list[tuple[str, Any]] = []
    if is_dataclass(value) and type(value).__module__.startswith("openrecycle."):  # made here, of what the user gave
        parts = [(_name(part), part) for part in (getattr(value, own.name) for own in fields(value))]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{_name(part)} of number {number}", part) for number, part in enumerate(value)]
    for name, part in parts:
        try:
            pickle.dumps(part)
        except Exception:
            return _unsendable(part) or name
    return None


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__name__)


def _has_file(module: ModuleType) -> bool:
    """Does the module come from a file? Python calls the file of what it reads from standard input <stdin>."""
    file = getattr(module, "__file__", "<stdin>")
    return not file.startswith("<") or getattr(module, "__spec__", None) is not None


def _modules_of_script() -> tuple[str, ...]:
    """Returns the modules that the running script has imported. The fork server imports them once for all workers."""
    names = set()
    for value in vars(sys.modules["__main__"]).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name in sys.modules and name not in ("__main__", "builtins"):
            names.add(name)
    return tuple(sorted(names))
