"""Sums of gradients over the micro-batches of an iteration, and over the workers of a stage.

Floating-point addition is not associative: the same micro-batches summed in another order (which
is what re-routing does) change about half of all gradient elements in the last bit. `GradientSum`
rounds every term once to a fixed grid of 2**-50 and adds it as a 64-bit integer; integer addition
is associative, so any order, any split over workers and any all-reduce algorithm give the same
bits. `FastSum` adds floats as they come: cheaper, and another order shows in the last bits.

Why integers: of the forms measured (tests/benchmarks/bench_sums.py; one thread, 5 M fp32 elements), one
addition costs 5 to 8 times a plain fp32 one on the int64 grid, 10 to 20 times with fp64
accumulators, and as much as int64 in fp64 rounded to a grid. fp64 as such is not order-proof when
terms differ by more than 2**29 / terms; fp64 on a grid has 10 bits less range. An all-reduce moves
twice the bytes of fp32 and takes 1.5 to 1.7 times as long, in all three.

Range: a term must stay below 2**62 / terms on the grid, that is 4096 / terms (the loss of each
micro-batch, and with it every gradient, is already divided by the number of micro-batches, so this
is a gradient element of about 4096 in the usual scale). A larger one counts as non-finite: an
iteration with a spike of that size is not stepped, just as one with a NaN. A scale per parameter
would widen this only for jobs whose training is lost anyway, so there is none.

Measured on CPUs only. On another device a term out of range is counted there, and nobody waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from openrecycle.agent.options import Mode

GRID_BITS = 50
_SCALE = 2.0**GRID_BITS
# Elements handled at a time: large enough to amortise the calls, small enough to stay in a core's cache.
_CHUNK = 1 << 17
# Below torch's grain of intra-op parallelism, so that a norm does not depend on the thread count.
_NORM_CHUNK = 1 << 15
# Changes of buffers are not divided by the number of micro-batches, and statistics may be large: they give
# up 12 bits of resolution for as many of range (2**24 / terms).
_CHANGE_SCALE = 2.0**-12
_LOSS, _REJECTED = -2, -1

MicroBatch = tuple[int, int]
"""(home pipeline, micro-batch index inside it)."""


class GradientSum:
    """Accumulates the gradients, and the loss, of one stage over an iteration's micro-batches; bitwise
    the same in any order.

    buffer: what the peers of a stage all-reduce: one element per parameter element, one per element
    of a moving buffer (see agent.backward.buffers), one count per tensor of the terms added to it, the
    loss, and the count of rejected terms. terms: how many terms are added to a tensor at most
    per iteration, over all workers of the stage. settled: the micro-batches whose whole
    contribution is in this worker's sum. device: where the sum is when nothing is trained.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        terms: int,
        buffers: Iterable[Tensor] = (),
        device: torch.device | None = None,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.moving = list(buffers)
        tensors: list[Tensor] = [*self.parameters, *self.moving]
        bounds = list(pairwise(accumulate((t.numel() for t in tensors), initial=0)))
        size = bounds[-1][1] if bounds else 0
        device = tensors[0].device if tensors else device or torch.device("cpu")
        self._buffer = torch.zeros(size + len(tensors) + 2, dtype=self._dtype_for(tensors), device=device)
        self._sums = {id(t): self._buffer[a:b] for t, (a, b) in zip(tensors, bounds, strict=True)}
        self._shaped = {id(t): self._sums[id(t)].view(t.shape) for t in tensors}
        self._counts = self._buffer[size : size + len(tensors)]
        self._counts_from = size
        # Not in the buffer yet: one addition for all tensors costs as much as one for each.
        self._uncounted = dict.fromkeys(map(id, tensors), 0)
        self._bounds = {id(t): bound for t, bound in zip(tensors, bounds, strict=True)}
        self._limit = 2.0**62 / max(1, terms)
        self._chunk = _CHUNK if device.type == "cpu" else max(1, size)
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._temporaries: dict[tuple[torch.dtype, int], Tensor] = {}
        self.settled: set[MicroBatch] = set()
        self._rejected_after: list[tuple[MicroBatch, Tensor]] = []
        """The count of rejected terms after each micro-batch, in order; read only where it matters."""

    @property
    def buffer(self) -> Tensor:
        if any(self._uncounted.values()):
            counts = torch.tensor(list(self._uncounted.values()), dtype=self._buffer.dtype)
            self._counts.add_(counts.to(self._buffer.device))
            self._uncounted = dict.fromkeys(self._uncounted, 0)
        return self._buffer

    def add(self, tensor: Tensor, term: Tensor) -> None:
        """Adds one micro-batch's gradient of a parameter (same shape)."""
        self._add(self._sums[id(tensor)], term.detach().reshape(-1))
        self._uncounted[id(tensor)] += 1

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        """The same of left @ right, which may be of a lower type than the parameter."""
        self.add(tensor, (left @ right).to(tensor.dtype))

    def add_change(self, buffer: Tensor, change: Tensor) -> None:
        """Adds what one micro-batch's forward added to a moving buffer (same shape, fp64)."""
        self.add(buffer, change * _CHANGE_SCALE)

    def add_loss(self, loss: Tensor) -> None:
        """Adds one micro-batch's (already scaled) loss, a scalar."""
        self._add(self._buffer[_LOSS:_REJECTED], loss.detach().reshape(-1))

    def settle(self, key: MicroBatch) -> None:
        """Everything of a micro-batch is in the sum."""
        self.settled.add(key)
        self._rejected_after.append((key, self._buffer[_REJECTED].clone()))

    def rejecting(self) -> list[MicroBatch]:
        """Micro-batches of this worker with a term that was rejected."""
        counts = [0, *(int(after) for _, after in self._rejected_after)]
        return [key for (key, _), (a, b) in zip(self._rejected_after, pairwise(counts), strict=True) if a != b]

    @property
    def rejected(self) -> int:
        """Terms that were NaN, infinite or too large; where it is not 0 the sums mean nothing."""
        return int(self._buffer[_REJECTED])

    @property
    def loss(self) -> float:
        return int(self._buffer[_LOSS]) / _SCALE

    def squared_norm(self, parameters: Sequence[nn.Parameter]) -> float:
        """Squared L2 norm of the summed gradients of these, in fp64; the same whatever else is in the sum.

        Means nothing where terms were rejected.
        """
        runs: list[list[int]] = []
        for start, end in (self._bounds[id(p)] for p in parameters):
            if runs and runs[-1][1] == start:
                runs[-1][1] = end
            else:
                runs.append([start, end])
        chunks = (chunk for a, b in runs for chunk in _chunks(self._buffer[a:b], _NORM_CHUNK))
        parts = [self._float64(chunk).square_().sum() for chunk in chunks]
        return math.fsum(torch.stack(parts).tolist()) if parts else 0.0

    def part(self, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of the buffer that a sum of these parameters and moving buffers alone, in this order, would have."""
        index = {key: place for place, key in enumerate(self._bounds)}
        counts = self.buffer[self._counts_from : -2]
        parts = [*(self._sums[id(t)] for t in tensors), *(counts[index[id(t)]].view(1) for t in tensors)]
        return torch.cat([*parts, self._buffer[-2:]]).to(self._dtype_for(list(tensors)))

    def part_like(self, tensors: Sequence[Tensor]) -> Tensor:
        """On the CPU, a tensor that takes the `part` of tensors of these shapes."""
        size = sum(t.numel() for t in tensors) + len(tensors) + 2
        return torch.empty(size, dtype=self._dtype_for(list(tensors)))

    def put(self, tensor: Tensor, total: Tensor) -> None:
        """Sets a parameter's sum, and its count, which comes last."""
        at = list(self._bounds).index(id(tensor))
        self._sums[id(tensor)].copy_(total[:-1])
        self.buffer[self._counts_from + at].copy_(total[-1])

    def write_gradients(self) -> None:
        """Sets `.grad` of every parameter to the sum, rounded to its type; None where no micro-batch used it."""
        for parameter, count in zip(self.parameters, self._counted(), strict=False):
            parameter.grad = self._rounded(self._shaped[id(parameter)], parameter.dtype) if count else None

    def write_buffers(self) -> None:
        """Moves every moving buffer by the mean change over the micro-batches."""
        for tensor, count in zip(self.moving, self._counted()[len(self.parameters) :], strict=True):
            if count:
                mean = self._float64(self._shaped[id(tensor)]) / (count * _CHANGE_SCALE)
                moved = tensor.to(torch.float64) + mean
                tensor.copy_(moved if tensor.is_floating_point() else moved.round_())

    def clear(self) -> None:
        self._buffer.zero_()
        self._uncounted = dict.fromkeys(self._uncounted, 0)
        self.settled.clear()
        self._rejected_after.clear()

    def _counted(self) -> list[int]:
        """Terms per tensor."""
        return list(map(int, self.buffer[-2 - len(self._counts) : -2].tolist()))

    # -- what depends on the form of the sum --------------------------------------------------

    def _dtype_for(self, tensors: list[Tensor]) -> torch.dtype:
        return torch.int64

    def _add(self, target: Tensor, term: Tensor) -> None:
        # Scaling by a power of two is exact in fp32 and bf16 (fp16 lacks the range).
        wide = torch.float64 if term.dtype == torch.float64 else torch.float32
        for into, part in zip(_chunks(target, self._chunk), _chunks(term, self._chunk), strict=True):
            scaled = self._temporary(wide, part.numel())
            if part.dtype == wide:
                torch.mul(part, _SCALE, out=scaled)
            else:
                scaled.copy_(part).mul_(_SCALE)
            low, high = torch.aminmax(scaled)
            # Written so that NaN fails it too.
            if part.device.type != "cpu":
                # The same without waiting for the device's answer: a misfit is counted, and times 0.
                fits = ((-self._limit < low) & (high < self._limit)).to(torch.int64)
                self._buffer[_REJECTED].add_(1 - fits)
                into.addcmul_(self._temporary(torch.int64, part.numel()).copy_(scaled.round_()), fits)
                continue
            if not (-self._limit < low.item() and high.item() < self._limit):
                self._buffer[_REJECTED] += 1
                return
            into.add_(self._temporary(torch.int64, part.numel()).copy_(scaled.round_()))

    def _float64(self, part: Tensor) -> Tensor:
        """A part of the buffer as numbers, in a tensor of its own."""
        return part.to(torch.float64).mul_(1 / _SCALE)

    def _rounded(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """A part of the buffer in a parameter's type, in a tensor of its own."""
        return self._float64(part).to(dtype)

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
        return int(not math.isfinite(self._buffer.sum().item()) or bool(self._buffer[_REJECTED]))

    def add_loss(self, loss: Tensor) -> None:
        fits = torch.isfinite(loss.detach()).reshape(-1)
        super().add_loss(torch.where(fits, loss.detach().reshape(-1), 0.0))
        self._buffer[_REJECTED:].add_(~fits)

    @property
    def loss(self) -> float:
        return float(self._buffer[_LOSS])

    def add(self, tensor: Tensor, term: Tensor) -> None:
        self._shaped[id(tensor)].add_(term.detach())
        self._uncounted[id(tensor)] += 1

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        if left.dtype == right.dtype == self._buffer.dtype:
            # Summed while it is computed: nothing is written only to be read again.
            self._shaped[id(tensor)].addmm_(left.detach(), right.detach())
            self._uncounted[id(tensor)] += 1
        else:
            super().add_product(tensor, left, right)

    def _dtype_for(self, tensors: list[Tensor]) -> torch.dtype:
        return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32

    def _add(self, target: Tensor, term: Tensor) -> None:
        target.add_(term)

    def _float64(self, part: Tensor) -> Tensor:
        return part.to(torch.float64, copy=True)

    def _rounded(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        return part.to(dtype, copy=True)


def gradient_sum(
    mode: Mode,
    parameters: Iterable[nn.Parameter],
    *,
    terms: int,
    buffers: Iterable[Tensor] = (),
    device: torch.device | None = None,
) -> GradientSum:
    """The sum that an optimization's mode asks for; arguments as of GradientSum."""
    kind = FastSum if mode == "fast" else GradientSum
    return kind(parameters, terms=terms, buffers=buffers, device=device)
