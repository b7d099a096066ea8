"""The stage's own step, what undoes it, and the stage's state.

A stage steps when *its* gradients are reduced, without waiting for the other stages. Two things may
undo that step: a death that interrupts the iteration elsewhere (some stages have stepped and others
have not; the ones that have go back), and a validation of the whole gradient that comes later (see
agent.post_validation). One snapshot is enough for both: see agent.recovery.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from openrecycle.agent import compat
from openrecycle.agent.gradients import GradientSum, MicroBatch
from openrecycle.agent.layers import LayerStack, Span, parameters_by_layer
from openrecycle.agent.options import Optimization
from openrecycle.agent.post_validation import CLEAN, SKIP, PostValidation, Slot, ValidationResult
from openrecycle.agent.state import StageState, StateError, decode, encode, sha256, whole_number
from openrecycle.agent.workload import Workload
from openrecycle.planner.errors import InputError

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD"}
)
"""Optimizers of torch.optim that step each element by itself, from the element's own state and gradient."""


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _changing(
    method: Callable[Concatenate[StageOptimizer, _P], _T],
) -> Callable[Concatenate[StageOptimizer, _P], _T]:
    """Of a method that changes what the stage holds: a hand-over reads it from another thread."""

    @functools.wraps(method)
    def locked(self: StageOptimizer, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


class NonFiniteError(RuntimeError):
    """A gradient of the iteration was NaN, infinite or out of range."""


class StageOptimizer:
    """Module, optimizer and scheduler of one stage on one worker, and how many steps they have taken.

    committed: number of iterations whose step has been taken (so also the next iteration). settled:
    is the validation of the last one known? slot: this stage's share of it. post_validation: what the validations
    so far make of the next one. skipped: this worker's micro-batches that the last measured sum lacks.
    clips: will anybody ask for the gradients' norm? lock: held while anything changes. corrections: how
    often a validation has changed a step; with `committed` it says which values these are.

    The scheduler is stepped once per update, right after it. Raises InputError for an optimizer or
    scheduler that can't be driven that way.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: GradientSum,
        scheduler: LRScheduler | None = None,
        *,
        clips: bool = False,
    ) -> None:
        if _required(type(optimizer).step):
            raise InputError("optimizer", type(optimizer).__name__, "one whose step() needs no closure")
        if scheduler is not None and (_required(type(scheduler).step) or scheduler.optimizer is not optimizer):
            raise InputError(
                "scheduler", type(scheduler).__name__, "one of this optimizer whose step() needs no metric"
            )
        self.module, self.optimizer = LayerStack.of(module), optimizer
        self.gradients, self.scheduler = gradients, scheduler
        self.committed = 0
        self.settled = True
        self.slot = Slot()
        self.validation = CLEAN
        """On the last step, where it is settled."""
        self.post_validation = PostValidation()
        self.lock = threading.RLock()
        self.corrections = 0
        self.skipped: list[MicroBatch] = []
        self._clips = clips
        self._trained = [p for p in module.parameters() if p.requires_grad]
        copies = {id(p) for name, p in self.module.named_parameters() if name in self.module.copies}
        self._by_layer = [
            [p for p in layer if p.requires_grad and id(p) not in copies] for layer in parameters_by_layer(module)
        ]
        self._snapshot = _Snapshot(self)
        self._kept: list[Tensor | None] | None = None

    @property
    def slot_before(self) -> Slot:
        """The slot of the step that came before the last one."""
        return self._snapshot.before[1]

    @property
    def validation_before(self) -> ValidationResult:
        """The validation of it."""
        return self._snapshot.before[2]

    # -- the step -----------------------------------------------------------------------------

    def measure(self) -> Slot:
        """This stage's share of the validation of the gradients that have just been reduced."""
        rejected = self.gradients.rejected
        self.skipped = self.gradients.rejecting() if rejected else []
        if not self._clips:
            return Slot(rejected=rejected)
        norm = (lambda _: 0.0) if rejected else self.gradients.squared_norm
        return Slot(tuple(map(norm, self._by_layer)), rejected)

    @_changing
    def step(self, validation: ValidationResult | None = CLEAN, slot: Slot | None = None) -> float:
        """Takes the step on the reduced gradients; returns the (scaled) loss that came with them.

        validation: what all stages' gradients make of it; None when that is not known yet: then the
        step is taken as if it were clean, and `settle` must follow before the next one.
        """
        assert self.settled, "the validation of the step before is not known"
        loss, slot = self.gradients.loss, slot if slot is not None else self.measure()
        self._snapshot.take()
        self.slot = slot
        self._kept = None
        # A stage that knows its own gradients to be useless needs no validation to leave them alone.
        applied = (SKIP if slot.rejected else CLEAN) if validation is None else validation
        if applied.coefficient is not None:
            self.gradients.write_gradients()
            if validation is None and self._clips:
                self._kept = [p.grad for p in self._trained]
            self._update(applied.coefficient)
            self.gradients.write_buffers()
        self.gradients.clear()
        self.committed += 1
        self.settled = validation is not None
        if validation is not None:
            self.validation = validation
            self.post_validation = self.post_validation.after(validation)
        return loss

    @_changing
    def settle(self, validation: ValidationResult) -> bool:
        """Takes note of the validation of the last step, and puts the step right where it differs.

        Returns whether it does: the same answer on every worker.
        """
        assert not self.settled
        self.settled, kept = True, self._kept
        self.validation, self._kept = validation, None
        self.post_validation = self.post_validation.after(validation)
        if validation.clean:
            return False
        # Whatever has been summed since belongs to parameters that nobody has any more.
        self.gradients.clear()
        self.corrections += 1
        if validation.coefficient is None:
            self._snapshot.restore(buffers=True)
        elif kept is not None:
            # The moving buffers are those of the step as it was: they don't depend on the norm.
            self._snapshot.restore(buffers=False)
            for parameter, gradient in zip(self._trained, kept, strict=True):
                parameter.grad = gradient
            self._update(validation.coefficient)
        return True

    def _update(self, coefficient: float) -> None:
        gradients = [p.grad for p in self._trained if p.grad is not None]
        if coefficient != 1.0 and gradients:  # torch takes no empty list
            compat.multiply(gradients, coefficient)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()

    @_changing
    def roll_back(self) -> None:
        """Undoes the last step. Raises StateError when there is none to undo."""
        self._snapshot.undo()
        self._kept = None

    # -- layers that come and go ---------------------------------------------------------------

    def tensors_of(self, span: Span) -> list[Tensor]:
        """What is summed of these layers: the parameters that are trained, then the moving buffers."""
        moving = set(map(id, self.gradients.moving))
        own = [layer for number, layer in self.module.layers if number in span]
        parameters = [p for layer in own for p in layer.parameters()]
        buffers = [b for layer in own for b in layer.buffers()]
        return [p for p in self._trained if any(p is q for q in parameters)] + [b for b in buffers if id(b) in moving]

    def moving_names(self, span: Span | None = None) -> list[str]:
        """Of the moving buffers, or those of these layers."""
        moving = set(map(id, self.gradients.moving))
        names = [name for name, buffer in self.module.named_buffers() if id(buffer) in moving]
        return names if span is None else [name for name in names if int(name.partition(".")[0]) in span]

    @_changing
    def adopt(self, parts: Sequence[StageOptimizer]) -> None:
        """Takes over, without copies, what those of which it has layers keep of them. All are at one step; how far
        they are, and what holds for all layers, is that of the first."""
        first = parts[0]
        mine = set(map(id, self.module.parameters()))
        for part in parts:
            for parameter, state in part.optimizer.state.items():
                if id(parameter) in mine:
                    self.optimizer.state[parameter] = state
        for group, options in zip(self.optimizer.param_groups, first.optimizer.param_groups, strict=True):
            _put_options(group, {k: v for k, v in options.items() if k != "params"})
        if self.scheduler is not None and first.scheduler is not None:
            self.scheduler.load_state_dict(first.scheduler.state_dict())
        self.committed, self.settled, self.post_validation = first.committed, True, first.post_validation
        self.validation, self.corrections, self.slot = first.validation, first.corrections, first.slot
        # Somebody may not have taken the last step: then it is undone here as well.
        self._snapshot.adopt([part._snapshot for part in parts])

    # -- the state: for a peer that re-joins, for checkpoints, and for the fingerprint --------

    def parameters_sha256(self) -> str:
        """Of the bytes of each layer's parameters, one after the other."""
        return "".join(map(sha256, parameters_by_layer(self.module)))

    def state(self) -> StageState:
        """Everything that the next steps depend on. The tensors are the live ones: copy or send them
        before the next step. A step that is not settled counts as clean: should it be overturned,
        the state was of no use anyway.

        Raises StateError naming what an optimizer or scheduler keeps that can't be sent.
        """
        tensors: dict[str, Tensor] = {}
        names = {id(p): n for n, p in self.module.named_parameters()}
        model = {
            n: encode(t, f"model.{n}", tensors)
            for n, t in [*self.module.named_parameters(), *self.module.named_buffers()]
        }
        states = {}
        for parameter, state in self.optimizer.state.items():
            if (name := names.get(id(parameter))) is None:
                raise StateError(f"{type(self.optimizer).__name__} keeps state that belongs to no parameter")
            states[name] = encode(state, f"optimizer.{name}", tensors)
        document = {
            "committed": self.committed,
            "post_validation": (self.post_validation if self.settled else self.post_validation.after(CLEAN)).to_json(),
            "model": model,
            "optimizer": type(self.optimizer).__name__,
            "state": states,
            "groups": [
                {
                    "parameters": [names[id(p)] for p in group["params"] if id(p) in names],
                    "options": encode({k: v for k, v in group.items() if k != "params"}, f"groups.{i}", tensors),
                }
                for i, group in enumerate(self.optimizer.param_groups)
            ],
            "scheduler": None
            if self.scheduler is None
            else [type(self.scheduler).__name__, encode(self.scheduler.state_dict(), "scheduler", tensors)],
        }
        return StageState(document, tensors)

    @property
    def elementwise(self) -> bool:
        """May parts of the parameters be put in place while it steps? Only where no element's step depends on
        another element."""
        kind = type(self.optimizer)
        return kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE

    @_changing
    def load_state(self, state: StageState) -> None:
        """Takes over a state, wholly or not at all. Of a tensor without values (on the device "meta") they are to
        come: until then a parameter or buffer keeps its own, and what the optimizer keeps is zero.

        Raises StateError when it is of another stage.
        """
        own, doc = self.state().document, state.document
        parameters = dict(self.module.named_parameters())
        targets = {**parameters, **dict(self.module.named_buffers())}
        try:
            for what, mine, theirs in (
                ("model", sorted(own["model"]), sorted(doc["model"])),
                ("optimizer", own["optimizer"], doc["optimizer"]),
                ("scheduler", (own["scheduler"] or [None])[0], (doc["scheduler"] or [None])[0]),
                *(
                    (f"parameter group {i}", mine["parameters"], theirs["parameters"])
                    for i, (mine, theirs) in enumerate(zip(own["groups"], doc["groups"], strict=True))
                ),
            ):
                if mine != theirs:
                    raise StateError(f"{what}: got {theirs}, expected {mine}")
            values = {n: decode(v, state.tensors, targets[n].device) for n, v in doc["model"].items()}
            for name, value in values.items():
                want = targets[name]
                if value.shape != want.shape or value.dtype != want.dtype:
                    got = f"shape {tuple(value.shape)} of {value.dtype}"
                    raise StateError(f"{name}: {got} is of another model, expected {tuple(want.shape)} of {want.dtype}")
            states = {n: decode(v, state.tensors, parameters[n].device) for n, v in doc["state"].items()}
            device = next((p.device for p in parameters.values()), None)
            groups = [decode(g["options"], state.tensors, device) for g in doc["groups"]]
            scheduler = decode((doc["scheduler"] or [None, None])[1], state.tensors, device)
            committed, post_validation = (
                whole_number(doc["committed"]),
                PostValidation.from_json(doc["post_validation"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise StateError(f"unreadable state: {type(error).__name__} {error}") from None
        with torch.no_grad():
            for name, value in values.items():
                if not state.tensors[doc["model"][name]["tensor"]].is_meta:
                    targets[name].copy_(value)
        self.optimizer.state.clear()
        for name, value in states.items():
            self.optimizer.state[parameters[name]] = value
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            _put_options(group, options)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(scheduler)
        self.committed, self.post_validation, self.settled, self.slot = committed, post_validation, True, Slot()
        self._snapshot.forget()
        self._kept = None


def stage_optimizer(
    workload: Workload, module: nn.Module, gradients: GradientSum, optimization: Optimization
) -> StageOptimizer:
    """As the workload wants it; a workload may have a `scheduler(optimizer)` beside its `optimizer`.

    Raises InputError.
    """
    # No optimizer takes an empty list, and layers without parameters may be a stage of their own.
    optimizer = workload.optimizer(iter(list(module.parameters()) or [nn.Parameter(torch.zeros(0))]))
    scheduler = getattr(workload, "scheduler", None)
    return StageOptimizer(
        module,
        optimizer,
        gradients,
        scheduler(optimizer) if scheduler is not None else None,
        clips=optimization.clip_norm is not None,
    )


def of_layers(state: StageState, span: Span) -> StageState:
    """The part of a stage's state that belongs to these of its layers."""

    def kept(name: str) -> bool:
        return int(name.partition(".")[0]) in span

    document, tensors = dict(state.document), dict[str, Tensor]()
    for part in ("model", "state"):
        document[part] = {name: value for name, value in document[part].items() if kept(name)}
    document["groups"] = [g | {"parameters": list(filter(kept, g["parameters"]))} for g in document["groups"]]
    for name, tensor in state.tensors.items():
        kind, _, rest = name.partition(".")
        if kind not in ("model", "optimizer") or kept(rest):
            tensors[name] = tensor
    return StageState(document, tensors)


def joined(states: Sequence[StageState]) -> StageState:
    """Of states of several stages, in order, at the same iteration, that of all their layers. Raises StateError."""
    first = states[0]
    document, tensors = {**first.document, "model": {}, "state": {}}, dict[str, Tensor]()
    groups = [{**group, "parameters": []} for group in first.document["groups"]]
    for state in states:
        doc = state.document
        if any(doc[key] != first.document[key] for key in ("committed", "optimizer")):
            raise StateError("the stages' states are of different iterations or optimizers")
        if len(doc["groups"]) != len(groups):
            raise StateError(f"{len(doc['groups'])} parameter groups in a stage and {len(groups)} in another")
        document["model"].update(doc["model"])
        document["state"].update(doc["state"])
        for group, part in zip(groups, doc["groups"], strict=True):
            group["parameters"] += part["parameters"]
        tensors.update((name, tensor) for name, tensor in state.tensors.items() if name not in tensors)
    return StageState(document | {"groups": groups}, tensors)


class _Snapshot:
    """What one step changes, as it was before it. The copies' memory is used again for the next one."""

    def __init__(self, stage: StageOptimizer) -> None:
        self._stage = stage
        self._valid = False
        self._copies: list[Tensor] = []
        self.before = PostValidation(), Slot(), CLEAN

    def _live(self) -> tuple[list[Tensor], list[Tensor], list[tuple[Tensor, dict[str, Any], list[str]]]]:
        """(parameters, moving buffers, per parameter its optimizer state and which of it are tensors)."""
        state = self._stage.optimizer.state
        return (
            [p.detach() for p in self._stage._trained],
            list(self._stage.gradients.moving),
            [(p, s, [k for k, v in s.items() if isinstance(v, Tensor)]) for p, s in state.items()],
        )

    def take(self) -> None:
        stage = self._stage
        parameters, buffers, states = self._live()
        live = [*parameters, *buffers, *(s[k] for _, s, keys in states for k in keys)]
        like = [(t.shape, t.dtype, t.device) for t in live]
        if like == [(t.shape, t.dtype, t.device) for t in self._copies]:
            # By type and device: mixed lists would go the slow way, one by one.
            for mine, theirs in _alike(self._copies, live):
                compat.copy(mine, theirs)
        else:
            self._copies = [t.detach().clone() for t in live]
        self._states = [
            (p, keys, copy.deepcopy({k: v for k, v in s.items() if k not in keys})) for p, s, keys in states
        ]
        self._groups = [
            copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in stage.optimizer.param_groups
        ]
        self._scheduler = copy.deepcopy(stage.scheduler.state_dict()) if stage.scheduler is not None else {}
        self.before = stage.post_validation, stage.slot, stage.validation
        self._valid = True

    def adopt(self, parts: Sequence[_Snapshot]) -> None:
        """Takes over those of other optimizers, of what this one has of their layers. All are of one step, or none is
        of any use."""
        self._valid = all(part._valid for part in parts)
        self.before = parts[0].before
        if not self._valid:
            return
        copies: dict[int, Tensor] = {}
        states: dict[int, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        for part in parts:
            kept = iter(part._copies)
            of = part._stage
            copies |= {id(tensor): next(kept) for tensor in (*of._trained, *of.gradients.moving)}
            for parameter, keys, plain in part._states:
                states[id(parameter)] = {k: next(kept) for k in keys}, plain
        stage = self._stage
        here = [p for group in stage.optimizer.param_groups for p in group["params"] if id(p) in states]
        self._copies = [copies[id(t)] for t in (*stage._trained, *stage.gradients.moving)]
        self._copies += [tensor for p in here for tensor in states[id(p)][0].values()]
        self._states = [(p, list(states[id(p)][0]), states[id(p)][1]) for p in here]
        self._groups, self._scheduler = parts[0]._groups, parts[0]._scheduler

    def restore(self, *, buffers: bool) -> None:
        """Puts everything back but the counts. buffers: the moving ones too?"""
        stage = self._stage
        parameters, moving, _ = self._live()
        copies = iter(self._copies)
        with torch.no_grad():
            for target in parameters:
                target.copy_(next(copies))
            for target in moving:
                value = next(copies)
                if buffers:
                    target.copy_(value)
        stage.optimizer.state.clear()
        for parameter, keys, plain in self._states:
            tensors = {k: next(copies).clone() for k in keys}
            stage.optimizer.state[parameter] = tensors | copy.deepcopy(plain)
        for group, options in zip(stage.optimizer.param_groups, self._groups, strict=True):
            _put_options(group, copy.deepcopy(options))
        if stage.scheduler is not None:
            stage.scheduler.load_state_dict(copy.deepcopy(self._scheduler))

    def undo(self) -> None:
        """Puts everything back, the counts too."""
        stage = self._stage
        if not self._valid:
            raise StateError(f"no snapshot to roll back from {stage.committed} committed iterations")
        self.restore(buffers=True)
        stage.post_validation, stage.slot, stage.validation = self.before
        stage.settled = True
        stage.committed -= 1
        self._valid = False

    def forget(self) -> None:
        self._valid = False


def _put_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Sets a parameter group's options; a tensor (a capturable learning rate) stays the same object."""
    for key, value in options.items():
        current = group.get(key)
        if isinstance(current, Tensor) and isinstance(value, Tensor) and current.shape == value.shape:
            current.copy_(value)
        else:
            group[key] = value


def _alike(a: list[Tensor], b: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """The two lists, cut into pairs of lists of one type and device each."""
    out: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for x, y in zip(a, b, strict=True):
        mine, theirs = out.setdefault((x.dtype, x.device), ([], []))
        mine.append(x)
        theirs.append(y)
    return list(out.values())


def _required(step: Any) -> bool:
    """Does this `step` method need an argument?"""
    parameters = list(inspect.signature(step).parameters.values())[1:]
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        for p in parameters
    )
