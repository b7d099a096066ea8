"""What a worker's ops give to and take from the workers of the neighbouring stages.

Two ways to tell messages apart, for groups that have tags (gloo) and for those that have none (NCCL).
Either way sends never wait for the receiver, and receives are posted ahead of the op that needs them,
PREFETCH in the receiver's own order, and handed over by key.

Why an order that a valid schedule has can't deadlock: a worker waits only in `receive`, for one
message. With tags that message needs nothing but its send, which is asynchronous and comes right
after the op that the schedule puts before this one. Without tags it must also be the turn of that
message in its lane; see agent.transport.ordered. So whoever waits waits for an op that precedes
its own in the schedule, by the order of a worker's ops or by a transfer, and these precedences have
no cycle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from openrecycle.agent.script import MicroBatch, Script, Transfer
from openrecycle.agent.stage_io import StageOutput
from openrecycle.agent.transport.group import Group, PendingTransfer
from openrecycle.planner.job import Job, Worker

# Receives posted ahead of the op that needs them.
PREFETCH = 4


@dataclass(frozen=True)
class Lines:
    """The groups of a generation as one worker uses them. forward: from each stage to the next; backward: the
    other way; peers: of the worker's stage, None where it has none. rank: in forward and backward."""

    me: Worker
    forward: Group
    backward: Group
    peers: Group | None
    rank: Mapping[Worker, int]


@dataclass(frozen=True)
class TransferLayout:
    """incoming, outgoing: what passes from the previous stage and to the next one, per micro-batch.

    widest: most tensors of any boundary of the job. device: where the stage computes.
    """

    job: Job
    incoming: StageOutput
    outgoing: StageOutput
    widest: int
    device: torch.device


class Transfers(ABC):
    """One worker's transfers, one iteration after the other; for one generation. Raises TransferError."""

    def __init__(self, lines: Lines, layout: TransferLayout) -> None:
        self._lines, self._layout = lines, layout
        self._sent: deque[tuple[int, PendingTransfer]] = deque()
        self._receiving: dict[Transfer, dict[int, PendingTransfer]] = {}
        self._expected: Iterator[Transfer] = iter(())
        self._ahead = 0
        self._iteration = 0

    def begin(self, iteration: int, script: Script) -> None:
        """script: what is left of the iteration to be done. All that it receives is received in it."""
        self._iteration, self._script = iteration, script
        self._expected = iter(script.receives())
        self._receiving, self._ahead = {}, 0
        self._post_ahead()

    def send(self, kind: str, key: MicroBatch, tensors: Mapping[int, Tensor]) -> None:
        """Starts to send a boundary's data (F) or gradients (I); tensors: by their place in the boundary."""
        forward = kind == "F"
        to = self._lines.rank[(self._script.after if forward else self._script.before)[key]]
        group = self._lines.forward if forward else self._lines.backward
        for i, tensor in tensors.items():
            pending = group.send(to, tensor.contiguous(), self._tag(kind, key, i))
            self._sent.append((self._iteration, pending))

    def receive(self, kind: str, key: MicroBatch) -> dict[int, Tensor]:
        """The tensors that were sent, by their place in the boundary; waits for them."""
        arrived = {i: pending.wait() for i, pending in self._receiving.pop((kind, key)).items()}
        self._ahead -= 1
        self._post_ahead()
        return arrived

    def let_go(self, before: int | None = None) -> None:
        """Waits until peers have all that was sent (of iterations before this one), and forgets it."""
        while self._sent and (before is None or self._sent[0][0] < before):
            self._sent.popleft()[1].wait()

    def reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` over the living peers of the stage, in place."""
        if self._lines.peers is not None:
            self._lines.peers.sum(tensor)

    def reduced_by_all(self, count: int) -> int:
        """Returns once all living peers of the stage have come to this line; the sum of their counts."""
        if self._lines.peers is None:
            return count
        total = torch.full((1,), count, dtype=torch.int64, device=self._layout.device)
        self._lines.peers.sum(total)
        return int(total)

    def drop(self) -> None:
        """Forgets everything under way; what was being received or summed is not touched any more."""
        for group in (self._lines.forward, self._lines.backward, self._lines.peers):
            if group is not None:
                group.halt()
        self._sent.clear()
        self._receiving = {}

    def _post_ahead(self) -> None:
        while self._ahead < PREFETCH and (wanted := next(self._expected, None)) is not None:
            self._post(*wanted)
            self._ahead += 1

    def _listen(self, kind: str, key: MicroBatch) -> None:
        """Posts the receives of one boundary's tensors."""
        forward = kind == "F"
        source = self._lines.rank[(self._script.before if forward else self._script.after)[key]]
        group = self._lines.forward if forward else self._lines.backward
        self._receiving[kind, key] = {
            i: group.receive(source, spec.empty(self._layout.device), self._tag(kind, key, i))
            for i, spec in enumerate(self._layout.incoming if forward else self._layout.outgoing)
            if forward or spec.gradient
        }

    @abstractmethod
    def _post(self, kind: str, key: MicroBatch) -> None:
        """Makes sure that the receives of this transfer are posted."""

    @abstractmethod
    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        """Of tensor `index` of a boundary; both ends say the same."""
