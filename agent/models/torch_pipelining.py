"""Models that come as stages of torch.distributed.pipelining: a Pipe, PipelineStages, or builders of these.

Only their modules are used. They run in agent.workers.executor like any others; torch's schedules, transfers and
process groups have no part in that. torch.distributed.pipelining takes seconds to import and is never imported here:
whoever gives such a model has imported it.

The stages of a Pipe are fx graphs made by torch.export. torch can't send these to another process: their operators
can't be pickled, and tracing their code anew would freeze random numbers that depend on no input. So each becomes a
TracedLayer, which is plain data.
"""

from __future__ import annotations

import operator
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate, map_arg

from openrecycle.agent.models.layers import Tied
from openrecycle.planner.jobs.errors import InputError

dist: Any = torch.distributed
_NAME = "torch.distributed.pipelining"


class PipeLayers(list[nn.Module]):
    """The layers of a Pipe. shared: the parameters that were one in its model, and of which each layer has a copy."""

    shared: Tied = ()


def modules_of(given: Any, argument: str) -> Any:
    """Returns the modules in `given`, which the user passed as `argument` (layers or stages). What does not come from
    torch.distributed.pipelining is returned as it is. Raises InputError."""
    _check(given, argument)
    if _is(given, "Pipe"):
        return layers_of(given, argument)
    if isinstance(given, nn.Module):
        parts = isinstance(given, nn.Sequential | nn.ModuleList)
        expected = (
            f"a list of modules, one each{' (list(model))' if parts else ''}, a function that builds them, or a Pipe"
        )
        if any(base.__name__ == "PreTrainedModel" for base in type(given).__mro__):  # of transformers, perhaps not here
            expected += "; ResilientTrainer.from_transformers takes it as it is"
        raise InputError(argument, f"one {type(given).__name__}", expected)
    if isinstance(given, Sequence):
        for part in given:
            _check(part, argument)
        if any(_is(part, "PipelineStage") for part in given):
            given = _submodules(given, argument)
        for number, part in enumerate(given):
            if isinstance(part, nn.Module):
                _check_data(part, number, argument)
    return given


def built(build: Callable[[], Any], number: int, count: int, argument: str) -> Any:
    """Calls `build` for the place `number` of `count`, and returns its result; for a PipelineStage, its module. Raises
    InputError, and whatever `build` raises."""
    known = _NAME in sys.modules
    try:
        with _group_of_one() if known else nullcontext():
            made = build()
    except Exception:
        if known or _NAME not in sys.modules:
            raise
        with _group_of_one():  # `build` itself has imported torch.distributed.pipelining
            made = build()
    _check(made, argument)
    if _is(made, "PipelineStage"):
        if (made.stage_index, made.num_stages) != (number, count):
            got = f"a PipelineStage with stage_index={made.stage_index}, num_stages={made.num_stages}"
            raise InputError(argument, got, f"stage_index={number}, num_stages={count}, as the builder was asked for")
        made = made.submod
    if isinstance(made, nn.Module) and torch.empty(0).device.type != "meta":
        _check_data(made, number, argument)
    return made


def _is(value: Any, name: str) -> bool:
    """Is the value of this public class of torch.distributed.pipelining?"""
    kind = getattr(sys.modules.get(_NAME), name, None)
    return kind is not None and isinstance(value, kind)


def _check(value: Any, argument: str) -> None:
    """Raises InputError for objects of torch.distributed.pipelining that stand for no module."""
    name = type(value).__name__
    if type(value).__module__ == f"{_NAME}.schedules":
        raise InputError(argument, name, "its stages, or their modules; schedules are made by the planner")
    if hasattr(value, "pipe_info") and hasattr(value, "submod"):
        raise InputError(argument, f"a stage of a Pipe ({name})", "the Pipe itself, which knows what its stages share")


