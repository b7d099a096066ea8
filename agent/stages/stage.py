"""One stage on one worker: its module, what its micro-batches hold between forward and weight-backward, and how the
stage is built.

How its backward can be split (agent.stages.backward) is found by trying. Every candidate runs two interleaved
micro-batches on the real module. Its outputs, its gradients of inputs and parameters and its buffer changes must equal
the fused backward's to the bit. How much work it defers, and whether it does any work twice, is counted in
floating-point operations and never timed, so all workers of a stage come to the same result. (They need not: all splits
give the same bits.)

What a trial can't see: a module whose graph takes another form for other data is tried only on these data. The deferred
split is safe there, since autograd itself runs what is not deferred. torch's split misses a parameter that has, only
for other data, a path to an output past every input. No split knows of parameters that are shared between stages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import Autocast, keep_pinned, on_device, seed_for
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.models import compat
from openrecycle.agent.models.compat import FlopCount
from openrecycle.agent.models.data import own_numbers
from openrecycle.agent.models.layers import (
    CPU,
    BackwardSeed,
    Gradients,
    LayerStack,
    StageCuts,
    StageIO,
    StageIOError,
    Tensors,
    build_layers,
    leaf,
    precision,
    tensors_of,
    wanted_of,
)
from openrecycle.agent.models.parallelized import OverRanks, Sums
from openrecycle.agent.models.workload import Workload, nominal_weight, probe_inputs, probe_targets
from openrecycle.agent.stages.backward import (
    STRATEGIES,
    Deferred,
    Fused,
    MicroBatchState,
    MovingBuffers,
    Strategy,
    StrategyName,
    TorchSplit,
    moved_by,
)
from openrecycle.agent.stages.gradients import SUM_OF, GradientSum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.schedule import MicroBatch

# -- one stage's module and what its micro-batches hold between forward and weight-backward -----


class Stage:
    """Runs F, I and W of micro-batches on one stage's module; gradients go into `gradients`. Used by one thread.

    Ops of different micro-batches may be interleaved in any order that keeps F before I before W. A micro-batch's
    gradients, loss and buffer changes enter the sum together, in one op (W, or I if the split has everything then), and
    only once: a micro-batch in `gradients.settled` may run again for neighbouring stages without being counted again.

    split: how the backward is split. autocast: the type of torch.autocast for forward and loss. buffers: of the module;
    None: those of `gradients.moving` change in a forward. tried: a trial has shown that no others do.
    """

    def __init__(
        self,
        module: nn.Module,
        gradients: GradientSum,
        *,
        split: Strategy | None = None,
        autocast: Autocast | None = None,
        buffers: MovingBuffers | None = None,
        tried: bool = False,
    ) -> None:
        self.module = LayerStack.of(module)
        self._last_layer = max((number for number, _ in self.module.layers), default=0)
        self.gradients = gradients
        self.split = split or Deferred(module)
        self._buffers = buffers or MovingBuffers(self.module, gradients.moving, tried=tried)
        self._buffers_in_evaluation = MovingBuffers(self.module, tried=True)
        """For evaluation, in which other buffers may change: kept keys and values, counters, metrics."""
        self._autocast = autocast
        self._over_ranks = OverRanks(layer for _, layer in self.module.layers)
        self._states: dict[MicroBatch, MicroBatchState] = {}
        self._counted_elsewhere: frozenset[MicroBatch] = frozenset()
        self._to_come = 0
        self._last: Sums = gradients

    def expect(self, micro_batches: int, last: Sums) -> None:
        """Says how many more micro-batches will enter the sum until the step. last: gets the terms of the last one of
        them, and passes them on."""
        self._to_come, self._last = micro_batches, last

    def count_elsewhere(self, keys: frozenset[MicroBatch]) -> None:
        """Names the micro-batches that are in the sum of a peer, and are only run again for neighbouring stages."""
        self._counted_elsewhere = keys

    def counted(self, key: MicroBatch) -> bool:
        """Says whether the micro-batch is in this stage's sums already, on this worker or a peer."""
        return key in self.gradients.settled or key in self._counted_elsewhere

    @property
    def held(self) -> int:
        """The number of micro-batches whose activations are held."""
        return len(self._states)

    def forward(
        self,
        key: MicroBatch,
        x: Tensors,
        *,
        seed: int,
        loss: Callable[[Any], Tensor] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> Tensors:
        """Runs F. Returns the output, detached; on the last stage `loss` maps it to the scaled scalar loss.

        x: its tensors are the module's positional arguments. seed: for this micro-batch's random numbers (dropout), the
        same whichever worker runs it and wherever the model is cut. wanted: for which inputs the stage before takes a
        gradient back; None: for all that can have one.
        """
        given = x if isinstance(x, tuple) else (x,)
        inputs = tuple(map(leaf, given, wanted if wanted is not None else [True] * len(given)))
        late, backward = not any(t.requires_grad for t in inputs), BackwardSeed(seed, self._last_layer, given[0].device)
        state = MicroBatchState(inputs, late, backward, several=isinstance(x, tuple))
        with (
            self._over_ranks.op(),
            self._buffers.kept(state.moves),
            self.split.recording(state),
            precision(self._autocast, inputs[0].device),
        ):
            y = self.module(*inputs, seed=seed)
            if loss is not None:
                y = loss(y)
                state.loss = y.detach()
                if self.gradients.loss_scale != 1.0:
                    y = (y if y.dtype == torch.float64 else y.float()) * self.gradients.loss_scale
        state.outputs = tensors_of(y, "output of the stage")
        self._states[key] = state
        if state.loss is not None:
            return state.loss
        return y.detach() if isinstance(y, Tensor) else tuple(t.detach() for t in state.outputs)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this context, the module is in evaluation mode. Each part of it gets its own mode back afterwards,
        since a user may keep some parts in evaluation mode."""
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode

    def evaluate(self, x: Tensors, *, seed: int, measure: Callable[[Any], Any] = lambda y: y) -> Any:
        """Evaluates with one forward, and returns `measure` of its output. Keeps nothing, and changes no buffer."""
        inputs = x if isinstance(x, tuple) else (x,)
        where = inputs[0].device
        kept = self._buffers_in_evaluation.kept()
        with torch.no_grad(), self._over_ranks.op(), kept, precision(self._autocast, where):
            return measure(self.module(*inputs, seed=seed))

    def weigh(self, key: MicroBatch, weight: Tensor) -> None:
        """Sets how much the micro-batch counts in the iteration's mean. Called between F and I."""
        self._states[key].weight = weight

    def input_backward(self, key: MicroBatch, dy: Gradients) -> Gradients:
        """Runs I. dy: the gradient of the output, in the output's form (None on the last stage, whose output is the
        loss).

        Returns the gradient of the input, in the input's form: None for a tensor that has none, zeros if the output
        does not depend on it.
        """
        state = self._states[key]
        inputs = state.inputs
        wanted = [t.requires_grad for t in inputs]
        dys = dy if isinstance(dy, tuple) else (dy,)
        pairs = [(y, g) for y, g in zip(state.outputs, dys, strict=True) if y.requires_grad]
        state.outputs, state.dys = tuple(y for y, _ in pairs), tuple(g for _, g in pairs)
        with self._over_ranks.op(), self._buffers.kept():
            self.split.input_backward(state)
        state.inputs = ()
        if self.split.whole and not state.late:
            self._settle(key, state)
        dxs = tuple(
            (torch.zeros_like(t) if t.grad is None else t.grad) if want else None
            for t, want in zip(inputs, wanted, strict=True)
        )
        return dxs if state.several else dxs[0]

    def weight_backward(self, key: MicroBatch) -> None:
        """Runs W: adds the gradients that I has left."""
        self._settle(key, self._states.pop(key))

    def abandon(self, *, keep_settled: bool = False, let_go: Callable[[], None] | None = None) -> None:
        """Forgets every micro-batch under way and, unless `keep_settled`, the sum. let_go: see GradientSum.clear."""
        self._states.clear()
        self._to_come = 0
        if not keep_settled:
            self.gradients.clear(let_go)

    def _settle(self, key: MicroBatch, state: MicroBatchState) -> None:
        """Adds everything of a micro-batch to the sum at once, unless it is there already."""
        if self.counted(key):
            return
        self._to_come -= 1
        with self._over_ranks.summed(self._last if self._to_come == 0 else self.gradients) as sums:
            together = self.split.reads_parameters(state)
            with self._over_ranks.op(together=together), self._buffers.kept():
                self.split.weight_backward(state, sums)
            for buffer, change in state.moves:
                sums.add_change(buffer, change)
        if state.loss is not None:
            self.gradients.add_loss(state.loss, state.weight)
        if state.weight is not None:
            self.gradients.add_weight(state.weight)
        self.gradients.settle(key)


# -- finds out, by trying, how the backward of a stage can be split -----------------------------

Wanted = Literal["auto"] | StrategyName

# A split is used if W has at least this share of the backward's work, ...
_LEAST_SHARE = 0.05
# ... and if I and W together do at most this multiple of the fused backward's work.
_MOST_WORK = 1.05
# The deferred split is preferred if it defers at least this share of what torch's does, since it holds less memory.
_NEARLY = 0.9
_FIRST, _SECOND = (0, 0), (0, 1)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# For a fingerprint: the size of a chunk, which fits a core's cache, and the factor between chunks.
_CHUNK, _STEP = 1 << 17, 1000003

Fingerprint = tuple[torch.dtype, tuple[int, ...], int]


@dataclass(frozen=True)
class Probe:
    """A micro-batch for the trial. inputs: of the module. loss: the scaled loss, on the last stage. wanted: for which
    inputs a gradient is sent back; None: for all that can have one."""

    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor] | None = None
    wanted: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Split:
    """What a trial has found.

    share: the part of the backward's work that W does. moving: the buffers that a forward changes. text: one sentence
    on what was chosen and why. warning: the text is worth an operator's attention.
    """

    strategy: Strategy
    share: float
    moving: list[Tensor]
    text: str
    warning: bool = False


