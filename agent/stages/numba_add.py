"""The kernel of agent.stages.kernels for CPUs, by numba, which is here where the planner is. It is compiled when this
is imported (0.6 s of a processor; half of it once it is kept on disk): the server that workers are forked from does so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
import torch
from torch import Tensor

# Of a lower type, so many elements are made fp32 at a time.
_CHUNK = 1 << 16


def _loop(sums: Any, term: Any, scale: Any, limit: Any) -> int:
    misfits = 0
    for i in range(term.size):
        x = term[i] * scale  # by a power of two, so exact
        misfits += int(not abs(x) < limit)  # NaN is a misfit
        sums[i] += np.int64(np.rint(x))  # halves to the even one
    return misfits


def _compiled() -> Callable[..., int]:
    # Without fast-math: every element is rounded as torch does. Counted, not left at the first misfit: so it is
    # done in vectors.
    signatures = [f"int64(int64[::1], {wide}[::1], {wide}, {wide})" for wide in ("float32", "float64")]
    try:
        made = numba.njit(signatures, nogil=True, cache=True)(_loop)
    except Exception:  # no folder to keep it in, a full disk, a file that is damaged
        made = numba.njit(signatures, nogil=True)(_loop)
    return made  # type: ignore[no-any-return]


_add = _compiled()


def add(sums: Tensor, term: Tensor, rejected: Tensor, scale: float, limit: float) -> None:
    """As agent.stages.kernels.add_in_torch; all on the CPU, sums contiguous."""
    wide = np.float64 if term.dtype == torch.float64 else np.float32
    of_numpy, misfits = wide(scale), 0
    term = term.resolve_neg()  # which numpy does not know
    if term.dtype in (torch.float32, torch.float64):
        misfits = _add(sums.numpy(), term.contiguous().numpy(), of_numpy, wide(limit))
    else:
        for start in range(0, term.numel(), _CHUNK):
            part = term[start : start + _CHUNK].float()
            misfits += _add(sums[start : start + _CHUNK].numpy(), part.numpy(), of_numpy, wide(limit))
    if misfits:
        rejected.add_(1)