def _check_data(module: nn.Module, number: int, argument: str) -> None:
    empty = next((name for name, t in _all_tensors(module) if t.is_meta), None)
    if empty is not None:
        expected = "parameters with values: module.to_empty(device='cpu'), then its initialization"
        raise InputError(argument, f"{empty} of number {number}, which is on the meta device", expected)


def _submodules(stages: Sequence[Any], argument: str) -> list[nn.Module]:
    """Returns the modules of PipelineStages, which may come in any order. Raises InputError."""
    other = next((part for part in stages if not _is(part, "PipelineStage")), None)
    if other is not None:
        raise InputError(argument, f"{type(other).__name__} beside a PipelineStage", "PipelineStages alone, or modules")
    by_index = sorted(stages, key=lambda stage: int(stage.stage_index))
    indices = [stage.stage_index for stage in by_index]
    if indices != list(range(len(stages))):
        given = f"stage_index {', '.join(map(str, indices))}"
        raise InputError(argument, given, f"each from 0 to {len(stages) - 1} once")
    wrong = next((stage for stage in by_index if stage.num_stages != len(stages)), None)
    if wrong is not None:
        given = f"num_stages={wrong.num_stages} in stage {wrong.stage_index}"
        raise InputError(argument, given, f"the number of stages given, {len(stages)}")
    return [stage.submod for stage in by_index]


@contextmanager
def _group_of_one() -> Iterator[None]:
    """Makes a process group of one for the time of the block. A PipelineStage needs a group when it is made, though
    here it never uses it."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- Pipe --------------------------------------------------------------------------------------


def layers_of(pipe: Any, argument: str = "stages") -> PipeLayers:
    """Turns the stages of a Pipe into layers. Each layer passes the next one what it needs, so a value that skips
    stages goes through those between. Parameters and buffers have the model's names. Raises InputError."""
    graph: fx.Graph = pipe.split_gm.graph
    calls = [node for node in graph.nodes if node.op == "call_module"]
    strange = [node for node in graph.nodes if node.op.startswith("call_") and node not in calls]
    if any(node.target is not operator.getitem for node in strange) or any(node.kwargs for node in calls):
        raise InputError(argument, "a Pipe with a loss in it", "one made by torch.distributed.pipelining.pipeline")
    made, used = _lifetimes(graph, calls)
    layers = PipeLayers()
    comes = [node for node in graph.nodes if node.op == "placeholder"]
    for number, call in enumerate(calls):
        stage = pipe.split_gm.get_submodule(call.target)
        out, values = fx.Graph(), dict[fx.Node, Any]()
        for node in comes:
            values[node] = out.placeholder(node.name)
        inlined = _Inlined(out, stage)
        result = inlined.run(stage, "", [values[arg] for arg in call.args])
        values[call] = result
        values |= {user: result[user.args[1]] for user in call.users if user.target is operator.getitem}
        if number == len(calls) - 1:
            (output,) = (node for node in graph.nodes if node.op == "output")
            goes = map_arg(output.args[0], values.__getitem__)
        else:
            comes = [node for node, at in made.items() if at <= number < used.get(node, -1)]
            goes = tuple(values[node] for node in comes)
        out.output(goes[0] if isinstance(goes, (tuple, list)) and len(goes) == 1 else goes)
        layers.append(TracedLayer.of(out, stage, inlined.nested))
    layers.shared = _tied(pipe, [str(call.target) for call in calls], layers)
    return layers


def _lifetimes(graph: fx.Graph, calls: Sequence[fx.Node]) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """Returns, for each value that passes between stages, the stage that makes it (-1: it is an input), in order; and
    the last stage that uses it. The output of the model counts as one stage more."""
    place = {call: number for number, call in enumerate(calls)}
    made, used = dict[fx.Node, int](), dict[fx.Node, int]()
    for node in graph.nodes:
        if node.op == "placeholder":
            made[node] = -1
        elif node.op == "call_function":
            made[node] = place[node.args[0]]
            continue  # getitem takes apart what a stage returns, which happens where it is made
        elif node in place:
            made[node] = place[node]
        for source in node.all_input_nodes:
            used[source] = max(used.get(source, -1), place.get(node, len(calls)))
    return made, used


