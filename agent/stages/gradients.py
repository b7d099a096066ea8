"""Sums of gradients over the micro-batches of an iteration, and over the workers of a stage.

Floating-point addition is not associative: the same micro-batches summed in another order (which
is what re-routing does) change about half of all gradient elements in the last bit. `GradientSum`
rounds every term once to a fixed grid of 2**-50 and adds it as a 64-bit integer; integer addition
is associative, so any order, any split over workers and any all-reduce algorithm give the same
bits. `FastSum` adds floats as they come: cheaper, and another order shows in the last bits.

Why integers: fp64 accumulators cost more (tests/benchmarks/bench_sums.py) and are not order-proof when
terms differ by more than 2**29 / terms; fp64 rounded to a grid costs as much, and has 10 bits less
range. An all-reduce moves twice the bytes of fp32 in all three.

Range: a term must stay below 2**62 / terms on the grid, that is 4096 / terms (the loss of each
micro-batch, and with it every gradient, is already divided by the number of micro-batches, so this
is a gradient element of about 4096 in the usual scale, MOST_GRADIENT). A larger one counts as non-finite: an
iteration with a spike of that size is not stepped, just as one with a NaN. A scale per parameter
would widen this only for jobs whose training is lost anyway, so there is none. A loss may have 2**40 times as much.

On a GPU a term out of range is counted there, and nobody waits for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import CPU_CHUNK, Mode
from openrecycle.agent.stages.kernels import add_in_torch, fused_add, scale_into, worth_loading
from openrecycle.planner.plans.schedule import MicroBatch

GRID_BITS = 50
_SCALE = 2.0**GRID_BITS
MOST_GRADIENT = 2.0 ** (62 - GRID_BITS)
"""An element of a gradient that is as large counts as not finite."""
# Elements handled at a time: large enough to amortise the calls, small enough to stay in a core's cache; and on other
# devices, where that matters less, to need little memory beside the sums.
_CHUNK, _CHUNK_THERE = CPU_CHUNK, 1 << 24
# The kernel takes its scale in fp32.
_MOST_FUSED = 2.0**100
BUCKET_BYTES = 25 << 20
"""Of sums that are reduced at a time, as in DistributedDataParallel."""
# Of each parameter, from its beginning. Below torch's grain of intra-op parallelism, so that a norm does not depend on
# the thread count; and on devices that have no such threads, few kernels.
_NORM_CHUNK, _NORM_CHUNK_THERE = 1 << 15, 1 << 20
# Changes of buffers are not divided by the number of micro-batches, and statistics may be large: they give
# up 12 bits of resolution for as many of range.
_CHANGE_SCALE = 2.0**-12
MOST_CHANGE = MOST_GRADIENT / _CHANGE_SCALE
"""What an iteration's micro-batches may add to an element of a buffer, likewise."""
# A loss may be large though no gradient is: one of as much as the grid takes, or more, is summed apart, coarser.
_LARGE_LOSS_SCALE = 2.0**-40
_WEIGHT, _LARGE_LOSS, _LOSS, _REJECTED = -4, -3, -2, -1
TRAILING = 4
"""Elements of a sum that follow those of the tensors and their counts."""
# Weights, such as counts of tokens, are summed on a grid of 2**-20; where they are small numbers, on one of about as
# much of the usual weight.
_WEIGHT_SCALE = 2.0 ** (20 - GRID_BITS)


class Bucket(NamedTuple):
    """sums: a part of a GradientSum's buffer. tensors: the identities of the parameters whose sums it holds."""

    sums: Tensor
    tensors: frozenset[int]


