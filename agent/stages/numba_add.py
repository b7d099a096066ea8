"""The kernel of agent.stages.kernels for CPUs, by numba, which is here where the planner is. It is compiled when this
is imported (0.6 s of a processor; half of it once it is kept on disk), and called once: the server that workers are
forked from does so. With its first array numba imports numpy.ma: a seventh of a small job's time in each worker.
Whatever is wrong with numba, importing this raises ImportError: that server passes over no other one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.config.devices import CPU_CHUNK


def _loop(sums: Any, term: Any, scale: Any, limit: Any, chunk: int) -> int:
    for start in range(0, term.size, chunk):
        # Slices: an index that might be negative would not be computed in vectors.
        into, part, misfits = sums[start : start + chunk], term[start : start + chunk], 0
        for i in range(part.size):  # counted to the end, likewise
            misfits += int(not abs(part[i] * scale) < limit)  # NaN is one
        if misfits:
            return 1
        for i in range(part.size):
            # By a power of two, so exact. Halves go to the even one.
            into[i] += np.int64(np.rint(part[i] * scale))
    return 0


def _compiled() -> Callable[..., int]:
    # Without fast-math: every element is rounded as torch does.
    signatures = [f"int64(int64[::1], {wide}[::1], {wide}, {wide}, int64)" for wide in ("float32", "float64")]
    try:
        made = numba.njit(signatures, nogil=True, cache=True)(_loop)
    except Exception:  # no folder to keep it in, a full disk, a file that is damaged
        made = numba.njit(signatures, nogil=True)(_loop)
    return made  # type: ignore[no-any-return]


try:
    import numba  # type: ignore[import-untyped]
    import numpy as np

    if numba.config.DISABLE_JIT:
        raise ImportError("NUMBA_DISABLE_JIT is set")
    _add = _compiled()
    for _wide in (np.float32, np.float64):
        _add(np.zeros(1, np.int64), np.zeros(1, _wide), _wide(1), _wide(1), CPU_CHUNK)
except Exception as error:
    raise ImportError(f"{type(error).__name__}: {error}") from error


@functools.cache
def _in_fp32(limit: float) -> np.float32:
    """What every fp32 number below `limit` is below, and no other one."""
    nearest = np.float32(limit)
    return nearest if float(nearest) >= limit else np.nextafter(nearest, np.float32(np.inf))


def add(sums: Tensor, term: Tensor, rejected: Tensor, scale: float, limit: float) -> None:
    """As agent.stages.kernels.add_in_torch, on CPU_CHUNK elements at a time, none of which is added where one does not
    fit; all on the CPU, sums contiguous."""
    misfit, term = 0, term.resolve_neg()  # which numpy does not know
    if term.dtype == torch.float64:
        misfit = _add(sums.numpy(), term.contiguous().numpy(), scale, limit, CPU_CHUNK)
    elif term.dtype == torch.float32:
        misfit = _add(sums.numpy(), term.contiguous().numpy(), np.float32(scale), _in_fp32(limit), CPU_CHUNK)
    else:
        for start in range(0, term.numel(), CPU_CHUNK):
            into, part = (some[start : start + CPU_CHUNK] for some in (sums, term))
            misfit = _add(into.numpy(), part.float().numpy(), np.float32(scale), _in_fp32(limit), CPU_CHUNK)
            if misfit:
                break
    if misfit:
        rejected.add_(1)
