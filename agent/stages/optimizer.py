"""A stage's optimizer step, what undoes it, and the stage's state.

A stage steps when *its* gradients are reduced, without waiting for the other stages. Two things may undo that step. A
death may interrupt the iteration when only some stages have stepped: these go back. And the validation of the whole
gradient, which comes later, may ask for another step (see agent.stages.post_validation). One snapshot is enough for
both, and it is needed only until the next gradient is there (see agent.workers.recovery). So it lies in the memory of
the gradients' sums, as far as it fits there. With AdamW in fp32 a worker needs 24 bytes a parameter beside activations:
parameters 4, optimizer 8, sums 8, the rest of the snapshot 4.

If the optimizer's state is sharded over the stage's peers (agent.stages.shards), a worker steps the segments whose
state it holds, and goes back in those. The other parameters come from the workers that step them
(agent.workers.sharding). With N peers a worker needs 12 + 16 / N bytes a parameter: 17.3 with 3, 14 with 8. What does
not fit into the memory of a segment's own sum lies in the memory of sums that only other workers need. With 4 peers or
more, so do the gradients that are kept until their norm is known; otherwise these take 4 bytes a parameter.

The file also has an optimizer that keeps a moving average of the parameters (`ExponentialMovingAverage`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.models import compat
from openrecycle.agent.models.data import reseed
from openrecycle.agent.models.layers import LayerStack, Span, StageIOError, parameters_by_layer
from openrecycle.agent.models.parallelized import split_over_ranks
from openrecycle.agent.models.state import (
    AVERAGE,
    Block,
    Share,
    Split,
    StageState,
    StateError,
    Writer,
    decode,
    encode,
    layer_of,
    sha256,
    share_of_state,
    whole_number,
)
from openrecycle.agent.models.workload import PositionedData, Workload
from openrecycle.agent.stages.gradients import FastSum, GradientSum
from openrecycle.agent.stages.post_validation import CLEAN, SKIP, LossScale, PostValidation, Slot, ValidationResult
from openrecycle.agent.stages.shards import Segment, segments_of
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.plans.schedule import MicroBatch

# -- the stage's own step, what undoes it, and the stage's state --------------------------------

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD"}
)
"""Optimizers of torch.optim that step each element by itself, from the element's own state and gradient."""


BUCKET_BYTES = 4 << 20
"""About how many bytes of parameters are stepped at a time, if each element is stepped by itself. A larger parameter is
stepped alone."""

