"""The kernel of agent.stages.kernels for GPUs, in Triton. It is a file of its own since Triton reads its source. It is
imported only where there is a GPU."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_BLOCK, _MOST = 1024, 1 << 30


# There is one kernel for each type, whatever memory it is given. Otherwise the first use of another one would load it,
# and that may wait for a kernel that waits for a peer.
@triton.jit(do_not_specialize=["sums", "term", "rejected", "size"])  # type: ignore[untyped-decorator]
def _add(sums, term, rejected, size, scale, limit, WIDE: tl.constexpr, ONES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    # The scale is a power of two, so this is exact.
    x = tl.load(term + places, mask=inside, other=0.0).to(WIDE) * scale
    fits = (x > -limit) & (x < limit)  # NaN does not
    x = tl.where(fits, x, 0.0)
    # Rounds to the nearest whole number, and halves to even: numbers from ONES on have no fractions.
    size_of = tl.abs(x)
    whole = (size_of + ONES) - ONES
    x = tl.where(size_of < ONES, tl.where(x < 0, -whole, whole), x)
    before = tl.load(sums + places, mask=inside, other=0)
    tl.store(sums + places, before + x.to(tl.int64), mask=inside)
    misfits = tl.sum((inside & (fits == 0)).to(tl.int64), axis=0)
    if misfits > 0:
        tl.atomic_add(rejected, misfits)


def add(sums: Tensor, term: Tensor, rejected: Tensor, scale: float, limit: float) -> None:
    """Does what agent.stages.kernels.add_in_torch does. All tensors must be on one GPU, and the sums contiguous."""
    term = term.contiguous()  # the gradient of a one-dimensional parameter may have strides
    size, wide = term.numel(), term.element_size() == 8
    if size > _MOST:
        for start in range(0, size, _MOST):
            add(sums[start : start + _MOST], term[start : start + _MOST], rejected, scale, limit)
        return
    _add[(triton.cdiv(size, _BLOCK),)](
        *(sums, term, rejected, size, scale, limit),
        WIDE=tl.float64 if wide else tl.float32,
        ONES=2.0**52 if wide else 2.0**23,
        BLOCK=_BLOCK,
    )