def _tied(pipe: Any, targets: Sequence[str], layers: Sequence[nn.Module]) -> Tied:
    """Returns the parameters that were one in the model: torch gives each stage that uses one a copy of its own."""
    groups = []
    for by_stage in pipe.replicated_params:
        group: list[str] = []
        for target, name in by_stage.items():
            number = targets.index(target)
            copy = pipe.split_gm.get_submodule(target).get_parameter(name)
            found = dict(layers[number].named_parameters(remove_duplicate=False))
            # If a parameter has several names in a stage, torch may have copied another one than is used.
            names = {other for other, parameter in found.items() if _same_numbers(copy, parameter)}
            group += [f"{number}.{same}" for same in sorted(names | ({name} & found.keys()))]
        if len(group) > 1:
            groups.append(tuple(group))
    return tuple(groups)


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    """Are the two certainly copies? If all elements are equal, such as ones or zeros, that can't be known."""
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta or not torch.equal(one, other):
        return False
    return one.numel() > 1 and not torch.equal(one, one.flatten()[0].expand_as(one))


class _Inlined:
    """Copies the graph of a traced stage, and the graphs of the modules inside it, into one graph.

    nested: graphs that operators take as an argument, by name.
    """

    def __init__(self, out: fx.Graph, stage: nn.Module) -> None:
        self.nested: dict[str, nn.Module] = {}
        self._out, self._stage, self._calls = out, stage, defaultdict[str, int](int)

    def run(self, module: nn.Module, path: str, inputs: Sequence[Any]) -> Any:
        """Copies the graph of the module at `path`. Returns what the module returns, as nodes."""
        values, coming = dict[fx.Node, Any](), iter(inputs)
        graph: Any = module.graph

        def here(argument: Any) -> Any:
            return map_arg(argument, values.__getitem__)

        for node in graph.nodes:
            name = f"{path}{node.target}" if isinstance(node.target, str) else ""
            if node.op == "placeholder":
                values[node] = next(coming)
            elif node.op == "output":
                return here(node.args[0])
            elif node.op == "call_module":
                values[node] = self._call(name, here(node.args), here(node.kwargs))
            elif node.op == "get_attr":
                values[node] = self._out.get_attr(_plain(name))
                part = _attribute(module, str(node.target))
                if isinstance(part, fx.GraphModule):
                    self.nested[_plain(name)] = _traced(part)
            elif node.target is operator.getitem and not isinstance(values[node.args[0]], fx.Node):
                values[node] = values[node.args[0]][node.args[1]]
            else:
                values[node] = self._out.create_node(node.op, node.target, here(node.args), here(node.kwargs))
        raise ValueError(f"the graph of {path or 'a stage'} has no output")

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        module: Any = self._stage.get_submodule(name)
        if hasattr(module, "call_modules"):  # called several times, with a graph for each call
            several = module.call_modules()
            module = several[self._calls[name] % len(several)]
            self._calls[name] += 1
        if not hasattr(module, "graph"):
            raise InputError("stages", f"a Pipe with {type(module).__name__} in it", "one that torch.export has traced")
        names = [node.target for node in module.graph.nodes if node.op == "placeholder"][len(args) :]
        return self.run(module, f"{name}.", [*args, *(kwargs[name] for name in names)])


def _traced(module: fx.GraphModule) -> nn.Module:
    out = fx.Graph()
    inputs = [out.placeholder(str(node.target)) for node in module.graph.nodes if node.op == "placeholder"]
    inlined = _Inlined(out, module)
    out.output(inlined.run(module, "", inputs))
    return TracedLayer.of(out, module, inlined.nested)


def _plain(name: str) -> str:
    """Removes the number that torch appends to a module's name for its later calls: `blocks.0@1`."""
    return re.sub(r"@\d+", "", name)


