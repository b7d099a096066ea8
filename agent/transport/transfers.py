"""What one worker does in every iteration of a generation (`Script`), and what its ops send to and receive from the
workers of the neighbouring stages (`Transfers`).

There are two ways to tell messages apart, for groups that have tags (gloo) and for groups that have none (NCCL). In
both, sends never wait for the receiver. Receives are posted ahead of the op that needs them, PREFETCH of them in the
receiver's own order, and are handed over by micro-batch.

Why the order of a valid schedule can't deadlock: a worker waits only in `receive`, for one message. With tags, that
message needs nothing but its send, which is asynchronous and comes right after the op that the schedule puts before
this one. Without tags, it must also be that message's turn in its lane; see OrderedTransfers. So a worker only waits
for an op that precedes its own in the schedule, by the order of a worker's ops or by a transfer, and these precedences
have no cycle.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrecycle.agent.config.devices import on_device
from openrecycle.agent.models.layers import StageOutput, TensorSpec
from openrecycle.agent.transport.group import Group, PendingTransfer, halt_all
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.schedule import MicroBatch, Op, Schedule

# -- what one worker does in every iteration of a generation ------------------------------------

Transfer = tuple[str, MicroBatch]
"""Kind and micro-batch. `F`: what a forward sends to the next stage; `I`: the gradient that comes back."""
Lane = tuple[str, Worker]
"""All transfers of a kind that come from one worker."""


@dataclass(frozen=True)
class Script:
    """What one worker does in an iteration. ops: in order. before, after: the worker that runs each micro-batch on the
    previous and the next stage.

    arrivals: per lane the micro-batches that come to this worker, in the order in which the other worker sends them,
    which need not be the order in which this one needs them. alone: the worker that runs all micro-batches of this
    worker's stage, if there is one.
    """

    ops: tuple[Op, ...]
    before: Mapping[MicroBatch, Worker]
    after: Mapping[MicroBatch, Worker]
    arrivals: Mapping[Lane, tuple[MicroBatch, ...]]
    alone: Worker | None = None

    @classmethod
    def of(cls, schedule: Schedule, me: Worker, runs: Mapping[Worker, Sequence[Worker]] | None = None) -> Script:
        """Returns what the worker `me` does by a plan. A worker that the plan does without runs nothing but its stage's
        reduction and step.

        runs: for each worker that does not do just its own part of the plan, the workers of its stage whose parts it
        does. Ordered by the plan's times, such parts can't deadlock either.
        """
        stages = me.stage - 1, me.stage + 1

        def matters(worker: Worker) -> bool:  # the schedule makes ops only when asked, so others' are never made
            return abs(worker.stage - me.stage) <= 1

        roles = {worker: schedule.ops[worker] for worker in schedule.ops if matters(worker)}
        roles[me] = roles.get(me) or (Op("O", me.pipeline, -1, me.stage, me, 0, 0),)
        for worker, parts in (runs or {}).items():
            if not matters(worker):
                continue
            planned = ([op for op in schedule.ops[part] if op.kind != "O"] for part in parts)
            own = (op for op in schedule.ops[worker] if op.kind == "O")
            roles[worker] = (*heapq.merge(*planned, key=lambda op: op.start), *own)
        mine = {(op.pipeline, op.micro_batch) for op in roles[me] if op.kind == "F"}
        neighbours: dict[int, dict[MicroBatch, Worker]] = {stage: {} for stage in stages}
        arrivals: dict[Lane, tuple[MicroBatch, ...]] = {}
        for worker, ops in roles.items():
            if worker.stage not in neighbours:
                continue
            for op in ops:
                if op.kind == "F":
                    neighbours[worker.stage][op.pipeline, op.micro_batch] = worker
            kind, senders = ("F", "F") if worker.stage < me.stage else ("I", "IB")
            keys = ((op.pipeline, op.micro_batch) for op in ops if op.kind in senders)
            if coming := tuple(key for key in keys if key in mine):
                arrivals[kind, worker] = coming
        busy = [w for w, ops in roles.items() if w.stage == me.stage and any(op.kind != "O" for op in ops)]
        alone = busy[0] if len(busy) == 1 else None
        return cls(roles[me], neighbours[me.stage - 1], neighbours[me.stage + 1], arrivals, alone)

    def without(self, keys: Collection[MicroBatch]) -> Script:
        """Returns the same order without the ops of these micro-batches."""
        return self.only({(op.pipeline, op.micro_batch) for op in self.ops} - set(keys)) if keys else self

    def only(self, keys: Collection[MicroBatch]) -> Script:
        """Returns the same order with the ops of these micro-batches only, and the step. All lanes stay, even empty
        ones."""
        ops = tuple(op for op in self.ops if op.kind == "O" or (op.pipeline, op.micro_batch) in keys)
        arrivals = {lane: tuple(key for key in coming if key in keys) for lane, coming in self.arrivals.items()}
        return replace(self, ops=ops, arrivals=arrivals)

    def forwards(self, keys: Collection[MicroBatch]) -> Script:
        """Returns the same order with the forwards of these micro-batches only."""
        script = self.only(keys)
        ops = tuple(op for op in script.ops if op.kind == "F")
        arrivals = {lane: coming if lane[0] == "F" else () for lane, coming in script.arrivals.items()}
        return replace(script, ops=ops, arrivals=arrivals)

    def receives(self) -> list[Transfer]:
        """Returns the transfers that ops wait for, in order."""
        out = []
        for op in self.ops:
            key = (op.pipeline, op.micro_batch)
            if op.kind == "F" and key in self.before:
                out.append(("F", key))
            elif op.kind in ("I", "B") and key in self.after:
                out.append(("I", key))
        return out

    @property
    def neighbours(self) -> frozenset[Worker]:
        """All workers with which this one exchanges anything. Each of them has this one among its own neighbours."""
        return frozenset(worker for _, worker in self.arrivals)


# -- what a worker's ops send to and receive from neighbouring stages ---------------------------

# How many receives are posted ahead of the op that needs them.
PREFETCH = 4


@dataclass(frozen=True)
class GenerationGroups:
    """The process groups of a generation as one worker uses them. forward: from each stage to the next. backward: the
    other way. peers: of the worker's stage; None: it has no peers. rank: of each worker in forward and backward."""

    me: Worker
    forward: Group
    backward: Group
    peers: Group | None
    rank: Mapping[Worker, int]