class GradientSum:
    """Accumulates the gradients, and the loss, of one stage over an iteration's micro-batches; bitwise
    the same in any order.

    buffer: what the peers of a stage all-reduce: one element per parameter element, one per element
    of a moving buffer (see agent.stages.backward), one count per tensor of the terms added to it, the
    micro-batches' weights, the loss, and the count of rejected terms. terms: how many terms are added to a tensor at
    most per iteration, over all workers of the stage. settled: the micro-batches whose whole
    contribution is in this worker's sum. device: where the sum is when nothing is trained. nominal: the sum of weights
    for which terms are scaled; they are put right when the sum of weights is known. None: nothing is weighted.
    bucket_bytes: see `buckets`.

    Between a step and the next term the sums of parameters are of no use: their memory is lent (`lend`).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        terms: int,
        buffers: Iterable[Tensor] = (),
        device: torch.device | None = None,
        nominal: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._nominal, self._bucket_bytes = nominal, bucket_bytes
        self.parameters = [p for p in parameters if p.requires_grad]
        self.moving = list(buffers)
        tensors: list[Tensor] = [*self.parameters, *self.moving]
        bounds = list(pairwise(accumulate((t.numel() for t in tensors), initial=0)))
        size = bounds[-1][1] if bounds else 0
        device = tensors[0].device if tensors else device or torch.device("cpu")
        self._buffer = torch.zeros(size + len(tensors) + TRAILING, dtype=self._dtype_for(tensors), device=device)
        self._sums = {id(t): self._buffer[a:b] for t, (a, b) in zip(tensors, bounds, strict=True)}
        self._shaped = {id(t): self._sums[id(t)].view(t.shape) for t in tensors}
        self._counts = self._buffer[size : size + len(tensors)]
        self._counts_from = size
        self._of_parameters = bounds[len(self.parameters) - 1][1] if self.parameters else 0
        self.lent = False
        """Is the memory of the parameters' sums somebody else's? Until the next term, or look at `buffer`."""
        self._let_go: Callable[[], None] | None = None
        """Waits until nobody else writes to the buffer any more, which holds nothing then: see `clear`."""
        # Not in the buffer yet: one addition for all tensors costs as much as one for each.
        self._uncounted = dict.fromkeys(map(id, tensors), 0)
        self._counted_at = {id(t): place for place, t in enumerate(tensors)}
        self._limit = 2.0**62 / max(1, terms)
        usual = 1.0 if nominal is None else min(1.0, max(nominal / max(1, terms), 2.0**-900))
        self._weight_scale = _WEIGHT_SCALE * 2.0 ** -math.floor(math.log2(usual))
        self._chunk = _CHUNK if device.type == "cpu" else _CHUNK_THERE
        if device.type == "cuda" and self._buffer.dtype == torch.int64:
            fused_add(self._buffer.device)  # here, before anything is received: it is loaded, which waits for the GPU
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._gradients: dict[torch.dtype, Tensor] = {}
        self._temporaries: dict[tuple[torch.dtype, int], Tensor] = {}
        self.settled: set[MicroBatch] = set()
        self.loss_scale = 1.0
        """A power of two that the gradients come multiplied by; the loss and changes of buffers do not."""
        self._rejected_after: list[tuple[MicroBatch, Tensor]] = []
        """The count of rejected terms after each micro-batch, in order; read only where it matters."""
        self._read: list[float] | None = None
        """What follows the sums of the tensors, where it is known on the host: each look at a device is a wait."""

    @property
    def buffer(self) -> Tensor:
        """For whoever adds to it right away."""
        self._take_back()
        self._count()
        self._read = None
        return self._buffer

    def _count(self) -> None:
        if any(self._uncounted.values()):
            counts = torch.tensor(list(self._uncounted.values()), dtype=self._buffer.dtype)
            self._counts.add_(counts.to(self._buffer.device, non_blocking=True))
            self._uncounted = dict.fromkeys(self._uncounted, 0)
            self._read = None

    @property
    def _behind(self) -> list[float]:
        """Counts, weight, loss and rejected terms, as they are in the buffer."""
        self._count()
        if self._read is None:
            self._read = self._buffer[self._counts_from :].tolist()
        return self._read

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def lend(self, parameter: Tensor) -> Tensor:
        """The memory of a parameter's sum, in bytes, once that has been read. It is taken back, and zero, with the next
        term of any parameter: see `lent`."""
        self.lent = True
        return self.memory_of(parameter)

    def memory_of(self, parameter: Tensor) -> Tensor:
        """The same, for when it is lent."""
        return self._sums[id(parameter)].view(torch.uint8)

    def buckets(self) -> list[Bucket]:
        """Parts of the buffer that are of use apart from each other, in the order in which a backward completes them:
        of at least `bucket_bytes` each but the last of parameters, and at the end what is of no parameter. One with
        everything, where two would be no use."""
        size, start, ends = self._buffer.element_size(), self._of_parameters, [self._of_parameters]
        tensors: list[set[int]] = [set()]
        for parameter in reversed(self.parameters):
            tensors[-1].add(id(parameter))
            start -= parameter.numel()
            if start and (ends[-1] - start) * size >= self._bucket_bytes:
                ends.append(start)
                tensors.append(set())
        if len(ends) == 1:
            return [Bucket(self._buffer, frozenset())]
        found = [
            Bucket(self._buffer[start:end], frozenset(these))
            for end, start, these in zip(ends, [*ends[1:], 0], tensors, strict=True)
        ]
        return [*found, Bucket(self._buffer[self._of_parameters :], frozenset())]

    def _take_back(self) -> None:
        if self._let_go is not None:
            let_go, self._let_go = self._let_go, None
            let_go()
            self._buffer.zero_()
            self.lent = False
        if self.lent:
            self.lent = False
            self._buffer[: self._of_parameters].zero_()

    def add_segment(self, segment: Tensor, parameter: Tensor, start: int) -> None:
        """From here on `segment` stands for the elements of `parameter` from `start`, as many as it has: its sum is
        theirs, and what is asked about parameters can be asked about it."""
        own = self._sums[id(parameter)][start : start + segment.numel()]
        self._sums[id(segment)], self._shaped[id(segment)] = own, own.view(segment.shape)
        self._counted_at[id(segment)] = self._counted_at[id(parameter)]

    def place_of(self, parameter: Tensor) -> range:
        """The elements of `buffer` that are its sum."""
        own = self._sums[id(parameter)]
        return range(own.storage_offset(), own.storage_offset() + own.numel())

    @property
    def norm_chunk(self) -> int:
        """So many elements of a parameter are squared and summed at a time."""
        return _NORM_CHUNK if self._buffer.device.type == "cpu" else _NORM_CHUNK_THERE

    @property
    def beside_parameters(self) -> Tensor:
        """The part of `buffer` that is no parameter's sum."""
        return self.buffer[self._of_parameters :]

    def add(self, tensor: Tensor, term: Tensor) -> None:
        """Adds one micro-batch's gradient of a parameter (same shape)."""
        self._take_back()
        self._add(self._sums[id(tensor)], term.detach().reshape(-1), 1 / self.loss_scale)
        self._uncounted[id(tensor)] += 1

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        """The same of left @ right, which may be of a lower type than the parameter."""
        if left.dim() != 2 or right.dim() != 2:
            self.add(tensor, (left @ right).to(tensor.dtype))
            return
        rows, columns, dtype = left.shape[0], right.shape[1], left.dtype
        product = self._gradient_memory(dtype, rows * columns).view(rows, columns)
        self.add(tensor, torch.mm(left.detach(), right.detach(), out=product).to(tensor.dtype))

    def add_change(self, buffer: Tensor, change: Tensor) -> None:
        """Adds what one micro-batch's forward added to a moving buffer (same shape, fp64)."""
        self.add(buffer, change * (_CHANGE_SCALE * self.loss_scale))

    def add_loss(self, loss: Tensor) -> None:
        """Adds one micro-batch's (already scaled) loss, a scalar."""
        self._take_back()
        self._read = None
        term = loss.detach().reshape(-1)
        large = term.abs() >= self._limit / _SCALE
        self._add(self._buffer[_LOSS:_REJECTED], torch.where(large, 0.0, term))
        self._add(self._buffer[_LARGE_LOSS:_LOSS], torch.where(large, term, 0.0), _LARGE_LOSS_SCALE)

    def add_weight(self, weight: Tensor) -> None:
        """Adds one micro-batch's weight, a finite scalar of at least 0."""
        self._take_back()
        self._add(self._buffer[_WEIGHT:_LARGE_LOSS], weight.detach().to(torch.float64).reshape(-1), self._weight_scale)

    def settle(self, key: MicroBatch) -> None:
        """Everything of a micro-batch is in the sum."""
        self.settled.add(key)
        self._rejected_after.append((key, self._buffer[_REJECTED].clone()))

    def rejecting(self) -> list[MicroBatch]:
        """Micro-batches of this worker with a term that was rejected."""
        if not self._rejected_after:
            return []
        counts = [0, *torch.stack([after for _, after in self._rejected_after]).tolist()]
        return [key for (key, _), (a, b) in zip(self._rejected_after, pairwise(counts), strict=True) if a != b]

    @property
    def rejected(self) -> int:
        """Terms that were NaN, infinite or too large; where it is not 0 the sums mean nothing."""
        return self.rejected_terms

    @property
    def loss(self) -> float:
        large = self._number(self._behind[_LARGE_LOSS]) / _LARGE_LOSS_SCALE
        return (self._number(self._behind[_LOSS]) + large) * self.coefficient

    @property
    def coefficient(self) -> float:
        """What makes sums over weighted micro-batches a mean."""
        if self._nominal is None:
            return 1.0
        weight = self._number(self._behind[_WEIGHT]) / self._weight_scale
        return self._nominal / weight if weight > 0 else 1.0

    def squared_norms(self, layers: Iterable[Sequence[nn.Parameter]]) -> tuple[float, ...]:
        """Of each layer with these parameters the squared L2 norm of its summed gradients, in fp64; the same whatever
        else is in the sum.

        Means nothing where terms were rejected.
        """
        layers = list(layers)
        parts = self.norm_parts([p for parameters in layers for p in parameters]).tolist()
        counts = [sum(-(-p.numel() // self.norm_chunk) for p in parameters) for parameters in layers]
        ends = accumulate(counts, initial=0)
        return tuple(self.squared_norm(parts[a:b]) for a, b in pairwise(ends))

    def norm_parts(self, parameters: Sequence[Tensor]) -> Tensor:
        """What norms are made of: of every `norm_chunk` elements of each of these, from its beginning, the squares'
        sum (fp64)."""
        chunks = [chunk for p in parameters for chunk in _chunks(self._sums[id(p)], self.norm_chunk) if chunk.numel()]
        if not chunks:
            return torch.zeros(0, dtype=torch.float64, device=self._buffer.device)
        return torch.stack([self._in_scratch(chunk).square_().sum() for chunk in chunks])

    def squared_norm(self, parts: Sequence[float]) -> float:
        """Of the gradients with these `norm_parts`. Rounded once, so that their order does not matter."""
        try:
            return self.coefficient**2 * math.fsum(parts)
        except OverflowError:  # each of them is finite
            return math.inf

    def finite(self, parameters: Sequence[Tensor]) -> bool:
        """Are the sums of these so, and all that are of no parameter? Those of GradientSum always are."""
        return True

    @property
    def rejected_terms(self) -> int:
        """Those that were left out, or whose sum is not finite, as far as they were seen when they were added."""
        return int(self._behind[_REJECTED])

    def part(self, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of the buffer that a sum of these parameters and moving buffers alone, in this order, would have."""
        self._take_back()
        index = self._counted_at
        self._count()
        counts = self._counts
        parts = [*(self._sums[id(t)] for t in tensors), *(counts[index[id(t)]].view(1) for t in tensors)]
        return torch.cat([*parts, self._buffer[-TRAILING:]]).to(self._dtype_for(list(tensors)))

    def part_like(self, tensors: Sequence[Tensor]) -> Tensor:
        """On the CPU, a tensor that takes the `part` of tensors of these shapes."""
        size = sum(t.numel() for t in tensors) + len(tensors) + TRAILING
        return torch.empty(size, dtype=self._dtype_for(list(tensors)))

    def put(self, tensor: Tensor, total: Tensor) -> None:
        """Sets a parameter's sum, and its count, which comes last."""
        self._take_back()
        self._sums[id(tensor)].copy_(total[:-1])
        self.buffer[self._counts_from + self._counted_at[id(tensor)]].copy_(total[-1])

    def plus(self, total: Tensor, part: Tensor) -> Tensor:
        """Of two sums, each in range, over other tensors of the same shape. Where theirs is not, that is counted as a
        rejected term."""
        both = total + part
        wrapped = ((total ^ both) & (part ^ both)).lt_(0).any()
        self._read = None
        self._buffer[_REJECTED] += wrapped.to(self._buffer.dtype)
        return both

    def write_gradients(
        self, wanted: Sequence[nn.Parameter] | None = None, memory: Sequence[Tensor] | None = None
    ) -> None:
        """Sets `.grad` of every parameter, or those that are `wanted`, to the sum, rounded to its type; None where no
        micro-batch used it. memory: for each of them, where; else it is new."""
        coefficient, counts = self.coefficient, self._counted()
        wanted = self.parameters if wanted is None else wanted
        memory = memory or [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in wanted]
        for parameter, gradient in zip(wanted, memory, strict=True):
            count = counts[self._counted_at[id(parameter)]]
            if count:
                self._round(self._sums[id(parameter)], gradient.view(-1), coefficient)
            parameter.grad = gradient if count else None

    def scratch_for(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Memory for their gradients, until the next call or term: what is given back to the system's allocator each
        time, it finds no use for."""
        sizes = Counter[torch.dtype]()
        for parameter in parameters:
            sizes[parameter.dtype] += parameter.numel()
        memory, used, out = {d: self._gradient_memory(d, n) for d, n in sizes.items()}, Counter[torch.dtype](), []
        for parameter in parameters:
            at = used[parameter.dtype]
            used[parameter.dtype] = end = at + parameter.numel()
            out.append(memory[parameter.dtype][at:end].view(parameter.shape))
        return out

    def _gradient_memory(self, dtype: torch.dtype, size: int) -> Tensor:
        """For gradients that are read before the next ones are made."""
        there = self._gradients.get(dtype)
        if there is None or there.numel() < size:
            there = self._gradients[dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return there[:size]

    def write_buffers(self) -> None:
        """Moves every moving buffer by the mean change over the micro-batches."""
        for tensor, count in zip(self.moving, self._counted()[len(self.parameters) :], strict=True):
            if count:
                mean = self._float64(self._shaped[id(tensor)]) / (count * _CHANGE_SCALE)
                moved = tensor.to(torch.float64) + mean
                if not tensor.is_floating_point():  # of which fp64 has not all
                    moved = torch.where(mean.eq(0), tensor, moved.round_().to(tensor.dtype))
                tensor.copy_(moved)

    def clear(self, let_go: Callable[[], None] | None = None) -> None:
        """All sums are 0. What is lent stays so. let_go: returns once others, who still write to the buffer, have
        ended; it is called with the next term, so that nobody waits for them now."""
        if let_go is not None:
            self._let_go = let_go
        if self._let_go is None:
            self._buffer[self._of_parameters if self.lent else 0 :].zero_()
        self._uncounted = dict.fromkeys(self._uncounted, 0)
        self._read = None
        self.settled.clear()
        self._rejected_after.clear()

    def give_up(self) -> None:
        """Of all memory: nothing is summed here any more."""
        self._let_go, self.lent = None, False
        self._buffer = self._buffer.new_zeros(TRAILING)
        self._counts, self._counts_from, self._of_parameters = self._buffer[:0], 0, 0
        for kept in (self._sums, self._shaped, self._scratch, self._gradients, self._temporaries):
            kept.clear()
        self.clear()

    def _counted(self) -> list[int]:
        """Terms per tensor."""
        return list(map(int, self._behind[:-TRAILING]))

    # -- what depends on the form of the sum --------------------------------------------------

    def _dtype_for(self, tensors: list[Tensor]) -> torch.dtype:
        return torch.int64

    def _add(self, target: Tensor, term: Tensor, factor: float = 1.0) -> None:
        self._read = None  # a term may be rejected
        wide, scale = torch.float64 if term.dtype == torch.float64 else torch.float32, _SCALE * factor
        fused = fused_add(target.device) if worth_loading(target.device, target.numel()) else None
        if fused is not None and scale < _MOST_FUSED:
            fused(target, term, self._buffer[_REJECTED], scale, self._limit)
            return
        for into, part in zip(_chunks(target, self._chunk), _chunks(term, self._chunk), strict=True):
            scaled = self._temporary(wide, part.numel())
            if part.device.type != "cpu":
                whole = self._temporary(torch.int64, part.numel())
                add_in_torch(into, part, self._buffer[_REJECTED], scale, self._limit, scaled, whole)
                continue
            scale_into(scaled, part, scale)
            low, high = torch.aminmax(scaled)
            # Written so that NaN fails it too.
            if not (-self._limit < low.item() and high.item() < self._limit):
                self._buffer[_REJECTED] += 1
                return
            into.add_(self._temporary(torch.int64, part.numel()).copy_(scaled.round_()))

    def _float64(self, part: Tensor) -> Tensor:
        """A part of the buffer as numbers, in a tensor of its own."""
        return part.to(torch.float64).mul_(1 / _SCALE)

    def _in_scratch(self, part: Tensor) -> Tensor:
        """The same, in memory that the next call uses again."""
        return self._temporary(torch.float64, part.numel()).copy_(part).mul_(1 / _SCALE)

    def _number(self, element: float) -> float:
        """An element of the buffer as a number."""
        return float(element) * (1 / _SCALE)

    def _round(self, part: Tensor, into: Tensor, coefficient: float) -> None:
        """A part of the buffer times a number, in the type of `into`."""
        for some, target in zip(_chunks(part, self._chunk), _chunks(into, self._chunk), strict=True):
            exact = self._in_scratch(some)
            target.copy_(exact if coefficient == 1.0 else exact.mul_(coefficient))

    def _temporary(self, dtype: torch.dtype, size: int) -> Tensor:
        """Scratch memory that the next call gives out again."""
        view = self._temporaries.get((dtype, size))
        if view is None:
            scratch = self._scratch.get(dtype)
            if scratch is None or scratch.numel() < size:
                self._temporaries.clear()  # they may show the smaller scratch
                scratch = self._scratch[dtype] = torch.empty(size, dtype=dtype, device=self._buffer.device)
            view = self._temporaries[dtype, size] = scratch[:size]
        return view


def _chunks(flat: Tensor, size: int) -> Sequence[Tensor]:
    n = flat.numel()
    return (flat,) if 0 < n <= size else [flat[start : start + size] for start in range(0, n, size)]


class FastSum(GradientSum):
    """Float sums, in fp32 (fp64 for parameters of that type), in the order in which terms come.

    Two runs that differ in routing differ in the last bits. Measured on the demo GPT over 100
    iterations, against GradientSum: losses differ by 1e-7 (relative), parameters by 1e-6 (relative L2
    norm, 40% of the elements). NaN and infinities in gradients are found once per iteration, in the reduced
    sum; in losses with each micro-batch.
    """

    @property
    def rejected(self) -> int:
        """1 where any sum is NaN or infinite, or lacks a loss that was, else 0."""
        return int(bool(self.rejected_terms) or not math.isfinite(self._buffer.sum().item()))

    def finite(self, parameters: Sequence[Tensor]) -> bool:
        sums = [self._sums[id(p)].sum() for p in parameters]
        return math.isfinite(torch.stack([*sums, self.beside_parameters.sum()]).sum().item())

    def add_loss(self, loss: Tensor) -> None:
        self._take_back()
        term = loss.detach().reshape(-1)
        fits = torch.isfinite(term)
        self._add(self._buffer[_LOSS:_REJECTED], torch.where(fits, term, 0.0))
        self._buffer[_REJECTED:].add_(~fits)

    def add(self, tensor: Tensor, term: Tensor) -> None:
        self._take_back()
        self._shaped[id(tensor)].add_(term.detach(), alpha=1 / self.loss_scale)
        self._uncounted[id(tensor)] += 1

    def plus(self, total: Tensor, part: Tensor) -> Tensor:
        return total + part

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        if left.dtype == right.dtype == self._buffer.dtype:
            # Summed while it is computed: nothing is written only to be read again.
            self._take_back()
            self._shaped[id(tensor)].addmm_(left.detach(), right.detach(), alpha=1 / self.loss_scale)
            self._uncounted[id(tensor)] += 1
        else:
            super().add_product(tensor, left, right)

    def _dtype_for(self, tensors: list[Tensor]) -> torch.dtype:
        return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32

    def _add(self, target: Tensor, term: Tensor, factor: float = 1.0) -> None:
        self._read = None
        target.add_(term, alpha=factor)

    def _float64(self, part: Tensor) -> Tensor:
        return part.to(torch.float64, copy=True)

    def _in_scratch(self, part: Tensor) -> Tensor:
        return self._temporary(torch.float64, part.numel()).copy_(part)

    def _number(self, element: float) -> float:
        return element

    def _round(self, part: Tensor, into: Tensor, coefficient: float) -> None:
        if coefficient == 1.0:
            into.copy_(part)
            return
        for some, target in zip(_chunks(part, self._chunk), _chunks(into, self._chunk), strict=True):
            target.copy_(torch.mul(some, coefficient, out=self._temporary(some.dtype, some.numel())))


SUM_OF: Mapping[Mode, type[GradientSum]] = {"deterministic": GradientSum, "fast": FastSum}
"""What an optimization's mode asks for."""