def choose_split(
    module: nn.Module, probe: Probe, *, autocast: Autocast | None = None, wanted: Wanted = "auto"
) -> Split:
    """Returns the best exact split of `module`. Leaves the module and all random number generators as they were.

    wanted: a strategy's name to try only that one; if it does not pass, the fused one is returned. Raises whatever the
    module's own forward or backward raises.
    """
    with own_numbers("trial"):
        trial = _Trial(module, probe, autocast)
        found = _choose(trial, wanted)
    if trial.remembers:
        note = (
            "A second forward of the same micro-batch gives another output: does a layer or the loss keep something in "
            "a plain attribute, or count on a buffer keeping what the last forward wrote? Then results depend on which "
            "micro-batches a worker has run."
        )
        found = replace(found, text=f"{found.text} {note}", warning=True)
    if not trial.moving:
        return found
    note = "change in a forward: they move once per iteration, by the mean over all micro-batches"
    return replace(found, text=f"{found.text} {len(trial.moving)} buffers {note}.")


def _choose(trial: _Trial, wanted: Wanted) -> Split:
    module, moving = trial.module, trial.moving
    fused = Fused(module)
    if not any(p.requires_grad for p in module.parameters()):
        return Split(fused, 0.0, moving, "The stage has no trainable parameter: there is no W.")
    reference = trial.reference()
    if not reference.work and not trial.late:
        text = "The backward is not split: there is no matrix product or convolution of the stage's own in it."
        return Split(fused, 0.0, moving, text, warning=wanted != "fused")
    # A hook may leave the gradients of the trial alone, and change others.
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if after := next((name for name, p in named if compat.has_hook_after_gradient(p)), ""):
        text = (
            f"The backward is not split: register_post_accumulate_grad_hook was called for {after}, and its hook wants "
            "whole gradients."
        )
        return Split(fused, 1.0 if trial.late else 0.0, moving, text, warning=True)
    faults: list[str] = []
    passed: list[tuple[float, Strategy]] = []
    hooked = next((name for name, p in named if compat.has_gradient_hook(p)), "")
    for name in ("deferred", "torch"):
        if hooked and name == "deferred":
            faults.append(f"deferred: the gradient of {hooked} has a hook")
            continue
        if wanted not in ("auto", name) or (trial.late and name == "torch") or (passed and _covers_most(passed[0][1])):
            continue
        strategy: Strategy = Deferred(module) if name == "deferred" else TorchSplit(module)
        share, fault = trial.judge(strategy, reference)
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


