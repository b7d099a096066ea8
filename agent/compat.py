"""The private names of torch that the agent uses, and why; known to work in torch 2.13.

A group of our own is made for each generation, which torch's public functions can't do without a default group; so its
options are set here. The rest is speed: what public names do the same takes longer, as is said with each. (Two modules
of torch's are named in agent.processes, which has no torch itself: they are imported early.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def gloo_group(store: Any, rank: int, size: int, *, timeout: timedelta, address: str) -> Any:
    """A ProcessGroupGloo that is heard at `address`. Blocks until all ranks are there. Raises RuntimeError."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, *, timeout: timedelta) -> Any:
    """A ProcessGroupNCCL."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """In place, all in a few kernels. tensors: at least one."""
    torch._foreach_mul_(list(tensors), factor)


def copy(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Into `mine`, all in a few kernels where they are of one type and device."""
    torch._foreach_copy_(list(mine), list(theirs))


@contextmanager
def tensors_without_data() -> Iterator[Callable[[Tensor], Tensor]]:
    """Of what is made inside, shapes, types and devices alone. Takes a second to load."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode.from_tensor


class FlopCount(TorchDispatchMode):
    """total: floating-point operations of what runs inside it: of matrix products, convolutions and attention, as torch
    counts them.

    What torch.utils.flop_counter.FlopCounterMode counts, without its import of torch._dynamo, which would
    add a second to every worker's start.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap __torch_dispatch__ in a function of torch._dynamo.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out
