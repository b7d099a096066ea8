"""The kernel of agent.stages.kernels for CPUs, in numba, which the planner needs anyway.

It is compiled when this file is imported, which takes 0.6 s of CPU time, or half of that once it is cached on disk. It
is then called once, since numba imports numpy.ma with its first array: that would be a seventh of a small job's time in
each worker. The server from which workers are forked does both for all of them. If anything is wrong with numba,
importing this file raises ImportError, which is the only error that the server passes over.
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
        # Slices are used since an index that might be negative would prevent vector instructions.
        into, part, misfits = sums[start : start + chunk], term[start : start + chunk], 0
        for i in range(part.size):  # without an early exit, for the same reason
            misfits += int(not abs(part[i] * scale) < limit)  # NaN counts as a misfit
        if misfits:
            return 1
        for i in range(part.size):
            # The scale is a power of two, so this is exact. Halves round to even.
            into[i] += np.int64(np.rint(part[i] * scale))
    return 0


def _compiled() -> Callable[..., int]:
    # Without fast-math, so that every element is rounded as torch does it.
    signatures = [f"int64(int64[::1], {wide}[::1], {wide}, {wide}, int64)" for wide in ("float32", "float64")]
    try:
        made = numba.njit(signatures, nogil=True, cache=True)(_loop)
    except Exception:  # it can't be cached: there is no folder, the disk is full, or a file is damaged
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
    """Returns the fp32 bound that exactly the fp32 numbers below `limit` are below."""
    nearest = np.float32(limit)
    return nearest if float(nearest) >= limit else np.nextafter(nearest, np.float32(np.inf))


def add(sums: Tensor, term: Tensor, rejected: Tensor, scale: float, limit: float) -> None:
    """Does what agent.stages.kernels.add_in_torch does, with CPU_CHUNK elements at a time. If one of these does not
    fit, none of them is added. All tensors must be on the CPU, and the sums contiguous."""
    misfit, term = 0, term.resolve_neg()  # numpy does not know torch's lazy negation
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
