"""Finds out, by trying, how the backward of a stage can be split.

Every candidate runs two interleaved micro-batches on the real module; its outputs, its gradients of
inputs and parameters and its buffer changes must equal the fused backward's to the bit. How much it
defers, and whether it does any work twice, is counted in floating-point operations, never timed: so
all workers of a stage come to the same result. (They need not: all splits give the same bits.)

What a trial can't see: a module whose graph takes another form for other data is tried on this data
alone. The deferred split is safe there, since autograd itself runs what is not deferred; torch's
misses a parameter that, only then, has a way to an output past every input. Sharing a parameter between
stages is nothing that any of them knows of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from openrecycle.agent.config.numerics import Autocast
from openrecycle.agent.models.compat import FlopCount
from openrecycle.agent.stages.backward.buffers import moved_by
from openrecycle.agent.stages.backward.split import Deferred, Fused, Strategy, StrategyName, TorchSplit
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.stage import Stage
from openrecycle.planner.plans.schedule import MicroBatch

Wanted = Literal["auto"] | StrategyName

# A split is worth it when W has at least this share of the backward's work, ...
_LEAST_SHARE = 0.05
# ... and when I and W together do at most this much of what the fused backward does.
_MOST_WORK = 1.05
# The deferred split is preferred while it defers this much of what torch's does: it holds less memory.
_NEARLY = 0.9
_FIRST, _SECOND = (0, 0), (0, 1)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Of a fingerprint: what fits a core's cache, and how chunks follow each other.
_CHUNK, _STEP = 1 << 17, 1000003

Fingerprint = tuple[torch.dtype, tuple[int, ...], int]


@dataclass(frozen=True)
class Probe:
    """A micro-batch to try on: the module's inputs, the scaled loss on the last stage, and of which inputs a gradient
    travels back (None: of all that can have one)."""

    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor] | None = None
    wanted: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Split:
    """What was found.

    share: part of the backward's work that W does. moving: the buffers that a forward changes.
    text: one sentence on what was chosen and why. warning: the text is worth an operator's attention.
    """

    strategy: Strategy
    share: float
    moving: list[Tensor]
    text: str
    warning: bool = False


def choose_split(
    module: nn.Module, probe: Probe, *, autocast: Autocast | None = None, wanted: Wanted = "auto"
) -> Split:
    """The best exact split of `module`; it and torch's random state are left as they were.

    wanted: a strategy's name to try that one alone; where it does not pass, the fused one is returned.
    Raises whatever the module's own forward or backward raises.
    """
    devices = sorted({t.device.index for t in probe.inputs if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        trial = _Trial(module, probe, autocast)
        found = _choose(trial, wanted)
    if not trial.moving:
        return found
    note = "change in a forward: they move once per iteration, by the mean over all micro-batches"
    return replace(found, text=f"{found.text} {len(trial.moving)} buffers {note}.")


def _choose(trial: _Trial, wanted: Wanted) -> Split:
    module, moving = trial.module, trial.moving
    fused = Fused(module)
    if not any(p.requires_grad for p in module.parameters()):
        return Split(fused, 0.0, moving, "The stage has no trainable parameter: there is no W.")
    reference = trial.run(fused)
    work = sum(trial.work(fused))
    if not work and not trial.late:
        text = "The backward is not split: there is no matrix product or convolution of the stage's own in it."
        return Split(fused, 0.0, moving, text, warning=wanted != "fused")
    faults: list[str] = []
    passed: list[tuple[float, Strategy]] = []
    for name in ("deferred", "torch"):
        if wanted not in ("auto", name) or (trial.late and name == "torch") or (passed and _covers_most(passed[0][1])):
            continue
        strategy: Strategy = Deferred(module) if name == "deferred" else TorchSplit(module)
        share, fault = trial.judge(strategy, reference, work)
        if fault:
            strategy.close()
            faults.append(f"{name}: {fault}")
        else:
            passed.append((share, strategy))
    if passed:
        most = max(share for share, _ in passed)
        share, best = next(entry for entry in passed if entry[0] >= _NEARLY * most)
        for _, strategy in passed:
            if strategy is not best:
                strategy.close()
        return Split(best, share, moving, f"The backward is split ({best.name}): {share:.0%} of it is done in W.")
    if trial.late:
        return Split(fused, 1.0, moving, "The inputs have no gradient: the whole backward is done in W.")
    because = f" ({'; '.join(faults)})" if faults else ""
    text = f"The backward is not split: I takes all of it, and W nothing{because}."
    return Split(fused, 0.0, moving, text, warning=bool(faults))


class _Trial:
    """Runs the probe's micro-batch through splits of one module."""

    def __init__(self, module: nn.Module, probe: Probe, autocast: Autocast | None) -> None:
        self.module = module
        wanted = probe.wanted or (True,) * len(probe.inputs)
        self.late = not any(want and t.is_floating_point() for t, want in zip(probe.inputs, wanted, strict=True))
        self.moving: list[Tensor] = []
        self._probe, self._autocast = probe, autocast
        # The second micro-batch has the same samples in another order.
        self._inputs = {_FIRST: probe.inputs, _SECOND: tuple(t.flip(0) if t.dim() else t for t in probe.inputs)}
        self._names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        self.moving = moved_by(module, lambda: self._stage(Fused(module), _Record([])).forward(_FIRST))

    def run(self, strategy: Strategy) -> dict[str, Fingerprint]:
        """Every number that two interleaved micro-batches give, by its name."""
        record = _Record(self.moving)
        ops = self._stage(strategy, record)
        out: dict[str, Fingerprint] = {}
        for key in (_FIRST, _SECOND):
            out |= _named(f"output of {key}", ops.forward(key))
        for op, keys in ((ops.input_backward, (_FIRST, _SECOND)), (ops.weight_backward, (_SECOND, _FIRST))):
            for key in keys:
                out |= _named(f"input gradient of {key}", op(key) or ())
                out |= {f"{self._names.get(id(t), 'loss')} of {key}": _fingerprint(g) for t, g in record.take()}
        return out

    def work(self, strategy: Strategy) -> tuple[int, int]:
        """Floating-point operations of I and of W."""
        ops = self._stage(strategy, _Record(self.moving))
        ops.forward(_FIRST)
        with FlopCount() as in_i:
            ops.input_backward(_FIRST)
        with FlopCount() as in_w:
            ops.weight_backward(_FIRST)
        return in_i.total, in_w.total

    def judge(self, strategy: Strategy, reference: dict[str, Fingerprint], work: int) -> tuple[float, str]:
        """(share of the work that W does, what speaks against the strategy or nothing)."""
        if isinstance(strategy, Deferred) and not strategy.layers.parameters:
            return 0.0, "no layer of a kind that can be deferred"
        try:
            outcome = self.run(strategy)
            in_i, in_w = self.work(strategy)
        except Exception as error:  # whatever a module may raise under a split that does not suit it
            cause = error.__cause__ or error
            return 0.0, f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0][:160]}"
        different = sorted(k for k in outcome.keys() | reference.keys() if outcome.get(k) != reference.get(k))
        if different:
            return 0.0, f"other bits than the fused backward in {different[0]} and {len(different) - 1} more"
        share = in_w / work if work else 1.0
        if in_i + in_w > _MOST_WORK * work:
            return share, f"{(in_i + in_w) / work:.2f} times the work of the fused backward"
        return share, "" if share >= _LEAST_SHARE else f"only {share:.1%} of the backward could be done in W"

    def _stage(self, strategy: Strategy, record: _Record) -> _Ops:
        return _Ops(Stage(self.module, record, split=strategy, autocast=self._autocast), self._inputs, self._probe)


