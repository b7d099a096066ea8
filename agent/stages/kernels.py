"""Adds a term to a GradientSum in one kernel, where torch's own operations read it five times and take eleven kernels
of a GPU, or three times as long on a CPU (tests/benchmarks/bench_sums.py).

On a GPU by Triton, which CUDA builds of torch bring with them; it needs a C compiler when it is first used. On a CPU by
numba. Where that is not there, or does not do what it should, torch's operations are used: all give the same bits.
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
"""Of (sums, term, rejected, scale, limit), as `add_in_torch`."""


def scale_into(scaled: Tensor, term: Tensor, scale: float) -> None:
    """scaled = term * scale, in the type of `scaled`. By a power of two that is exact in fp32 and bf16 (fp16 lacks the
    range)."""
    if term.dtype == scaled.dtype:
        torch.mul(term, scale, out=scaled)
    else:
        scaled.copy_(term.resolve_neg()).mul_(scale)  # torch 2.13 forgets it of fp16


def add_in_torch(
    sums: Tensor, term: Tensor, rejected: Tensor, scale: float, limit: float, scaled: Tensor, whole: Tensor
) -> None:
    """sums += round(term * scale), both flat; sums and rejected: int64. With an element that is not below `limit`, or
    no number, rejected (of one element) grows, and the sums mean nothing. Waits for no answer of the device. scaled,
    whole: scratch memory as large as the term, in fp32 (fp64 where the term is) and int64."""
    scale_into(scaled, term, scale)
    low, high = torch.aminmax(scaled)
    # Written so that NaN fails it too.
    fits = ((-limit < low) & (high < limit)).to(torch.int64)
    rejected.add_(1 - fits)
    sums.addcmul_(whole.copy_(scaled.round_()), fits)


_FOR_CPUS = "openrecycle.agent.stages.numba_add"
# Torch's operations have added so many elements a hundred times before numba has been imported.
_WORTH_LOADING = 1 << 16


def worth_loading(device: torch.device, elements: int) -> bool:
    """Is the kernel loaded in this process, as in workers, or does it pay for a term of so many elements? A launcher
    that tries an optimizer on a few numbers does without."""
    return device.type != "cpu" or elements >= _WORTH_LOADING or _FOR_CPUS in sys.modules


@functools.cache
def fused_add(device: torch.device) -> Add | None:
    """None where there is none. Tried once, on numbers of every kind."""
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
    except Exception as error:  # of a library that may fail in any way, and is not needed
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    library = "Triton" if device.type == "cuda" else "numba"
    log.warning("gradients are summed without %s, which takes longer: %s", library, why)
    return None


def _as_torch_does(add: Add, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    limit = 2.0**58
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # Down to what rounds to 0, halves that go to the even one, and, at the end, what is rejected.
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