@dataclass(frozen=True)
class _TrialOutcome:
    """What two interleaved micro-batches give. numbers: the fingerprint of each tensor that comes out, by name. in_i,
    in_w: floating-point operations of I and of W."""

    numbers: Mapping[str, Fingerprint]
    in_i: int
    in_w: int

    @property
    def work(self) -> int:
        return self.in_i + self.in_w


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
        self._made: set[str] = set()
        self._outputs: dict[str, Fingerprint] = {}
        self.remembers = False
        """Whether a second forward of the same micro-batch gives another output."""
        before = {name: _fingerprint(p) for name, p in module.named_parameters()}
        self.moving = moved_by(module, self._first)
        for name, parameter in module.named_parameters():
            if _fingerprint(parameter) != before.get(name):
                raise StageIOError(
                    f"a forward changes the parameter {name}: workers would come to hold other values than their "
                    "peers, which run other micro-batches. Have the optimizer's step do it (a step hook), or compute "
                    "with a changed copy"
                )

    def _first(self, buffers: MovingBuffers) -> None:
        outputs = self._stage(Fused(self.module), _KeptTerms([]), buffers).forward(_FIRST)
        self._outputs, self._made = _named(f"output of {_FIRST}", outputs), buffers.made

    def reference(self) -> _TrialOutcome:
        """Runs the fused backward, as `run` does. Raises what the module raises."""
        try:
            found = self.run(Fused(self.module))
            self.remembers = any(found.numbers[name] != output for name, output in self._outputs.items())
            return found
        except Exception as error:
            if self._made:
                error.add_note(
                    f"the second forward; the first one made the buffers {', '.join(sorted(self._made))}. They are "
                    "made again for every forward: make them in __init__"
                )
            raise

    def run(self, strategy: Strategy) -> _TrialOutcome:
        """Runs two interleaved micro-batches, and returns what comes out."""
        record = _KeptTerms(self.moving)
        ops = self._stage(strategy, record)
        out: dict[str, Fingerprint] = {}
        for key in (_FIRST, _SECOND):
            out |= _named(f"output of {key}", ops.forward(key))
        work: list[int] = []
        for op, keys in ((ops.input_backward, (_FIRST, _SECOND)), (ops.weight_backward, (_SECOND, _FIRST))):
            for key in keys:
                # The second run of each op is counted: what is compiled in its first run is no part of it.
                count = FlopCount() if key == keys[-1] else None
                with count or contextlib.nullcontext():
                    dx = op(key)
                if count is not None:
                    work.append(count.total)
                out |= _named(f"input gradient of {key}", dx or ())
                out |= {f"{self._names.get(id(t), 'loss')} of {key}": _fingerprint(g) for t, g in record.take()}
        return _TrialOutcome(out, *work)

    def judge(self, strategy: Strategy, reference: _TrialOutcome) -> tuple[float, str]:
        """Returns the share of the work that W does, and what speaks against the strategy ("": nothing)."""
        if isinstance(strategy, Deferred) and not strategy.layers.parameters:
            return 0.0, "no layer of a kind that can be deferred"
        try:
            outcome = self.run(strategy)
        except Exception as error:  # a module may raise anything under a split that does not suit it
            cause = error.__cause__ or error
            return 0.0, f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0][:160]}"
        ours, theirs, work = outcome.numbers, reference.numbers, reference.work
        different = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
        if different:
            return 0.0, f"other bits than the fused backward in {different[0]} and {len(different) - 1} more"
        share = outcome.in_w / work if work else 1.0
        if outcome.work > _MOST_WORK * work:
            return share, f"{outcome.work / work:.2f} times the work of the fused backward"
        return share, "" if share >= _LEAST_SHARE else f"only {share:.1%} of the backward could be done in W"

    def _stage(self, strategy: Strategy, record: _KeptTerms, buffers: MovingBuffers | None = None) -> _Ops:
        stage = Stage(self.module, record, split=strategy, autocast=self._autocast, buffers=buffers)
        return _Ops(stage, self._inputs, self._probe)


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
        # Made here and not in the backward, so that making it is not counted as work.
        self._dys[key] = (None,) if probe.loss else tuple(map(_gradient, outputs))
        return outputs

    def input_backward(self, key: MicroBatch) -> tuple[Tensor | None, ...]:
        dys = self._dys.pop(key)
        dx = self._stage.input_backward(key, dys if self._several.pop(key) else dys[0])
        assert isinstance(dx, tuple)  # as the input
        return dx

    def weight_backward(self, key: MicroBatch) -> None:
        self._stage.weight_backward(key)