class _Ops:
    """A stage's three ops on the probe's micro-batches."""

    def __init__(self, stage: Stage, inputs: Mapping[MicroBatch, tuple[Tensor, ...]], probe: Probe) -> None:
        self._stage, self._inputs, self._probe = stage, inputs, probe
        self._several: dict[MicroBatch, bool] = {}
        self._dys: dict[MicroBatch, tuple[Tensor | None, ...]] = {}

    def forward(self, key: MicroBatch) -> tuple[Tensor, ...]:
        probe = self._probe
        y = self._stage.forward(key, self._inputs[key], seed=key[1], loss=probe.loss, wanted=probe.wanted)
        self._several[key] = isinstance(y, tuple)
        outputs = y if isinstance(y, tuple) else (y,)
        # Here and not in the backward, so that its making is not counted as work.
        self._dys[key] = (None,) if probe.loss else tuple(map(_gradient, outputs))
        return outputs

    def input_backward(self, key: MicroBatch) -> tuple[Tensor | None, ...]:
        dys = self._dys.pop(key)
        dx = self._stage.input_backward(key, dys if self._several.pop(key) else dys[0])
        assert isinstance(dx, tuple)  # as the input
        return dx

    def weight_backward(self, key: MicroBatch) -> None:
        self._stage.weight_backward(key)


class _Record(GradientSum):
    """Keeps what a sum would add."""

    def __init__(self, moving: list[Tensor]) -> None:
        super().__init__((), terms=1)
        self.moving = moving
        self._terms: list[tuple[Tensor | None, Tensor]] = []

    def add(self, tensor: Tensor, term: Tensor) -> None:
        self._terms.append((tensor, term))

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        self.add(tensor, (left @ right).to(tensor.dtype))

    def add_loss(self, loss: Tensor) -> None:
        self._terms.append((None, loss))

    def take(self) -> list[tuple[Tensor | None, Tensor]]:
        """Since the last call."""
        terms, self._terms = self._terms, []
        return terms


def _gradient(y: Tensor) -> Tensor | None:
    """A gradient of an output: any numbers, the same every time."""
    generator = torch.Generator().manual_seed(y.numel())
    return torch.randn(y.shape, generator=generator).to(y) if y.is_floating_point() else None


def _named(name: str, tensors: tuple[Tensor | None, ...]) -> dict[str, Fingerprint]:
    return {f"{name} ({i})": _fingerprint(t) for i, t in enumerate(tensors) if t is not None}


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Made once: making them anew was most of a fingerprint."""
    return torch.arange(1, 2 * _CHUNK + 1, 2, device=device)


def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Of type, shape and all bits. Keeps nothing of the size of the tensor."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    # Odd factors: a change in any one element shows whatever it is.
    factors, total = _factors(tensor.device), 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        total = (total * _STEP + int((factors[: part.numel()] * part).sum())) % 2**64
    return tensor.dtype, tuple(tensor.shape), total


def _covers_most(strategy: Strategy) -> bool:
    """Whether nearly all parameters' gradients are deferred, so that another split can't do much better."""
    if not isinstance(strategy, Deferred):
        return False
    deferred, every = ({id(p): p.numel() for p in ps} for ps in (strategy.layers.parameters, strategy.parameters))
    return sum(deferred.values()) >= _NEARLY * sum(every.values())
