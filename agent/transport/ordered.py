"""Transfers over groups without tags, as NCCL's are: the n-th receive from a worker gets its n-th send.

A lane is all that one worker sends to another in one direction of the pipeline; it has a group of
its own per direction, since what goes one way must not queue up behind what goes the other way. Both
ends know the plan: the sender sends in the order of its ops, and the receiver posts its receives
lane by lane in that same order (`Script.arrivals`), which it reads off the plan too. Where it wants
a message that comes later in the lane, it posts those before it as well, and keeps them until their
op asks for them.

Both ends name the same messages in the same order, iteration by iteration:
- All that is sent to a worker in an iteration is received by it in that iteration, before it begins
  the next one. So lanes stay in step when neighbours are an iteration apart (staggered steps).
- What is left of an iteration after a death (`Script.only`) is the same set of micro-batches on all
  workers, so that both ends leave out the same messages.
- An iteration that counts no more is passed on: the same ops still send and receive, in the same order.
- A boundary's tensors follow each other in their order in the boundary.
- A new generation has new groups.

Why that can't deadlock. Let B wait for message m of lane A to B. All that A sends in this lane before m
has a receive posted, so m can get through once A has sent it; and A sends it without waiting for B, right
after the op that the schedule puts before B's. So B waits, as with tags, only for ops that precede its own.
Posting what comes before m in the lane costs buffers, and never time: it was sent before m was.

Connections are made while the groups are (`connect`), since NCCL makes them with the first message, and blocks
the thread until the other end does so too: first all peers of a stage, then the pairs in one global order.
Of the pairs not yet connected, both ends of the least have it as their next, so there is always one that
gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import torch

from openrecycle.agent.transport.script import Lane, MicroBatch, Script
from openrecycle.agent.transport.transfers import Lines, TransferLayout, Transfers
from openrecycle.planner.jobs.job import Worker

_ONE_TAG = 0


class OrderedTransfers(Transfers):
    """Every message has the same tag, so only the order tells them apart."""

    def __init__(self, lines: Lines, layout: TransferLayout) -> None:
        """lines: connected."""
        super().__init__(lines, layout)
        self._coming: dict[Lane, deque[MicroBatch]] = {}

    def begin(self, iteration: int, script: Script) -> None:
        self._coming = {lane: deque(keys) for lane, keys in script.arrivals.items()}
        super().begin(iteration, script)

    def _post(self, kind: str, key: MicroBatch) -> None:
        lane = self._coming[kind, (self._script.before if kind == "F" else self._script.after)[key]]
        while (kind, key) not in self._receiving:
            self._listen(kind, lane.popleft())

    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        return _ONE_TAG


def connect(lines: Lines, neighbours: Collection[Worker], device: torch.device) -> None:
    """Has this worker exchange a first message with all whom it will ever exchange one with; blocks until they have.
    Raises TransferError, or RuntimeError."""
    me = lines.me
    if lines.peers is not None:
        lines.peers.sum(torch.zeros(1, dtype=torch.int64, device=device))
    for lower, upper in sorted((n, me) if n.stage < me.stage else (me, n) for n in neighbours):
        for group, sender, receiver in ((lines.forward, lower, upper), (lines.backward, upper, lower)):
            token = torch.zeros(1, dtype=torch.int64, device=device)
            if me == sender:
                group.send(lines.rank[receiver], token, _ONE_TAG).wait()
            else:
                group.receive(lines.rank[sender], token, _ONE_TAG).wait()
