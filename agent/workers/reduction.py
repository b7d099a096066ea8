"""The reduction of a stage's gradients, in buckets: each begins as soon as this worker's last micro-batch has added its
terms to it, beside what is left of that micro-batch's backward, as DistributedDataParallel does it.

All peers begin the same buckets in the same order, so a worker holds one back until those before it have begun. Whoever
runs no micro-batch begins all of them at its step.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from torch import Tensor

from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.transport.group import PendingTransfer, TransferError


class GradientReduction:
    """Of one iteration. Takes the terms of the last micro-batch (agent.models.fully_sharded.Sums), and passes them on.

    begin: starts the sum of a tensor over the peers, in place; None from it: there is nobody else. What it raises, a
    TransferError, is raised by `finish`: the op in hand ends as if nothing were wrong.
    """

    def __init__(self, sums: GradientSum, begin: Callable[[Tensor], PendingTransfer | None]) -> None:
        self._sums, self._begin = sums, begin
        self._waiting = deque(sums.buckets())
        self._lacking = [set(bucket.tensors) for bucket in self._waiting]
        self._pending: list[PendingTransfer] = []
        self._problem: TransferError | None = None
        self.begun = False
        """May sums be those of several workers already?"""

    # -- the last micro-batch's terms ----------------------------------------------------------

    def add(self, tensor: Tensor, term: Tensor) -> None:
        self._sums.add(tensor, term)
        self._has(tensor)

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        self._sums.add_product(tensor, left, right)
        self._has(tensor)

    def add_change(self, buffer: Tensor, change: Tensor) -> None:
        self._sums.add_change(buffer, change)

    def _has(self, tensor: Tensor) -> None:
        for lacking in self._lacking:
            lacking.discard(id(tensor))
        # The last one holds what is of no parameter, and is complete only at the step.
        while len(self._lacking) > 1 and not self._lacking[0] and self._problem is None:
            self._begin_next()

    # -- the step ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins what has not begun."""
        self._sums.buffer  # noqa: B018 (what is lent is taken back, and the terms are counted)
        while self._waiting and self._problem is None:
            self._begin_next()

    def finish(self) -> None:
        """Returns when all sums are there. Raises TransferError."""
        self.begin()
        if self._problem is not None:
            raise self._problem
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def let_go(self) -> None:
        """After it was given up: returns when nobody writes to the sums any more. That is soon, for the group has been
        cancelled by then."""
        for pending in self._pending:
            with contextlib.suppress(TransferError):
                pending.wait()
        self._pending.clear()

    def _begin_next(self) -> None:
        bucket = self._waiting.popleft()
        self._lacking.pop(0)
        self.begun = True
        try:
            pending = self._begin(bucket.sums)
        except TransferError as error:
            self._problem = error
            return
        if pending is not None:
            self._pending.append(pending)