def _attribute(root: Any, name: str) -> Any:
    for part in name.split("."):
        root = getattr(root, part)
    return root


# -- one layer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Value:
    """Stands for the result of an earlier step."""

    name: str


@dataclass(frozen=True)
class _Operator:
    """Stands for one of torch's operators, by name: `aten.linear.default`."""

    name: str


@dataclass(frozen=True)
class _Step:
    """One node of a graph, as plain data."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, node: fx.Node) -> _Step:
        target = node.target
        if isinstance(target, type(torch.ops.aten.linear.default)):
            target = _Operator(str(target))  # type: ignore[assignment]
        return cls(node.op, node.name, target, _named(node.args), _named(node.kwargs))

    def put(self, graph: fx.Graph, values: Mapping[str, fx.Node]) -> fx.Node:
        target = _attribute(torch.ops, self.target.name) if isinstance(self.target, _Operator) else self.target

        def found(argument: Any) -> Any:
            return map_aggregate(argument, lambda a: values[a.name] if isinstance(a, _Value) else a)  # type: ignore[arg-type,return-value]

        return graph.create_node(self.op, target, found(self.args), found(self.kwargs), self.name)


def _named(argument: Any) -> Any:
    return map_aggregate(argument, lambda a: _Value(a.name) if isinstance(a, fx.Node) else a)  # type: ignore[arg-type,return-value]


class TracedLayer(nn.Module):
    """Runs a graph, and can be sent to other processes and copied. Its parameters have the names that they have in the
    model that was traced."""

    def __init__(self, steps: tuple[_Step, ...], parts: Mapping[str, Any], lasting: frozenset[str]) -> None:
        """parts: tensors and modules of the graph, by name. lasting: names of the persistent buffers."""
        super().__init__()
        self.steps = steps
        for name, part in parts.items():
            parent, _, last = name.rpartition(".")
            owner: nn.Module = self
            for piece in parent.split(".") if parent else ():
                if not hasattr(owner, piece):
                    owner.add_module(piece, nn.Module())
                owner = getattr(owner, piece)
            if _is_buffer(part):
                owner.register_buffer(last, part, persistent=name in lasting)
            else:
                setattr(owner, last, part)
        self._compile()

    @classmethod
    def of(cls, graph: fx.Graph, module: nn.Module, nested: Mapping[str, nn.Module] | None = None) -> TracedLayer:
        """Makes a layer of a graph whose attributes are found in `module`, or in `nested`."""
        nested = nested or {}
        found: dict[str, Any] = {_plain(name): t for name, t in _all_tensors(module)}
        used = {str(node.target): None for node in graph.nodes if node.op == "get_attr"}
        parts, copies = dict[str, Any](), dict[int, Tensor]()
        for name in [*(name for name in found if name in used), *(name for name in used if name not in found)]:
            part: Any = nested[name] if name in nested else found[name] if name in found else _attribute(module, name)
            if _is_buffer(part):  # several stages may use it; each has its own copy, as it would in another process
                part = copies.setdefault(id(part), part.detach().clone())
            parts[name] = part
        parts = _with_layers(graph, parts)
        lasting = frozenset(name for name in map(_plain, module.state_dict()) if not _CONSTANT.search(name))
        return cls(tuple(map(_Step.of, graph.nodes)), parts, lasting)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._run(self, *inputs, **named)

    def _compile(self) -> None:
        graph, values = fx.Graph(), dict[str, fx.Node]()
        for step in self.steps:
            values[step.name] = step.put(graph, values)
        self._run: Callable[..., Any] = type(fx.GraphModule(self, graph)).forward

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compile()


_CONSTANT = re.compile(r"(^|\.)(lifted_tensor_|_tensor_constant)\d+$")
"""The names of tensors that are made in the model's forward, which torch.export keeps as if they were buffers."""


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _is_buffer(part: Any) -> bool:
    return isinstance(part, Tensor) and not isinstance(part, nn.Parameter)


