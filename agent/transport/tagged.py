"""Transfers over groups with tags: messages find their receives in whatever order these are posted."""

from __future__ import annotations

from openrecycle.agent.script import MicroBatch
from openrecycle.agent.transport.transfers import Transfers

# Tags tell apart the messages of this many iterations; two may be in flight, since steps are staggered.
_TAG_ITERATIONS = 4


class TaggedTransfers(Transfers):
    """One tag per iteration, direction, micro-batch and tensor."""

    def _post(self, kind: str, key: MicroBatch) -> None:
        self._listen(kind, key)

    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        layout = self._layout
        iteration, direction = self._iteration % _TAG_ITERATIONS, "FI".index(kind)
        slots = layout.job.pipelines * layout.job.micro_batches
        slot = (2 * iteration + direction) * slots + key[0] * layout.job.micro_batches + key[1]
        return slot * layout.widest + index