class _KeptTerms(GradientSum):
    """A sum that keeps its terms instead of adding them."""

    def __init__(self, moving: list[Tensor]) -> None:
        super().__init__((), terms=1)
        self.moving = moving
        self._terms: list[tuple[Tensor | None, Tensor]] = []

    def add(self, tensor: Tensor, term: Tensor) -> None:
        self._terms.append((tensor, term))

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        self.add(tensor, (left @ right).to(tensor.dtype))

    def add_loss(self, loss: Tensor, weight: Tensor | None = None) -> None:
        self._terms.append((None, loss))

    def take(self) -> list[tuple[Tensor | None, Tensor]]:
        """Returns the terms since the last call."""
        terms, self._terms = self._terms, []
        return terms


def _gradient(y: Tensor) -> Tensor | None:
    """Returns a gradient for an output: arbitrary numbers, the same every time."""
    generator = torch.Generator().manual_seed(y.numel())
    return torch.randn(y.shape, generator=generator).to(y) if y.is_floating_point() else None


def _named(name: str, tensors: tuple[Tensor | None, ...]) -> dict[str, Fingerprint]:
    return {f"{name} ({i})": _fingerprint(t) for i, t in enumerate(tensors) if t is not None}


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Returns the factors of a fingerprint. They are kept, since making them took most of its time."""
    return torch.arange(1, 2 * _CHUNK + 1, 2, device=device)


def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Returns a hash of a tensor's type, shape and all bits. Keeps nothing as large as the tensor."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    # The factors are odd, so any change of a single element shows.
    factors, total = _factors(tensor.device), 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        total = (total * _STEP + int((factors[: part.numel()] * part).sum())) % 2**64
    return tensor.dtype, tuple(tensor.shape), total


def _covers_most(strategy: Strategy) -> bool:
    """Says whether nearly all parameters' gradients are deferred, so that another split can't do much better."""
    if not isinstance(strategy, Deferred):
        return False
    deferred, every = ({id(p): p.numel() for p in ps} for ps in (strategy.layers.parameters, strategy.parameters))
    return sum(deferred.values()) >= _NEARLY * sum(every.values())


# -- builds one worker's stage ------------------------------------------------------------------


def assemble(
    workload: Workload,
    job: Job,
    cuts: StageCuts,
    stage: int,
    seed: int,
    optimization: Optimization,
    device: torch.device = CPU,
) -> tuple[Stage, Split]:
    """Builds a stage, ready to run. Returns it, and what was found about its backward.

    Runs a few micro-batches of the size of real ones on `device`. Initial parameters are made on the CPU, so that they
    don't depend on the device. Raises whatever the workload raises.
    """
    module = build_layers(workload, cuts.span(stage), cuts.layers, seed).to(device)
    probe = _probe(workload, job, stage, seed, cuts.stage_io, device)
    split = choose_split(module, probe, autocast=optimization.autocast)
    gradients = sums_of(module, split.moving, workload, job, optimization, device)
    return Stage(module, gradients, split=split.strategy, autocast=optimization.autocast, tried=True), split


def sums_of(
    module: nn.Module,
    moving: Sequence[Tensor],
    workload: Workload,
    job: Job,
    optimization: Optimization,
    device: torch.device,
) -> GradientSum:
    """Returns a new sum for an iteration's gradients, and for the changes of the buffers in `moving`."""
    terms = job.pipelines * job.micro_batches
    return SUM_OF[optimization.mode](
        module.parameters(),
        terms=terms,
        buffers=moving,
        device=device,
        nominal=nominal_weight(workload, terms),
        bucket_bytes=optimization.bucket_bytes,
    )