def _with_layers(graph: fx.Graph, parts: dict[str, Any]) -> dict[str, Any]:
    """Turns matrix products and embeddings back into layers of torch.nn, in the graph and in `parts`, which are
    returned. Their backward can be split at little memory (agent.stages.backward). What they compute is the same."""
    owners: dict[str, set[str]] = defaultdict(set)
    for name in parts:
        owners[name.rpartition(".")[0]].add(name)
    uses: dict[str, list[tuple[fx.Node, _Plain | None]]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "get_attr":
            owner = str(node.target).rpartition(".")[0]
            uses[owner] += [(user, _plain_layer(user, owner, parts)) for user in node.users]
    for owner, found in uses.items():
        layer = found[0][1] if found else None
        if not owner or layer is None or layer.names != owners[owner] or any(other != layer for _, other in found):
            continue
        inside = any(name.startswith(f"{owner}.") for name in parts if name not in layer.names)
        if inside:
            continue
        for node in dict.fromkeys(node for node, _ in found):
            with graph.inserting_before(node):
                call = graph.call_module(owner, (_argument(node, layer.data),))
            node.replace_all_uses_with(call)
            graph.erase_node(node)
        for node in [n for n in graph.nodes if n.op == "get_attr" and n.target in layer.names and not n.users]:
            graph.erase_node(node)
        made = layer.make(parts)
        parts = {
            owner if name in layer.names else name: made if name in layer.names else part
            for name, part in parts.items()
        }
    return parts


@dataclass(frozen=True)
class _Plain:
    """The layer of torch.nn that an operator stands for. data: which of the operator's arguments is its input."""

    kind: type[nn.Module]
    weight: str
    bias: str | None
    data: str
    padding: int | None = None

    @property
    def names(self) -> set[str]:
        return {self.weight} | ({self.bias} if self.bias else set())

    def make(self, parts: Mapping[str, Any]) -> nn.Module:
        weight = parts[self.weight]
        with torch.device("meta"):  # no memory, and no random numbers
            if self.kind is nn.Embedding:
                layer: nn.Module = nn.Embedding(weight.shape[0], weight.shape[1], self.padding)
            else:
                layer = nn.Linear(weight.shape[1], weight.shape[0], bias=self.bias is not None)
        layer.register_parameter("weight", weight)
        if self.bias:
            layer.register_parameter("bias", parts[self.bias])
        return layer


def _plain_layer(node: fx.Node, owner: str, parts: Mapping[str, Any]) -> _Plain | None:
    weight = _argument(node, "weight")
    if not isinstance(weight, fx.Node) or weight.target != f"{owner}.weight":
        return None
    if not isinstance(parts[f"{owner}.weight"], nn.Parameter) or parts[f"{owner}.weight"].dim() != 2:
        return None
    if node.target is torch.ops.aten.linear.default:
        bias = _argument(node, "bias")
        if bias is None:
            return _Plain(nn.Linear, f"{owner}.weight", None, "input")
        if getattr(bias, "target", None) == f"{owner}.bias" and isinstance(parts[f"{owner}.bias"], nn.Parameter):
            return _Plain(nn.Linear, f"{owner}.weight", f"{owner}.bias", "input")
    if node.target is torch.ops.aten.embedding.default:
        padding, scaled, sparse = (_argument(node, name) for name in ("padding_idx", "scale_grad_by_freq", "sparse"))
        if not scaled and not sparse:
            return _Plain(nn.Embedding, f"{owner}.weight", None, "indices", padding if (padding or 0) >= 0 else None)
    return None


_ARGUMENTS = {
    torch.ops.aten.linear.default: ("input", "weight", "bias"),
    torch.ops.aten.embedding.default: ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
}


def _argument(node: fx.Node, name: str) -> Any:
    """Returns an argument of an operator's call; None where it is not given."""
    names = _ARGUMENTS.get(node.target, ())  # type: ignore[call-overload]
    if name in names and names.index(name) < len(node.args):
        return node.args[names.index(name)]
    return node.kwargs.get(name)
