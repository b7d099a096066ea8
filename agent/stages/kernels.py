"""Adds a term to a GradientSum in one kernel. torch's own operations read the term five times; they take eleven kernels
on a GPU, or three times as long on a CPU (tests/benchmarks/bench_sums.py).

On a GPU the kernel is in Triton, which CUDA builds of torch include; it needs a C compiler when it is first used. On a
CPU it is in numba. If these are missing or compute something else, torch's operations are used: all give the same bits.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Add = Callable[[Tensor, Tensor, Tensor, float, float], None]
"""A function of (sums, term, rejected, scale, limit) that does what `add_in_torch` does."""


def scale_into(scaled: Tensor, term: Tensor, scale: float) -> None:
    """Sets scaled = term * scale, in the type of `scaled`. With a power of two that is exact in fp32 and bf16 (fp16
    lacks the range)."""
    if term.dtype == scaled.dtype:
        torch.mul(term, scale, out=scaled)
    else:
        scaled.copy_(term.resolve_neg()).mul_(scale)  # torch 2.13 ignores the negation of an fp16 tensor in copy_


def add_in_torch(
    sums: Tensor, term: Tensor, rejected: Tensor, scale: float, limit: float, scaled: Tensor, whole: Tensor
) -> None:
    """Adds sums += round(term * scale), both flat. Does not wait for the device.

    sums, rejected: int64. If an element is NaN or not below `limit`, rejected (of one element) grows, and the sums mean
    nothing. scaled, whole: scratch memory as large as the term, in fp32 (fp64 if the term is) and int64.
    """
    scale_into(scaled, term, scale)
    low, high = torch.aminmax(scaled)
    # Written in this form so that NaN fails it too.
    fits = ((-limit < low) & (high < limit)).to(torch.int64)
    rejected.add_(1 - fits)
    sums.addcmul_(whole.copy_(scaled.round_()), fits)


_FOR_CPUS = "openrecycle.agent.stages.numba_add"
# In the time that it takes to import numba, torch's operations add so many elements a hundred times.
_WORTH_LOADING = 1 << 16


def worth_loading(device: torch.device, elements: int) -> bool:
    """Says whether to use the kernel: it is loaded in this process, as in workers, or loading it pays for a term of so
    many elements. A launcher that tries an optimizer on a few numbers does without."""
    return device.type != "cpu" or elements >= _WORTH_LOADING or _FOR_CPUS in sys.modules


@functools.cache
def fused_add(device: torch.device) -> Add | None:
    """Returns the kernel for a device, or None. It is tried once, on numbers of every kind."""
    try:
        if device.type == "cuda":
            from openrecycle.agent.stages.triton_add import add
        elif device.type == "cpu" and find_spec("numba") is not None:
            from openrecycle.agent.stages.numba_add import add
        else:
            return None
        if _as_torch_does(add, device):
            return add
        why = "what it computes differs"
    except Exception as error:  # the library may fail in any way, and is not needed
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    library = "Triton" if device.type == "cuda" else "numba"
    log.warning("gradients are summed without %s, which takes longer: %s", library, why)
    return None


def _as_torch_does(add: Add, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    limit = 2.0**58
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # They include numbers that round to 0, halves that round to even, and at the end one that is rejected.
        numbers = torch.randn(5000, generator=generator, dtype=torch.float64)
        numbers *= 2.0 ** torch.randint(-60, 5, (5000,), generator=generator)
        numbers[:64] = torch.arange(-32, 32) * 2.0**-51
        for last in (0.0, float("nan"), float("inf"), -(2.0**13)):
            numbers[-1] = last
            term = numbers.to(device, dtype).repeat_interleave(2)[::2]  # with strides
            before = torch.randint(-(2**60), 2**60, (5000,), generator=generator).to(device)
            mine, theirs = ((before.clone(), torch.zeros(1, dtype=torch.int64, device=device)) for _ in range(2))
            scratch = torch.empty_like(term, dtype=wide), torch.empty_like(before)
            add(mine[0], term, mine[1], 2.0**50, limit)
            add_in_torch(theirs[0], term, theirs[1], 2.0**50, limit, *scratch)
            refused = bool(theirs[1])
            if refused != bool(mine[1]) or not (refused or torch.equal(mine[0], theirs[0])):
                return False
    return True