def reassemble(optimizer: StageOptimizer, strategy: StrategyName, optimization: Optimization) -> Stage:
    """Builds a stage of layers that are here already, with their sums. strategy: how the backward of each of them is
    split."""
    split = STRATEGIES[strategy](optimizer.module)
    return Stage(optimizer.module, optimizer.gradients, split=split, autocast=optimization.autocast, tried=True)


def try_split(
    workload: Workload,
    job: Job,
    cuts: StageCuts,
    stage: int,
    seed: int,
    optimization: Optimization,
    module: LayerStack,
    device: torch.device = CPU,
) -> StrategyName:
    """Finds out, on a few micro-batches, how the backward of layers that are here already can be split. Does not split
    it."""
    probe = _probe(workload, job, stage, seed, cuts.stage_io, device)
    found = choose_split(module, probe, autocast=optimization.autocast).strategy
    found.close()
    return found.name


def _probe(workload: Workload, job: Job, stage: int, seed: int, stage_io: StageIO, device: torch.device) -> Probe:
    """Makes a micro-batch for the trial: real data if the stage reads any, otherwise numbers of the same shape."""
    generator = torch.Generator().manual_seed(seed_for("probe", seed, stage))
    if stage == 0:
        inputs, wanted = tensors_of(probe_inputs(workload, seed), "data"), None
    else:
        inputs = tuple(_like(spec.empty(), generator) for spec in stage_io[stage - 1])
        wanted = wanted_of(stage_io[stage - 1])
    varies: bool = getattr(workload, "varies", False)
    keep_pinned(() if stage else inputs, device, varies=varies)
    inputs = on_device(inputs, device)
    if stage < job.stages - 1:
        return Probe(inputs, wanted=wanted)
    read = probe_targets(workload, seed)
    keep_pinned(read, device, varies=varies)
    targets = on_device(read, device)
    share = 1.0 / (job.pipelines * job.micro_batches)
    return Probe(inputs, lambda y: workload.loss(y, targets) * share, wanted)


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    # Integers may be indices, and 0 is always a valid one.
    return tensor.normal_(generator=generator) if tensor.is_floating_point() else tensor.zero_()