@dataclass(frozen=True)
class TransferLayout:
    """What passes between stages per micro-batch: incoming from the previous stage, outgoing to the next one.

    widest: the most tensors at any boundary of the job, including those that follow them. device: where the stage
    computes. weighted: a micro-batch's weight (float64, one element) follows its gradients. varies: the shapes of
    incoming and outgoing are upper bounds; the actual shapes (int64) follow last, if any tensors are passed.
    """

    job: Job
    incoming: StageOutput
    outgoing: StageOutput
    widest: int
    device: torch.device
    weighted: bool = False
    varies: bool = False


class Transfers(ABC):
    """One worker's transfers in one generation, one iteration after the other. Its methods raise TransferError."""

    def __init__(self, lines: GenerationGroups, layout: TransferLayout) -> None:
        self._lines, self._layout = lines, layout
        self._sent: dict[tuple[int, str, MicroBatch], list[PendingTransfer]] = {}
        """Sends that peers may not have received yet, in their order, by (iteration, kind, micro-batch)."""
        self._receiving: dict[Transfer, dict[int, PendingTransfer]] = {}
        self._expected: Iterator[Transfer] = iter(())
        self._ahead = 0
        self._iteration = 0

    def begin(self, iteration: int, script: Script) -> None:
        """Begins an iteration. script: what is left of it; all that it receives is received in this iteration."""
        self._iteration, self._script = iteration, script
        self._expected = iter(script.receives())
        self._receiving, self._ahead = {}, 0
        self._post_ahead()

    def send(self, kind: str, key: MicroBatch, tensors: Mapping[int, Tensor]) -> None:
        """Starts to send a boundary's data (F) or gradients (I). tensors: by their place in the boundary."""
        forward = kind == "F"
        to = self._lines.rank[(self._script.after if forward else self._script.before)[key]]
        group = self._lines.forward if forward else self._lines.backward
        specs = self._passed(self._layout.outgoing if forward else self._layout.incoming, kind)
        if self._layout.varies and specs:
            tensors = _flat(tensors, specs, self._shapes_at, whole=group.whole_buffers)
        for i, tensor in tensors.items():
            pending = group.send(to, tensor.contiguous(), self._tag(kind, key, i))
            self._sent.setdefault((self._iteration, kind, key), []).append(pending)

    def receive(self, kind: str, key: MicroBatch) -> dict[int, Tensor]:
        """Waits for the tensors of a transfer, and returns them by their place in the boundary."""
        arrived = {i: pending.wait() for i, pending in self._receiving.pop((kind, key)).items()}
        if kind == "I" and arrived:  # a worker that sends gradients of the output has it, so this does not wait
            self._forget((self._iteration, "F", key))
        self._ahead -= 1
        self._post_ahead()
        specs = self._specs(kind, key)
        return _shaped(arrived, specs, self._shapes_at) if self._layout.varies and specs else arrived

    def arrived(self, kind: str, key: MicroBatch) -> bool:
        """Says whether `receive` would return without waiting. False where that can't be told."""
        return all(pending.arrived() for pending in self._receiving[kind, key].values())

    def let_go(self, before: int | None = None) -> None:
        """Waits until peers have received all that was sent, and forgets it. before: only of iterations before this
        one."""
        for sent in [sent for sent in self._sent if before is None or sent[0] < before]:
            self._forget(sent)

    def _forget(self, sent: tuple[int, str, MicroBatch]) -> None:
        for pending in self._sent.get(sent, ()):
            pending.wait()
        self._sent.pop(sent, None)

    def reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` over the living peers of the stage, in place."""
        if (pending := self.begin_reduce(tensor)) is not None:
            pending.wait()

    def begin_reduce(self, tensor: Tensor) -> PendingTransfer | None:
        """Starts to sum `tensor` over the living peers of the stage; None: there are none. All peers must begin their
        sums in the same order."""
        return None if self._lines.peers is None else self._lines.peers.begin_sum(tensor)

    def reduced_by_all(self, count: int) -> int:
        """Waits until all living peers of the stage have called this, and returns the sum of their counts."""
        if self._lines.peers is None:
            return count
        total = torch.full((1,), count, dtype=torch.int64, device=self._layout.device)
        self._lines.peers.sum(total)
        return int(total)

    def drop(self) -> None:
        """Drops all transfers. Buffers that were being received or summed are not written any more when it returns."""
        lines = self._lines
        halt_all(group for group in (lines.forward, lines.backward, lines.peers) if group is not None)
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
        specs = self._specs(kind, key)
        buffers = {i: spec.empty(self._layout.device) for i, spec in specs.items()}
        if self._layout.weighted and not forward:
            buffers[len(self._layout.outgoing)] = torch.zeros(1, dtype=torch.float64, device=self._layout.device)
        if self._layout.varies and specs:
            buffers = {i: buffer.reshape(-1) for i, buffer in buffers.items()}
            dimensions = sum(len(spec.shape) for spec in specs.values())
            buffers[self._shapes_at] = torch.zeros(dimensions, dtype=torch.int64, device=self._layout.device)
        self._receiving[kind, key] = {
            i: group.receive(source, buffer, self._tag(kind, key, i)) for i, buffer in buffers.items()
        }

    def _specs(self, kind: str, key: MicroBatch) -> dict[int, TensorSpec]:
        """Returns what a transfer to this worker brings, by its place in the boundary."""
        return self._passed(self._layout.incoming if kind == "F" else self._layout.outgoing, kind)

    def _passed(self, boundary: StageOutput, kind: str) -> dict[int, TensorSpec]:
        return {i: spec for i, spec in enumerate(boundary) if kind == "F" or spec.gradient}

    @property
    def _shapes_at(self) -> int:
        """The place of the shapes, behind the tensors that they belong to."""
        return self._layout.widest - 1

    @abstractmethod
    def _post(self, kind: str, key: MicroBatch) -> None:
        """Makes sure that the receives of this transfer are posted."""

    @abstractmethod
    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        """Returns the tag of tensor `index` of a boundary, the same on both ends."""


def _flat(
    tensors: Mapping[int, Tensor], specs: Mapping[int, TensorSpec], shapes_at: int, *, whole: bool
) -> dict[int, Tensor]:
    """Returns the tensors as one-dimensional ones, and their shapes last. whole: padded to the longest they may be."""
    sizes = [size for i in specs for size in tensors[i].shape]
    flat = {i: tensor.reshape(-1) for i, tensor in tensors.items()}
    for i, spec in specs.items() if whole else ():
        there = spec.empty(flat[i].device).reshape(-1)
        there[: flat[i].numel()] = flat[i]
        flat[i] = there
    device = next(iter(flat.values())).device
    return flat | {shapes_at: on_device(torch.tensor(sizes, dtype=torch.int64), device)}


def _shaped(arrived: dict[int, Tensor], specs: Mapping[int, TensorSpec], shapes_at: int) -> dict[int, Tensor]:
    """Returns the tensors that `_flat` was given."""
    sizes = iter(arrived.pop(shapes_at).tolist())
    for i, spec in specs.items():
        shape = [next(sizes) for _ in spec.shape]
        arrived[i] = arrived[i][: math.prod(shape)].view(shape)
    return arrived


# -- over groups without tags, as NCCL's are ---------------------------------------------------------

# The n-th receive from a worker gets its n-th send.
#
# A lane is all that one worker sends to another in one direction of the pipeline. Each direction has a group of its
# own, since messages one way must not queue up behind messages the other way. Both ends know the plan: the sender sends
# in the order of its ops, and the receiver posts its receives lane by lane in that same order (`Script.arrivals`),
# which it reads off the plan too. To receive a message that comes later in the lane, it also posts those before it, and
# keeps them until their op asks for them.
#
# Both ends name the same messages in the same order, iteration by iteration:
# - All that is sent to a worker in an iteration is received by it in that iteration, before it begins
#   the next one. So lanes stay in step when neighbours are an iteration apart (staggered steps).
# - What is left of an iteration after a death (`Script.only`) is the same set of micro-batches on all
#   workers, so both ends leave out the same messages.
# - In an iteration that no longer counts, the same ops still send and receive, in the same order.
# - A boundary's tensors follow each other in their order in the boundary.
# - A new generation has new groups.
#
# Why that can't deadlock. Let worker B wait for message m of the lane from A to B. All that A sends in this lane before
# m has a receive posted, so m can get through once A has sent it. A sends it without waiting for B, right after the op
# that the schedule puts before B's. So B waits, as with tags, only for ops that precede its own. Posting what comes
# before m in the lane costs buffers, and never time: it was sent before m was.
#
# Connections are made together with the groups (`connect`). NCCL makes a connection with the first message, and blocks
# the thread until the other end does so too. So all peers of a stage connect first, then the pairs in one global order.
# Of the pairs not yet connected, both ends of the first one have it as their next, so there is always a pair that can
# connect.

_ONE_TAG = 0


class OrderedTransfers(Transfers):
    """Transfers whose messages all have the same tag, so that only their order tells them apart."""

    def __init__(self, lines: GenerationGroups, layout: TransferLayout) -> None:
        """lines: groups whose connections are made (see `connect`)."""
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


def connect(lines: GenerationGroups, neighbours: Collection[Worker], device: torch.device) -> None:
    """Exchanges a first message with every worker with which this one will ever exchange any, and waits for it. Raises
    TransferError, or RuntimeError."""
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