NamedParameters = list[tuple[str, nn.Parameter]]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _changing(
    method: Callable[Concatenate[StageOptimizer, _P], _T],
) -> Callable[Concatenate[StageOptimizer, _P], _T]:
    """Decorates a method that changes what the stage holds: it holds the lock, since a state transfer reads from
    another thread."""

    @functools.wraps(method)
    def locked(self: StageOptimizer, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


class NonFiniteError(RuntimeError):
    """A gradient of the iteration was NaN, infinite or out of range."""


class Shards:
    """How the optimizer's state of a stage is cut if it is sharded, and which part of it this worker holds.

    trained: the names and parameters of the stage that are trained. pipelines: of the job.
    """

    def __init__(self, trained: NamedParameters, gradients: GradientSum, pipelines: int) -> None:
        sizes = [p.numel() for _, p in trained]
        whole = {place for place, (_, p) in enumerate(trained) if not p.is_contiguous()}
        self.parameter_names = [name for name, _ in trained]
        layers = [layer_of(name) for name, _ in trained]
        self.segments: tuple[Segment, ...] = segments_of(sizes, layers, whole, gradients.norm_chunk, pipelines)
        self.parts: list[nn.Parameter] = []
        """For each segment, its elements of the parameter; the parameter itself if it is not cut."""
        self.names: list[str] = []
        for segment in self.segments:
            name, parameter = trained[segment.parameter]
            if segment.elements == parameter.numel():
                part = parameter
            else:
                part = nn.Parameter(parameter.detach().view(-1)[segment.start : segment.end])
                gradients.add_segment(part, parameter, segment.start)
            self.parts.append(part)
            self.names.append(f"{name}@{segment.start}")
        self.number = {id(part): number for number, part in enumerate(self.parts)}
        self.held = set(range(len(self.parts)))
        """Segments whose state is here, up to the last step. At first these are all, since there is no state yet."""
        self.late = set[int]()
        """Held segments that have come after the last step, which can't be undone or corrected in them."""
        self.primary: frozenset[int] = frozenset(self.held)
        """Segments whose part of the validation this worker reports."""
        self.stale = False
        """Whether the parameters of segments that are not held are of another step than those of held ones."""
        self.bare = False
        """Whether this worker still lacks what is in no segment: large parameters that are not trained, large buffers.
        """
        self.measured: tuple[bool, Sequence[float]] | None = None
        """Whether the sums of all peers are finite, and the parts of their norms, segment by segment."""
        of = Counter(segment.parameter for segment in self.segments)
        ends = list(accumulate(of[place] for place in range(len(trained))))
        self.of_parameter = {
            id(p): range(end - of[i], end) for i, (end, (_, p)) in enumerate(zip(ends, trained, strict=True))
        }
        """The numbers of each parameter's segments."""

    def lag(self) -> None:
        """Notes that a step was taken or corrected: the parameters of segments that others hold are now out of date."""
        self.stale = True

    def caught_up(self) -> None:
        self.stale = False

    def forgotten(self) -> None:
        """Notes that nothing that is here counts any more, held or not."""
        self.stale = self.bare = True

    def untrained_came(self) -> None:
        self.bare = False

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each shard."""
        out = Counter[int]()
        for segment in self.segments:
            out[segment.shard] += segment.elements
        return [out[shard] for shard in range(len(out))]

    @property
    def shards_held(self) -> frozenset[int]:
        """The shards of which every segment is held."""
        lacking = {s.shard for number, s in enumerate(self.segments) if number not in self.held}
        return frozenset(s.shard for s in self.segments) - lacking

    def segments_in(self, shards: Collection[int]) -> list[int]:
        return [number for number, segment in enumerate(self.segments) if segment.shard in shards]


class StageOptimizer:
    """Module, optimizer and scheduler of one stage on one worker, and how many steps they have taken.

    committed: number of iterations whose step has been taken (so also the next iteration). settled: whether the
    validation of the last one is known. slot: this stage's share of that validation. post_validation: what follows from
    the validations so far. skipped: this worker's micro-batches that the last measured sum lacks. shards: how the
    optimizer's state is sharded over the stage's peers; None: it is not. lock: held while anything changes; the
    training thread changes it, and state transfers read from other threads.
    clips: the norm of the gradients is needed. scales_loss: numbers are fp16.

    The scheduler is stepped once per update, right after it. Raises InputError for an optimizer or scheduler that can't
    be driven that way.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: GradientSum,
        scheduler: LRScheduler | None = None,
        *,
        clips: bool = False,
        scales_loss: bool = False,
        pipelines: int | None = None,
        seed: int = 0,
    ) -> None:
        """pipelines: of the job, if the optimizer's state is sharded over the stage's peers; otherwise None. seed: for
        random numbers that an optimizer draws in a step."""
        if _required(type(optimizer).step):
            raise InputError("optimizer", type(optimizer).__name__, "one whose step() needs no closure")
        if scheduler is not None and (_required(type(scheduler).step) or scheduler.optimizer is not optimizer):
            raise InputError(
                "scheduler", type(scheduler).__name__, "one of this optimizer whose step() needs no metric"
            )
        self.module, self.optimizer = LayerStack.of(module), optimizer
        self.gradients, self.scheduler = gradients, scheduler
        self.seed = seed
        self.committed = 0
        self.settled = True
        self.slot = Slot()
        self.validation = CLEAN
        """The validation of the last step, if that is settled."""
        self._scales_loss = scales_loss
        self.post_validation = PostValidation(loss_scale=LossScale() if scales_loss else None)
        self.lock = threading.RLock()
        self.skipped: list[MicroBatch] = []
        self.learning_rate: float | None = None
        """The learning rate of the last step, of the first group of parameters."""
        self._clips = clips
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._named = dict(self.module.named_parameters())
        """The parameters as they are between two ops. Within an op a layer may have others in their place
        (agent.models.parallelized), while a state transfer reads from another thread."""
        self._buffers = dict(self.module.named_buffers())
        """The buffers as they are between two ops: a forward is given copies, and may make others."""
        named = list(self._named.items())
        copies = {id(p) for name, p in named if name in self.module.copies or getattr(p, "duplicate", False)}
        self._by_layer = [
            [p for p in layer if p.requires_grad and id(p) not in copies] for layer in parameters_by_layer(module)
        ]
        self.data: PositionedData | None = None
        self._buckets: list[_StepBucket] = []
        self._snapshot = _StepSnapshot(self)
        self._kept: list[tuple[nn.Parameter, Tensor | None]] | None = None
        self._kept_memory: list[Tensor] = []
        self.shards: Shards | None = None
        if pipelines is not None:
            if not self.steps_apart:
                expected = f"one of {', '.join(sorted(ELEMENTWISE))} without own step hooks, as its state is sharded"
                raise InputError("optimizer", type(optimizer).__name__, expected)
            trained = [(name, p) for name, p in named if p.requires_grad]
            self.shards = Shards(trained, gradients, pipelines)
            # Some optimizers have a state before their first step.
            began = [part for p in self._trained if p in optimizer.state for part in self._cut(p, optimizer.state[p])]
            optimizer.state.clear()
            optimizer.state.update(began)
        self._scale()

    @property
    def version(self) -> tuple[int, float | None]:
        """Identifies the stage's values: how many steps have been taken, and the coefficient of the validation by which
        the last one was taken or corrected. While that is not known, it is the coefficient of a clean one. If it is
        lost on this worker, peers that have waited for it hold other values."""
        return self.committed, (self.validation if self.settled else CLEAN).coefficient

    @property
    def slot_before(self) -> Slot:
        """The slot of the step before the last one."""
        return self._snapshot.before[1]

    @property
    def validation_before(self) -> ValidationResult:
        """The validation of the step before the last one."""
        return self._snapshot.before[2]

    # -- the step -----------------------------------------------------------------------------

    def measure(self) -> Slot:
        """Returns this stage's share of the validation of the gradients that have just been reduced."""
        shards = self.shards
        if shards is None:
            rejected, norms_of = self.gradients.rejected, self.gradients.squared_norms
        else:
            assert shards.measured is not None or not self.tells_measures
            finite, parts = shards.measured or (True, ())
            rejected, norms_of = self.gradients.rejected_terms + (not finite), partial(self._norms_from, parts)
        self.skipped = self.gradients.rejecting() if rejected else []
        if not self._clips:
            return Slot(rejected=rejected)
        norms = (0.0,) * len(self._by_layer) if rejected else norms_of(self._by_layer)
        return Slot(norms, rejected)

    @property
    def tells_measures(self) -> bool:
        """Whether peers must tell each other about the sums of their segments, as they must where the state is sharded
        and norms or checks of sums are needed."""
        return self.shards is not None and (self._clips or isinstance(self.gradients, FastSum))

    def measures(self) -> Tensor:
        """Returns, as int64, what this worker reports of the sums of its primary segments: whether they are not finite,
        and the bits of the parts of their norms, with zeros in the place of other segments. `take_measures` takes the
        sum of all peers' measures."""
        shards, sums = self.shards, self.gradients
        assert shards is not None
        mine = [part for number, part in enumerate(shards.parts) if number in shards.primary]
        counts = [-(-part.numel() // sums.norm_chunk) for part in shards.parts] if self._clips else []
        out = torch.zeros(1 + sum(counts), dtype=torch.int64)
        out[0] = int(not sums.finite(mine))
        if self._clips:
            bits = sums.norm_parts(mine).cpu().view(torch.int64)
            place, at = 1, 0
            for number, count in enumerate(counts):
                if number in shards.primary:
                    out[place : place + count] = bits[at : at + count]
                    at += count
                place += count
        return out

    def take_measures(self, total: Tensor) -> None:
        assert self.shards is not None
        self.shards.measured = not int(total[0]), total[1:].contiguous().view(torch.float64).tolist()

    def _norms_from(self, parts: Sequence[float], layers: Sequence[Sequence[nn.Parameter]]) -> tuple[float, ...]:
        shards, chunk = self.shards, self.gradients.norm_chunk
        assert shards is not None
        ends = [0, *accumulate(-(-part.numel() // chunk) for part in shards.parts)]
        of = shards.of_parameter
        own = [[x for p in layer for k in of[id(p)] for x in parts[ends[k] : ends[k + 1]]] for layer in layers]
        return tuple(map(self.gradients.squared_norm, own))

    @_changing
    def step(self, validation: ValidationResult | None = CLEAN, slot: Slot | None = None) -> float:
        """Takes the step on the reduced gradients. Returns the (scaled) loss that came with them.

        validation: the validation of all stages' gradients; None: it is not known yet. Then the step is taken as if the
        validation were clean, and `settle` must follow before the next step. slot: as `measure` has returned it.
        """
        assert self.settled, "the validation of the step before is not known"
        trained = set(map(id, self._trained))
        if thawed := next((n for n, p in self._named.items() if p.requires_grad and id(p) not in trained), None):
            raise StageIOError(
                f"{thawed} requires a gradient now, and did not when the job began: none was summed for it. What is "
                "trained stays the same in a job: stop it, and resume from a checkpoint with other parameters frozen"
            )
        loss, slot = self.gradients.loss, slot if slot is not None else self.measure()
        self.learning_rate = _finite(self.optimizer.param_groups[0].get("lr"))
        self._snapshot.begin()
        self.slot = slot
        self._kept = None
        # A stage that knows that its own gradients are useless skips the step without a validation.
        applied = (SKIP if slot.rejected else CLEAN) if validation is None else validation
        if applied.coefficient is not None:
            keep, kept = validation is None and self._clips, list[tuple[nn.Parameter, Tensor | None]]()
            leaves_gradients = self._leaves_gradients
            if keep and not self._kept_memory:
                self._kept_memory = list(map(self._snapshot.memory_beside, self.stepped))
            for bucket in self._in_buckets():
                wanted = bucket.parameters
                memory = self._kept_memory[bucket.place] if keep else self.gradients.scratch_for(wanted)
                self.gradients.write_gradients(wanted, memory)
                self._snapshot.save(wanted)
                if keep:
                    kept += [(p, p.grad) for p in wanted]
                    if not leaves_gradients:
                        for parameter, spare in zip(wanted, self.gradients.scratch_for(wanted), strict=True):
                            parameter.grad = None if parameter.grad is None else spare.copy_(parameter.grad)
                self._update(bucket, applied.coefficient, self.committed)
            self._kept = kept or None
            if self.shards is not None:
                self.shards.lag()
            if self.scheduler is not None:
                self.scheduler.step()
            self.gradients.write_buffers()
        if self.shards is not None:
            self.shards.late.clear()
        self.gradients.clear()
        self.committed += 1
        self.settled = validation is not None
        if validation is not None:
            self.validation = validation
            self.post_validation = self.post_validation.after(validation)
        self._scale()
        return loss

    @_changing
    def settle(self, validation: ValidationResult) -> bool:
        """Takes the validation of the last step, and corrects the step if it was taken otherwise.

        Returns whether the validation is not clean, which is the same on every worker.
        """
        assert not self.settled
        self.settled, kept = True, self._kept
        self.validation, self._kept = validation, None
        self.post_validation = self.post_validation.after(validation)
        self._scale()
        if validation.clean:
            return False
        self._changed_after_the_fact()
        if validation.coefficient is None:
            self._snapshot.restore(buffers=True)
        elif kept is not None:
            # The moving buffers stay as the step has left them: they don't depend on the norm.
            self._snapshot.restore(buffers=False)
            for parameter, gradient in kept:
                parameter.grad = gradient
            for bucket in self._in_buckets():
                self._update(bucket, validation.coefficient, self.committed - 1)
            if self.scheduler is not None:
                self.scheduler.step()
        # What the sums hold belongs to parameters that no worker has any more.
        self.gradients.clear()
        return True

    @property
    def stepped(self) -> list[nn.Parameter]:
        """The parameters that are stepped here, or segments of them."""
        shards = self.shards
        return self._trained if shards is None else [shards.parts[number] for number in sorted(shards.held)]

    def _in_buckets(self) -> list[_StepBucket]:
        """Returns the buckets that are stepped one after the other; only one if stepping apart may change the
        result."""
        if not self._buckets:
            # torch's Adafactor takes its eps from the type of the first of all that it steps: which this is depends on
            # where the model is cut. So it gets parameters of one type at a time.
            by_type = type(self.optimizer) is torch.optim.Adafactor and not self.has_own_hooks
            each, groups, stepped = self.steps_apart, self.optimizer.param_groups, self.stepped
            apart = each or by_type
            at, size = 0, 0
            for end, parameter in enumerate(stepped, start=1):
                size += parameter.numel() * parameter.element_size()
                last = end == len(stepped)
                other = by_type and not last and stepped[end].dtype != parameter.dtype
                if last or other or (each and size >= BUCKET_BYTES):
                    mine = {id(p): p for p in stepped[at:end]}
                    parts = [self._among(group["params"], mine) for group in groups] if apart else None
                    self._buckets.append(_StepBucket(slice(at, end), stepped[at:end], parts))
                    at, size = end, 0
            if not self._buckets:
                self._buckets.append(_StepBucket(slice(0), [], None if self.shards is None else [[] for _ in groups]))
        return self._buckets

    def _among(self, parameters: Sequence[nn.Parameter], mine: Mapping[int, nn.Parameter]) -> list[nn.Parameter]:
        """Returns those of `mine` that are among `parameters`, or are segments of them."""
        shards = self.shards
        if shards is None:
            return [p for p in parameters if id(p) in mine]
        numbers = (k for p in parameters for k in shards.of_parameter.get(id(p), ()))
        return [shards.parts[k] for k in numbers if id(shards.parts[k]) in mine]

    # -- segments that come and go ---------------------------------------------------------------

    def _regroup(self) -> None:
        """Forgets what was made for the segments held so far, since others are held from now on."""
        self._buckets, self._kept_memory = [], []
        self._snapshot.regroup()

    @_changing
    def hold(self, number: int, state: Mapping[str, Any]) -> None:
        """Takes over a segment, with the optimizer's state of it, which must be of the same step as this worker's."""
        shards = self.shards
        assert shards is not None
        if state:
            self._put_state(shards.parts[number], state)
        shards.held.add(number)
        shards.late.add(number)
        self._regroup()

    @_changing
    def release(self, numbers: Collection[int]) -> None:
        """Gives up segments, which other workers hold. Their last step can't be undone here any more."""
        shards = self.shards
        assert shards is not None
        for number in numbers:
            part = shards.parts[number]
            self.optimizer.state.pop(part, None)
            self._snapshot.forget_one(part)
            shards.held.discard(number)
            shards.late.discard(number)
        if self._kept is not None:
            gone = {id(shards.parts[number]) for number in numbers}
            self._kept = [(p, gradient) for p, gradient in self._kept if id(p) not in gone]
        if numbers:
            self._regroup()

    def segment_state(self, number: int, keys: Collection[str] | None = None) -> StageState:
        """Returns what the optimizer keeps of a segment that is held; keys: only these parts of it. The tensors are the
        live ones, not copies."""
        shards, tensors = self.shards, dict[str, Tensor]()
        assert shards is not None
        if number not in shards.held:
            raise StateError(f"{shards.names[number]}: not held here")
        kept = self.optimizer.state.get(shards.parts[number], {})
        wanted = {key: value for key, value in kept.items() if keys is None or key in keys}
        return StageState({"kept": encode(wanted, shards.names[number], tensors)}, tensors)

    def _update(self, bucket: _StepBucket, coefficient: float, iteration: int) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is not None:
                parameter.grad = _laid_out_as(parameter, parameter.grad)
        gradients = [p.grad for p in bucket.parameters if p.grad is not None]
        if coefficient != 1.0 and gradients:  # torch takes no empty list
            compat.multiply(gradients, coefficient)
        if bucket.groups is None:  # the optimizer may draw noise, which must be the same on all peers
            first = next((name for name, p in self._named.items() if p.requires_grad), "")
            reseed(seed_for("step", self.seed, iteration, first), self.gradients.device)
        with bucket.alone_in(self.optimizer):
            self.optimizer.step()
        for parameter in bucket.parameters:
            parameter.grad = None

    @_changing
    def roll_back(self) -> None:
        """Undoes the last step. Raises StateError when there is none to undo."""
        self._snapshot.undo()
        self._kept = None
        self._changed_after_the_fact()
        self._scale()

    def _changed_after_the_fact(self) -> None:
        """Notes that the last step was undone or corrected, except in segments that have come since: gives these up."""
        if self.shards is not None:
            self.release(set(self.shards.late))
            self.shards.lag()

    @property
    def _next_validation(self) -> PostValidation:
        """`post_validation`, where a last step that is not settled counts as clean."""
        return self.post_validation if self.settled else self.post_validation.after(CLEAN)

    def _scale(self) -> None:
        """Sets the scale of the next iteration's loss."""
        scale = self._next_validation.loss_scale
        self.gradients.loss_scale = 1.0 if scale is None else scale.value

    # -- layers that come and go ---------------------------------------------------------------

    def tensors_of(self, span: Span) -> list[Tensor]:
        """Returns the tensors of these layers that have sums: first the trained parameters, then the moving buffers."""
        moving = set(map(id, self.gradients.moving))
        own = [layer for number, layer in self.module.layers if number in span]
        parameters = [p for layer in own for p in layer.parameters()]
        buffers = [b for name, b in self._buffers.items() if layer_of(name) in span]
        return [p for p in self._trained if any(p is q for q in parameters)] + [b for b in buffers if id(b) in moving]

    def moving_names(self, span: Span | None = None) -> list[str]:
        """Returns the names of the moving buffers; span: of these layers only."""
        moving = set(map(id, self.gradients.moving))
        names = [name for name, buffer in self._buffers.items() if id(buffer) in moving]
        return names if span is None else [name for name in names if layer_of(name) in span]

    def averages(self) -> dict[str, Tensor]:
        """Returns the moving averages of parameters that have one, by name."""
        state = self.optimizer.state
        return {name: state[p][AVERAGE] for name, p in self._named.items() if p in state and AVERAGE in state[p]}

    @_changing
    def adopt(self, parts: Sequence[StageOptimizer]) -> None:
        """Takes over, without copies, what other optimizers keep of layers that this one now has. All must be at the
        same step. Counts, and what holds for all layers, come from the first of them."""
        first = parts[0]
        mine = set(map(id, self.module.parameters()))
        if self.shards is not None:
            self._adopt_segments(self.shards, parts)
        for part in parts if self.shards is None else ():
            for parameter, state in part.optimizer.state.items():
                if id(parameter) in mine:
                    self.optimizer.state[parameter] = state
        for group, options in zip(self.optimizer.param_groups, first.optimizer.param_groups, strict=True):
            _put_options(group, {k: v for k, v in options.items() if k != "params"})
        if self.scheduler is not None and first.scheduler is not None:
            self.scheduler.load_state_dict(first.scheduler.state_dict())
        self.committed, self.settled, self.post_validation = first.committed, True, first.post_validation
        self.validation, self.slot = first.validation, first.slot
        if self.shards is None:
            # Another worker may not have taken the last step: then it is undone here as well.
            self._snapshot.adopt([part._snapshot for part in parts])
        self._scale()

    def _adopt_segments(self, shards: Shards, parts: Sequence[StageOptimizer]) -> None:
        """Takes over the segments that are held. The last step is never undone then: with a sharded optimizer, layers
        move while all workers wait, and these have agreed on that step (agent.workers.sharding)."""
        held: dict[str, Any] = {}
        for part in parts:
            theirs = part.shards
            assert theirs is not None
            held |= {theirs.names[k]: part.optimizer.state.get(theirs.parts[k]) for k in theirs.held}
        shards.held = {number for number, name in enumerate(shards.names) if name in held}
        for number in shards.held:
            if (state := held[shards.names[number]]) is not None:
                self.optimizer.state[shards.parts[number]] = state

    # -- the state: for a peer that re-joins, for checkpoints, and for the fingerprint --------

    def parameters_sha256(self) -> str:
        """Returns the hashes of the bytes of each layer's parameters, one after the other."""
        return "".join(map(sha256, parameters_by_layer(self.module)))

    def state(self) -> StageState:
        """Returns everything that the next steps depend on, without the optimizer's state of parameters if that is
        sharded. The tensors are the live ones: copy or send them before the next step. A step that is not settled
        counts as clean: if it is overturned, the state is of no use anyway.

        Raises StateError, which names what an optimizer or scheduler keeps that can't be sent.
        """
        tensors: dict[str, Tensor] = {}
        names = {id(p): n for n, p in self._named.items()}
        model = {n: encode(t, f"model.{n}", tensors) for n, t in [*self._named.items(), *self._buffers.items()]}
        states = {}
        for parameter, state in self.optimizer.state.items() if self.shards is None else ():
            if (name := names.get(id(parameter))) is None:
                raise StateError(f"{type(self.optimizer).__name__} keeps state that belongs to no parameter")
            states[name] = encode(state, f"optimizer.{name}", tensors)
        document = {
            "committed": self.committed,
            "post_validation": self._next_validation.to_json(),
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
        position = None if self.data is None else self.data.data_position(self.committed)
        if position is not None:
            document |= position.document
            tensors |= position.tensors
        return StageState(document, tensors)

    def share(self, writer: Writer) -> Share:
        """Returns a copy of the part of the state that this writer is to write. Raises StateError as `state`."""
        split = split_over_ranks(self.module) if writer.ranks > 1 else {}
        state, shards = self.state(), self.shards
        if shards is None:
            return share_of_state(state, writer, split)
        share = share_of_state(state, writer, split, [f"model.{name}" for name in shards.parameter_names])
        kept = self._put_segments(share, shards, writer, split)
        if kept or share.document:
            share.document["state"] = kept
        return share

    def _put_segments(self, share: Share, shards: Shards, writer: Writer, split: Split) -> dict[str, Any]:
        """Puts the segments that the writer writes into the share. Returns what the optimizer keeps, beside tensors, of
        parameters whose first segment is among them."""
        assert writer.primaries is not None
        kept, runs = dict[str, Any](), dict[str, list[tuple[Segment, list[Tensor]]]]()
        forms: dict[str, tuple[Sequence[int], Block | None]] = {}
        for number, segment in enumerate(shards.segments):
            name, part = shards.parameter_names[segment.parameter], shards.parts[number]
            if writer.primaries[number] != writer.peer or (writer.rank and not (name in split and part.numel())):
                continue
            if number not in shards.held:
                raise StateError(f"{shards.names[number]}: not held here")
            tensors = {f"model.{name}": part.detach()}
            document = encode(dict(self.optimizer.state.get(part, {})), f"optimizer.{name}", tensors)
            first = segment.start == 0 and not writer.rank
            if first and document["dict"]:
                kept[name] = document
            for key, tensor in tensors.items():
                if tensor.shape == part.shape:
                    forms[key] = split.get(name) or (self._named[name].shape, None)
                    so_far = runs.setdefault(key, [])
                    if so_far and so_far[-1][0].end == segment.start:
                        so_far[-1] = replace(so_far[-1][0], end=segment.end), [*so_far[-1][1], tensor]
                    else:
                        so_far.append((segment, [tensor]))
                elif first:
                    share.put(key, [tensor], tensor.shape)
        for key, found in runs.items():
            shape, block = forms[key]
            for run, parts in found:
                share.put(key, parts, shape, run.start, block)
        return kept

    @property
    def steps_apart(self) -> bool:
        """Whether no element's step depends on another element. So some may be stepped before others, and parts of the
        parameters may be put in place while it steps."""
        kind = type(self.optimizer)
        return kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE and not self.has_own_hooks

    @property
    def has_own_hooks(self) -> bool:
        """Whether a step calls hooks that may do anything: expect all to be stepped, or mix elements."""
        return not all(getattr(hook, "elementwise", False) for hook in compat.step_hooks(self.optimizer))

    @property
    def beside(self) -> list[Tensor]:
        """What own step hooks may change beside what is stepped: parameters that are not trained, such as a teacher's,
        and buffers that no forward changes."""
        if not self.has_own_hooks:
            return []
        saved = {id(t) for t in (*self._trained, *self.gradients.moving)}
        return [t for t in (*self._named.values(), *self._buffers.values()) if id(t) not in saved]

    @property
    def _leaves_gradients(self) -> bool:
        """Whether a step is known to leave the gradients as they are. SGD adds Nesterov's momentum to them, in the form
        that is usual on GPUs. What other optimizers or hooks do is not known."""
        return self.steps_apart and not any(group.get("nesterov") for group in self.optimizer.param_groups)

    @_changing
    def load_state(self, state: StageState, *, own: bool = False) -> None:
        """Takes over a state, wholly or not at all. Raises StateError when it is of another stage.

        The values of a tensor on the device "meta" come later: until then a parameter or buffer keeps its own values,
        and the optimizer's state is zero. If that state is sharded, `state` has all shards or none. own: the caller
        does not use the state any more, so the optimizer's state need not be copied, and each tensor is dropped once it
        is taken.
        """
        here, doc = self.state().document, state.document
        parameters = self._named
        targets = {**parameters, **self._buffers}
        try:
            for what, mine, theirs in (
                ("model", sorted(here["model"]), sorted(doc["model"])),
                ("optimizer", here["optimizer"], doc["optimizer"]),
                ("scheduler", (here["scheduler"] or [None])[0], (doc["scheduler"] or [None])[0]),
                *(
                    # A factory may order parameters in another way if there are other layers.
                    (f"parameter group {i}", sorted(mine["parameters"]), sorted(theirs["parameters"]))
                    for i, (mine, theirs) in enumerate(zip(here["groups"], doc["groups"], strict=True))
                ),
            ):
                if mine != theirs:
                    raise StateError(f"{what}: got {theirs}, expected {mine}")
            values = {n: decode(v, state.tensors, own=True) for n, v in doc["model"].items()}
            for name, value in values.items():
                want = targets[name]
                if value.shape != want.shape or value.dtype != want.dtype:
                    got = f"shape {tuple(value.shape)} of {value.dtype}"
                    raise StateError(f"{name}: {got} is of another model, expected {tuple(want.shape)} of {want.dtype}")
            states = {n: decode(v, state.tensors, parameters[n].device, own=own) for n, v in doc["state"].items()}
            device = next((p.device for p in parameters.values()), None)
            groups = [decode(g["options"], state.tensors, device) for g in doc["groups"]]
            scheduler = decode((doc["scheduler"] or [None, None])[1], state.tensors, device)
            committed, post_validation = (
                whole_number(doc["committed"]),
                PostValidation.from_json(doc["post_validation"]),
            )
            if self.data is not None:
                self.data.take_data_position(committed, doc, state.tensors)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise StateError(f"unreadable state: {type(error).__name__} {error}") from None
        to_come = {name for name in values if state.tensors[doc["model"][name]["tensor"]].is_meta}
        if own and isinstance(state.tensors, dict):
            state.tensors.clear()
        with torch.no_grad():
            for name in list(values):
                value = values.pop(name)
                if name not in to_come:
                    targets[name].copy_(value)
        self.optimizer.state.clear()
        for name in list(states):
            # If it is sharded, segments are copied, parameter by parameter.
            for parameter, kept in self._cut(parameters[name], states.pop(name)):
                self._put_state(parameter, kept)
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            _put_options(group, options)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(scheduler)
        # The job may be resumed in another precision.
        scale = (post_validation.loss_scale or LossScale()) if self._scales_loss else None
        self.post_validation = replace(post_validation, loss_scale=scale)
        self.committed, self.settled, self.slot = committed, True, Slot()
        self._scale()
        self._snapshot.forget()
        self._kept = None

    @_changing
    def give_up(self) -> None:
        """Frees all memory but that of the parameters. Another optimizer takes its place, and it takes no step any
        more.
        """
        self.optimizer.state.clear()
        for parameter in self._trained:
            parameter.grad = None
        self._snapshot, self._kept, self._kept_memory = _StepSnapshot(self), None, []
        self.gradients.give_up()

    def _put_state(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Sets the optimizer's state of a parameter, or of a segment, to what has come from a peer or a file."""
        self.optimizer.state[parameter] = {
            key: _laid_out_as(parameter, value) if isinstance(value, Tensor) else value for key, value in state.items()
        }

    def _cut(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> list[tuple[nn.Parameter, Mapping[str, Any]]]:
        """Returns the state of a parameter, or of each of its segments."""
        shards = self.shards
        if shards is None or id(parameter) not in shards.of_parameter:
            return [(parameter, state)]
        numbers = shards.of_parameter[id(parameter)]
        if len(numbers) == 1:
            return [(parameter, state)]

        def of(segment: Segment, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            whole = value.shape == parameter.shape
            return value.reshape(-1)[segment.start : segment.end].clone() if whole else value.clone()

        return [
            (shards.parts[k], {key: of(shards.segments[k], value) for key, value in state.items()}) for k in numbers
        ]


def _laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Returns a tensor of the parameter's shape in the same order in memory, as autograd and optimizers make it: a
    fused step takes the elements of a parameter, its gradient and its state as they lie there. Sums, messages and files
    have them in the order of the indices."""
    if parameter.is_contiguous() or tensor.shape != parameter.shape:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _finite(value: Any) -> float | None:
    """Returns a number, which may come as a tensor; None if it is not a finite number."""
    number = float(value) if isinstance(value, (int, float, Tensor)) else math.nan
    return number if math.isfinite(number) else None


def make_optimizer(factory: Callable[[Any], torch.optim.Optimizer], named: NamedParameters) -> torch.optim.Optimizer:
    """Returns the optimizer that the factory makes for a stage's parameters. A factory whose first argument is called
    `named_parameters` gets (name, parameter) pairs, with names `LAYER.NAME`."""

    def make(named: NamedParameters) -> torch.optim.Optimizer:
        return factory(named if takes_names(factory) else iter([parameter for _, parameter in named]))

    # No optimizer takes an empty list, but a stage may have no parameters; or none to train, where a factory may leave
    # all out. So it is given one: of two dimensions, since Muon takes no other, and with one element, since a factory
    # may divide by its sides. Its name has a layer, which a factory may look for.
    nothing = nn.Parameter(torch.zeros(1, 1))
    try:
        made = make(named or [("0.none", nothing)])
    except ValueError:
        if not named or any(parameter.requires_grad for _, parameter in named):
            raise
        made = make([*named, ("0.none", nothing)])
    if isinstance(made, torch.optim.Optimizer):
        made.state.pop(nothing, None)  # Adagrad has a state from the beginning
        for group in made.param_groups:
            # A scheduler writes to a learning rate that is a tensor, and all optimizers of this factory may have it.
            group |= {key: value.clone() for key, value in group.items() if isinstance(value, Tensor)}
    return made


def takes_names(factory: Callable[..., Any]) -> bool:
    """Says whether the first argument of an optimizer's factory is called `named_parameters`."""
    try:
        return next(iter(inspect.signature(factory).parameters), "") == "named_parameters"
    except (TypeError, ValueError):  # a builtin, which tells nothing
        return False


def stage_optimizer(
    workload: Workload,
    module: nn.Module,
    gradients: GradientSum,
    optimization: Optimization,
    pipelines: int | None = None,
    seed: int = 0,
) -> StageOptimizer:
    """Returns a stage's optimizer, made by the workload. A workload may have a `scheduler(optimizer)` beside its
    `optimizer`. pipelines: of the job, if its workers may share the optimizer's state. seed: the job's. Raises
    InputError."""
    optimizer = make_optimizer(workload.optimizer, list(module.named_parameters()))
    scheduler = getattr(workload, "scheduler", None)
    made = StageOptimizer(
        module,
        optimizer,
        gradients,
        scheduler(optimizer) if scheduler is not None else None,
        clips=optimization.clip_norm is not None,
        scales_loss=optimization.autocast == "fp16",
        pipelines=pipelines if optimization.sharding == "zero1" else None,
        seed=seed,
    )
    data: Any = workload if hasattr(workload, "data_position") else None
    made.data = data
    return made


@dataclass(frozen=True)
class _StepBucket:
    """Parameters that are stepped together. place: where they are among all that are stepped here. groups: those of
    each of the optimizer's groups; None: the optimizer steps all that it has."""

    place: slice
    parameters: list[nn.Parameter]
    groups: list[list[nn.Parameter]] | None

    @contextlib.contextmanager
    def alone_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within this context, the optimizer has no other parameters."""
        if self.groups is None:
            yield
            return
        whole = optimizer.param_groups
        parameters = [group["params"] for group in whole]
        for group, mine in zip(whole, self.groups, strict=True):
            group["params"] = mine
        optimizer.param_groups = [group for group in whole if group["params"]]
        try:
            yield
        finally:
            optimizer.param_groups = whole
            for group, all_of_it in zip(whole, parameters, strict=True):
                group["params"] = all_of_it


_ALIGNED = 16
"""Any tensor may begin at a multiple of so many bytes."""


@dataclass
class _ParameterBefore:
    """A parameter and its optimizer state as they were before a step. tensors: the live ones, first those of the state
    by `keys`, then the parameter. places: where their old values are. plain: what else the state held; None: there was
    no state."""

    tensors: list[Tensor]
    keys: list[str]
    places: list[Tensor]
    plain: dict[str, Any] | None = None


class _StepSnapshot:
    """What one step changes, as it was before. It lies in the memory in which the step's gradients were summed. What
    does not fit there lies in copies, whose memory is used again for the next step."""

    def __init__(self, stage: StageOptimizer) -> None:
        self._stage = stage
        self._valid = self._in_sums = False
        self._saved: dict[nn.Parameter, _ParameterBefore] = {}
        self._adopted: dict[nn.Parameter, _ParameterBefore] = {}
        self._buffers: list[Tensor] = []
        self._beside: list[tuple[Tensor, Tensor]] = []
        """What hooks of the step may change, and its old values."""
        self.before = PostValidation(), Slot(), CLEAN
        self._before: dict[nn.Parameter, _ParameterBefore] = {}
        """Where parameters are saved in a step. If tensors are the same as in the step before, so are their places."""
        self._grouped = False
        self._spare: list[Tensor] = []
        """The memory, as bytes, of the sums of segments that other workers step."""

    @property
    def valid(self) -> bool:
        return self._valid and (self._stage.gradients.lent or not self._in_sums)

    def begin(self) -> None:
        """Begins the snapshot of a step. Parameters are saved later, by `save`."""
        stage = self._stage
        moving = stage.gradients.moving
        if len(self._buffers) != len(moving):
            self._buffers = [t.clone() for t in moving]
        else:
            for mine, theirs in _alike(self._buffers, moving):
                compat.copy(mine, theirs)
        beside = stage.beside
        if [id(t) for t, _ in self._beside] != [id(t) for t in beside]:
            self._beside = [(t, torch.empty_like(t)) for t in beside]
        with torch.no_grad():
            for now, old in self._beside:
                old.copy_(now)
        self._groups = [
            copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in stage.optimizer.param_groups
        ]
        self._scheduler = copy.deepcopy(stage.scheduler.state_dict()) if stage.scheduler is not None else {}
        self.before = stage.post_validation, stage.slot, stage.validation
        self._before, self._saved, self._adopted = self._saved or self._before, {}, {}
        self._valid, self._in_sums = True, False
        shards = stage.shards
        if shards is not None and not self._grouped:
            self._grouped, self._before = True, {}
            others = (part for number, part in enumerate(shards.parts) if number not in shards.held)
            self._spare = [stage.gradients.memory_of(part) for part in others]
        # For all before any is stepped: glibc puts small objects that stay between the memory that a step takes for a
        # moment, which then is never used again for the same. That was up to 0.7 bytes a parameter.
        self._before = {parameter: self._prepared(parameter) for parameter in stage.stepped}

    def _prepared(self, parameter: nn.Parameter) -> _ParameterBefore:
        state: dict[str, Any] = self._stage.optimizer.state.get(parameter, {})
        keys, known = [k for k, v in state.items() if isinstance(v, Tensor)], self._before.get(parameter)
        if known is None or known.keys != keys or any(map(operator.is_not, map(state.get, keys), known.tensors)):
            tensors = [*(state[k] for k in keys), parameter.detach()]
            known = _ParameterBefore(tensors, keys, self._places(parameter, tensors))
        return known

    def save(self, parameters: Sequence[nn.Parameter]) -> None:
        """Saves these parameters right before they are stepped. Their gradients have been read from the sums, in whose
        memory they are saved."""
        states, mine, live = self._stage.optimizer.state, list[Tensor](), list[Tensor]()
        for parameter in parameters:
            known = self._before[parameter]
            self._stage.gradients.lend(parameter)
            known.plain = None
            if parameter in states:
                known.plain = copy.deepcopy({k: v for k, v in states[parameter].items() if k not in known.keys})
            self._saved[parameter] = known
            mine += known.places
            live += known.tensors
        self._in_sums = self._in_sums or bool(parameters)
        # Grouped by type and device: torch copies mixed lists slowly, one tensor at a time.
        for into, values in _alike(mine, live):
            compat.copy(into, values)

    def _places(self, parameter: nn.Parameter, tensors: Sequence[Tensor]) -> list[Tensor]:
        memory, at, out = self._stage.gradients.memory_of(parameter), 0, list[Tensor]()
        for tensor in tensors:
            each = tensor.element_size()
            size = tensor.numel() * each
            fits = at % each == 0 == memory.storage_offset() % each and at + size <= memory.numel()
            if fits and tensor.numel() > 1 and tensor.device == memory.device:
                out.append(memory[at : at + size].view(tensor.dtype).view(tensor.shape))
                at += size
            else:
                spare = self._from_spare(size) if tensor.numel() > 1 and tensor.device == memory.device else None
                out.append(torch.empty_like(tensor) if spare is None else spare.view(tensor.dtype).view(tensor.shape))
        return out

    def memory_beside(self, parameter: Tensor) -> Tensor:
        """Returns memory for a parameter's gradient, for as long as the snapshot is valid."""
        spare = self._from_spare(parameter.nbytes)
        if spare is None:
            return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return spare.view(parameter.dtype).view(parameter.shape)

    def regroup(self) -> None:
        """Notes that other segments are held from the next step on."""
        self._grouped = False

    def _from_spare(self, size: int) -> Tensor | None:
        for place, memory in enumerate(self._spare):
            if memory.numel() >= size:
                after = -(-size // _ALIGNED) * _ALIGNED
                self._spare[place] = memory[after:]
                return memory[:size]
        return None

    def adopt(self, parts: Sequence[_StepSnapshot]) -> None:
        """Takes over the snapshots of other optimizers, for the layers that this one has from them. They are of use
        only if all are valid for the same step."""
        stage = self._stage
        self._valid, self._in_sums = all(part.valid for part in parts), False
        self.before = parts[0].before
        if not self._valid:
            return
        # These stay in the memory of sums to which nothing is added any more. The next step uses its own sums.
        self._saved, self._before = {}, {}
        saved = {p: of for part in parts for p, of in (part._saved | part._adopted).items()}
        self._adopted = {p: saved[p] for p in stage._trained if p in saved}
        buffers: dict[int, Tensor] = {}
        for part in parts:
            buffers |= {id(b): kept for b, kept in zip(part._stage.gradients.moving, part._buffers, strict=True)}
        self._buffers = [buffers[id(b)] for b in stage.gradients.moving]
        mine = {id(t) for t in stage.beside}
        self._beside = [(t, old) for part in parts for t, old in part._beside if id(t) in mine]
        self._groups, self._scheduler = parts[0]._groups, parts[0]._scheduler

    def restore(self, *, buffers: bool) -> None:
        """Restores everything but the counts. buffers: also the moving buffers. Raises StateError."""
        stage = self._stage
        if not self.valid:
            raise StateError(f"no snapshot to go back to from {stage.committed} committed iterations")
        everything = self._saved | self._adopted
        with torch.no_grad():
            for parameter, saved in everything.items():
                parameter.copy_(saved.places[-1])
            for target, value in zip(stage.gradients.moving, self._buffers, strict=True) if buffers else ():
                target.copy_(value)
            for target, value in self._beside:
                target.copy_(value)
            for parameter, saved in everything.items():
                if saved.plain is None:
                    stage.optimizer.state.pop(parameter, None)
                    continue
                for tensor, value in zip(saved.tensors[:-1], saved.places, strict=False):
                    tensor.copy_(value)
                tensors = dict(zip(saved.keys, saved.tensors, strict=False))
                stage.optimizer.state[parameter] = tensors | copy.deepcopy(saved.plain)
        for group, options in zip(stage.optimizer.param_groups, self._groups, strict=True):
            _put_options(group, copy.deepcopy(options))
        if stage.scheduler is not None:
            stage.scheduler.load_state_dict(copy.deepcopy(self._scheduler))

    def undo(self) -> None:
        """Restores everything, with the counts."""
        stage = self._stage
        self.restore(buffers=True)
        stage.post_validation, stage.slot, stage.validation = self.before
        stage.settled = True
        stage.committed -= 1
        self._valid = False

    def forget_one(self, parameter: nn.Parameter) -> None:
        """Forgets a parameter, which is not undone here any more."""
        for kept in (self._saved, self._before, self._adopted):
            kept.pop(parameter, None)

    def forget(self) -> None:
        """Forgets everything: nothing can be undone after it."""
        self._valid = False
        self._saved, self._before, self._adopted = {}, {}, {}


def _put_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Sets a parameter group's options; a tensor (a capturable learning rate) stays the same object."""
    for key, value in options.items():
        current = group.get(key)
        if isinstance(current, Tensor) and isinstance(value, Tensor) and current.shape == value.shape:
            current.copy_(value)
        else:
            group[key] = value


def _alike(a: list[Tensor], b: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Returns the two lists as pairs of lists, of one type and device each."""
    out: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for x, y in zip(a, b, strict=True):
        mine, theirs = out.setdefault((x.dtype, x.device), ([], []))
        mine.append(x)
        theirs.append(y)
    return list(out.values())


def _required(step: Any) -> bool:
    """Says whether this `step` method needs an argument."""
    parameters = list(inspect.signature(step).parameters.values())[1:]
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        for p in parameters
    )


# -- a moving average of the parameters, beside those that are trained --------------------------


@dataclass(frozen=True)
class ExponentialMovingAverage:
    """An optimizer's factory that also keeps, of every parameter that is trained, average = decay * average + (1 -
    decay) * parameter, from the first step on. `result.state_dict(layer, averaged=True)` has them in the end.

        optimizer=ExponentialMovingAverage(partial(torch.optim.AdamW, lr=1e-3), decay=0.999)

    The average is part of the optimizer's state, so it goes wherever that goes: into checkpoints, to a worker that
    joins, along with layers that move; and a step that is undone is undone in it. Raises InputError.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer]
    decay: float = 0.999

    def __post_init__(self) -> None:
        if not callable(self.optimizer):
            raise InputError("optimizer", self.optimizer, "something that can be called")
        if not isinstance(self.decay, float) or not 0 <= self.decay < 1:
            raise InputError("decay", self.decay, "a number from 0 to below 1")

    def __call__(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        made = make_optimizer(self.optimizer, named_parameters)
        if isinstance(made, torch.optim.Optimizer):
            made.register_step_post_hook(self._average)
        return made

    @torch.no_grad()
    def _average(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # A parameter that is not stepped gets no average yet: many optimizers would take a state that is not
                # empty for one of their own.
                if parameter.grad is None:
                    continue
                state: dict[str, Any] = optimizer.state[parameter]
                average: Tensor | None = state.get(AVERAGE)
                if average is None:
                    state[AVERAGE] = parameter.detach().clone()
                else:
                    average.lerp_(parameter, 1 - self.decay)

    _average.elementwise = True  # type: ignore[attr-defined]


def keeps_averages(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is the optimizer of an ExponentialMovingAverage. It has averages from its first step on."""
    methods = (getattr(hook, "__func__", None) for hook in compat.step_hooks(optimizer))
    return any(method is ExponentialMovingAverage._average for method in methods)
