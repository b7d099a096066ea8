"""Tensors of a device over a group that takes those of the CPU alone: by way of the host's memory.

For GPUs where NCCL can't be used, such as several workers on one with an older NCCL. A send, and a
sum, waits until the device has computed its tensor; what comes back goes to the device in the order of the caller's
stream, for which nobody waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrecycle.agent.transport.group import Group, PendingTransfer


class Arriving:
    """What comes into the host's memory, and is sent on to `tensor` by `wait`."""

    def __init__(self, inner: PendingTransfer, tensor: Tensor) -> None:
        self._inner, self.tensor = inner, tensor

    def arrived(self) -> bool:
        return self._inner.arrived()

    def wait(self) -> Tensor:
        self.tensor.copy_(self._inner.wait(), non_blocking=True)
        return self.tensor


class HostGroup(Group):
    """inner: carries what is on the CPU."""

    def __init__(self, inner: Group) -> None:
        self._inner, self.rank = inner, inner.rank

    def send(self, to: int, tensor: Tensor, tag: int) -> PendingTransfer:
        return self._inner.send(to, host_copy(tensor), tag)

    def receive(self, source: int, buffer: Tensor, tag: int) -> PendingTransfer:
        return Arriving(self._inner.receive(source, host_memory(buffer), tag), buffer)

    def begin_sum(self, tensor: Tensor) -> PendingTransfer:
        return Arriving(self._inner.begin_sum(host_copy(tensor)), tensor)

    def begin_broadcast(self, tensor: Tensor, source: int) -> PendingTransfer:
        host = host_copy(tensor) if source == self.rank else host_memory(tensor)
        return Arriving(self._inner.begin_broadcast(host, source), tensor)

    def cancel(self) -> None:
        self._inner.cancel()

    def close(self) -> None:
        self._inner.close()

    def halt(self) -> None:
        self._inner.halt()

    def rest(self) -> None:
        self._inner.rest()


def host_memory(like: Tensor) -> Tensor:
    """Pinned for a GPU, so that a copy is quick; torch keeps such memory for the next one, once copies are done."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type == "cuda")


def host_copy(tensor: Tensor) -> Tensor:
    """Returns when it is there."""
    return host_memory(tensor).copy_(tensor)
