"""Buffers that a forward changes, such as the running statistics of a batch norm.

Left alone, they would depend on which micro-batches a worker happened to run, and in which order:
two replicas of a stage would drift apart, and every re-routing would show in them. So every
forward of an iteration starts from the same values, what it changes is taken back, and at the
step the buffer moves by the mean change over all micro-batches of the stage, summed like the gradients.
For a batch norm that is one update per iteration with the statistics' mean over the global batch
(momentum counts iterations, not micro-batches). Integers move by the rounded mean: a counter of
batches counts iterations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from openrecycle.agent.models import compat

Move = tuple[Tensor, Tensor]
"""(buffer, what a forward added to it: fp64, the same shape)."""


class MovingBuffers:
    """Those among the buffers of `module` that are in `tensors` (by identity); None: all."""

    def __init__(self, module: nn.Module, tensors: Iterable[Tensor] | None = None) -> None:
        wanted = None if tensors is None else {id(t) for t in tensors}
        # A buffer that two modules share has one entry.
        entries = {
            id(buffer): (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in compat.own_buffers(owner).items()
            if buffer is not None and (wanted is None or id(buffer) in wanted)
        }
        self._entries = list(entries.values())

    @contextlib.contextmanager
    def kept(self, moves: list[Move] | None = None) -> Iterator[None]:
        """The buffers have their values back afterwards; what was changed is appended to `moves`."""
        before = [buffer.detach().clone() for _, _, buffer in self._entries]
        try:
            yield
        finally:
            for (owner, name, buffer), value in zip(self._entries, before, strict=True):
                present = compat.own_buffers(owner)
                if moves is not None:
                    moves.append((buffer, _difference(present[name], value)))
                # A forward may also have put another tensor in its place.
                present[name] = buffer
                # Through .data, since backwards still to come may have saved this tensor.
                buffer.data.copy_(value)


def moved_by(module: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """The buffers of `module` that `run` changes; they have their values back afterwards."""
    moves: list[Move] = []
    with MovingBuffers(module).kept(moves):
        run()
    moving = [buffer for buffer, change in moves if bool(change.ne(0).any())]
    for buffer in moving:
        if buffer.is_complex():
            raise RuntimeError(
                f"a forward changes a complex buffer of shape {tuple(buffer.shape)}; only real ones can be summed: "
                "keep its view_as_real"
            )
    return moving


def _difference(after: Tensor | None, before: Tensor) -> Tensor:
    if after is None or after.shape != before.shape:
        raise RuntimeError(
            f"a forward turned a buffer of shape {tuple(before.shape)} into "
            f"{'None' if after is None else tuple(after.shape)}; buffers must keep their shape"
        )
    exact = torch.complex128 if before.is_complex() else torch.float64  # rotary positions are complex, say
    return after.detach().to(exact) - before.to(exact)
