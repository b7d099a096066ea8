"""What one worker does in every iteration of a generation (`Script`), and what its ops give to and take from the
workers of the neighbouring stages (`Transfers`).

Two ways to tell messages apart, for groups that have tags (gloo) and for those that have none (NCCL).
Either way sends never wait for the receiver, and receives are posted ahead of the op that needs them,
PREFETCH in the receiver's own order, and handed over by key.

Why an order that a valid schedule has can't deadlock: a worker waits only in `receive`, for one
message. With tags that message needs nothing but its send, which is asynchronous and comes right
after the op that the schedule puts before this one. Without tags it must also be the turn of that
message in its lane; see OrderedTransfers. So whoever waits waits for an op that precedes
its own in the schedule, by the order of a worker's ops or by a transfer, and these precedences have
no cycle.
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
"""`F`: what a forward hands to the next stage; `I`: the gradient that comes back."""
Lane = tuple[str, Worker]
"""All transfers of a kind that come from one worker."""


@dataclass(frozen=True)
class Script:
    """ops: in order. before, after: for each micro-batch, who runs it on the previous and next stage.

    arrivals: per lane the micro-batches that come to this worker, in the order in which that worker
    sends them, which need not be the order in which this one wants them. alone: who runs all micro-batches of this
    worker's stage, where one does.
    """

    ops: tuple[Op, ...]
    before: Mapping[MicroBatch, Worker]
    after: Mapping[MicroBatch, Worker]
    arrivals: Mapping[Lane, tuple[MicroBatch, ...]]
    alone: Worker | None = None

    @classmethod
    def of(cls, schedule: Schedule, me: Worker, runs: Mapping[Worker, Sequence[Worker]] | None = None) -> Script:
        """runs: whose part of the plan a worker does, of its stage, where that is not just its own. By the plan's times
        all of it is still in an order that can't deadlock.

        A worker that the plan does without runs nothing but its stage's reduction and step.
        """
        stages = me.stage - 1, me.stage + 1

        def matters(worker: Worker) -> bool:  # the ops of others are not even made
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
        """The same order without the ops of these micro-batches."""
        return self.only({(op.pipeline, op.micro_batch) for op in self.ops} - set(keys)) if keys else self

    def only(self, keys: Collection[MicroBatch]) -> Script:
        """The same order with the ops of these micro-batches, and the step; the lanes stay, be they empty."""
        ops = tuple(op for op in self.ops if op.kind == "O" or (op.pipeline, op.micro_batch) in keys)
        arrivals = {lane: tuple(key for key in coming if key in keys) for lane, coming in self.arrivals.items()}
        return replace(self, ops=ops, arrivals=arrivals)

    def forwards(self, keys: Collection[MicroBatch]) -> Script:
        """The same order with the forwards of these micro-batches alone."""
        script = self.only(keys)
        ops = tuple(op for op in script.ops if op.kind == "F")
        arrivals = {lane: coming if lane[0] == "F" else () for lane, coming in script.arrivals.items()}
        return replace(script, ops=ops, arrivals=arrivals)

    def receives(self) -> list[Transfer]:
        """Of every op that waits for a transfer, in order."""
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
        """Everybody with whom this worker exchanges anything; each of them says the same of this one."""
        return frozenset(worker for _, worker in self.arrivals)


# -- what a worker's ops give to and take from neighbouring stages ------------------------------

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

    widest: most tensors of any boundary of the job, with what follows them. device: where the stage computes. weighted:
    a micro-batch's weight (float64, one element) follows its gradients. varies: shapes are at most those of incoming
    and outgoing; what they are (int64) follows last, where any are passed.
    """

    job: Job
    incoming: StageOutput
    outgoing: StageOutput
    widest: int
    device: torch.device
    weighted: bool = False
    varies: bool = False


class Transfers(ABC):
    """One worker's transfers, one iteration after the other; for one generation. Raises TransferError."""

    def __init__(self, lines: Lines, layout: TransferLayout) -> None:
        self._lines, self._layout = lines, layout
        self._sent: dict[tuple[int, str, MicroBatch], list[PendingTransfer]] = {}
        """By iteration, in the order in which they were."""
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
        specs = self._passed(self._layout.outgoing if forward else self._layout.incoming, kind)
        if self._layout.varies and specs:
            tensors = _flat(tensors, specs, self._shapes_at, whole=group.whole_buffers)
        for i, tensor in tensors.items():
            pending = group.send(to, tensor.contiguous(), self._tag(kind, key, i))
            self._sent.setdefault((self._iteration, kind, key), []).append(pending)

    def receive(self, kind: str, key: MicroBatch) -> dict[int, Tensor]:
        """The tensors that were sent, by their place in the boundary; waits for them."""
        arrived = {i: pending.wait() for i, pending in self._receiving.pop((kind, key)).items()}
        if kind == "I" and arrived:  # whoever gives gradients of it has the output, so this does not wait
            self._forget((self._iteration, "F", key))
        self._ahead -= 1
        self._post_ahead()
        specs = self._specs(kind, key)
        return _shaped(arrived, specs, self._shapes_at) if self._layout.varies and specs else arrived

    def arrived(self, kind: str, key: MicroBatch) -> bool:
        """Will `receive` not wait? False where that can't be told."""
        return all(pending.arrived() for pending in self._receiving[kind, key].values())

    def let_go(self, before: int | None = None) -> None:
        """Waits until peers have all that was sent (of iterations before this one), and forgets it."""
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
        """Starts that; None where there is nobody to sum with. All peers begin theirs in the same order."""
        return None if self._lines.peers is None else self._lines.peers.begin_sum(tensor)

    def reduced_by_all(self, count: int) -> int:
        """Returns once all living peers of the stage have come to this line; the sum of their counts."""
        if self._lines.peers is None:
            return count
        total = torch.full((1,), count, dtype=torch.int64, device=self._layout.device)
        self._lines.peers.sum(total)
        return int(total)

    def drop(self) -> None:
        """Forgets everything under way; what was being received or summed is not touched any more."""
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
        """What a transfer to this worker brings, by its place in the boundary."""
        return self._passed(self._layout.incoming if kind == "F" else self._layout.outgoing, kind)

    def _passed(self, boundary: StageOutput, kind: str) -> dict[int, TensorSpec]:
        return {i: spec for i, spec in enumerate(boundary) if kind == "F" or spec.gradient}

    @property
    def _shapes_at(self) -> int:
        """The place of the shapes of what is sent with them."""
        return self._layout.widest - 1

    @abstractmethod
    def _post(self, kind: str, key: MicroBatch) -> None:
        """Makes sure that the receives of this transfer are posted."""

    @abstractmethod
    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        """Of tensor `index` of a boundary; both ends say the same."""


def _flat(
    tensors: Mapping[int, Tensor], specs: Mapping[int, TensorSpec], shapes_at: int, *, whole: bool
) -> dict[int, Tensor]:
    """Tensors without their shapes, and these at last. whole: as long as they may be at most."""
    sizes = [size for i in specs for size in tensors[i].shape]
    flat = {i: tensor.reshape(-1) for i, tensor in tensors.items()}
    for i, spec in specs.items() if whole else ():
        there = spec.empty(flat[i].device).reshape(-1)
        there[: flat[i].numel()] = flat[i]
        flat[i] = there
    device = next(iter(flat.values())).device
    return flat | {shapes_at: on_device(torch.tensor(sizes, dtype=torch.int64), device)}


def _shaped(arrived: dict[int, Tensor], specs: Mapping[int, TensorSpec], shapes_at: int) -> dict[int, Tensor]:
    """What `_flat` was given."""
    sizes = iter(arrived.pop(shapes_at).tolist())
    for i, spec in specs.items():
        shape = [next(sizes) for _ in spec.shape]
        arrived[i] = arrived[i][: math.prod(shape)].view(shape)
    return arrived


# -- over groups without tags, as NCCL's are ---------------------------------------------------------

# The n-th receive from a worker gets its n-th send.
#
# A lane is all that one worker sends to another in one direction of the pipeline; it has a group of
# its own per direction, since what goes one way must not queue up behind what goes the other way. Both
# ends know the plan: the sender sends in the order of its ops, and the receiver posts its receives
# lane by lane in that same order (`Script.arrivals`), which it reads off the plan too. Where it wants
# a message that comes later in the lane, it posts those before it as well, and keeps them until their
# op asks for them.
#
# Both ends name the same messages in the same order, iteration by iteration:
# - All that is sent to a worker in an iteration is received by it in that iteration, before it begins
#   the next one. So lanes stay in step when neighbours are an iteration apart (staggered steps).
# - What is left of an iteration after a death (`Script.only`) is the same set of micro-batches on all
#   workers, so that both ends leave out the same messages.
# - An iteration that counts no more is passed on: the same ops still send and receive, in the same order.
# - A boundary's tensors follow each other in their order in the boundary.
# - A new generation has new groups.
#
# Why that can't deadlock. Let B wait for message m of lane A to B. All that A sends in this lane before m
# has a receive posted, so m can get through once A has sent it; and A sends it without waiting for B, right
# after the op that the schedule puts before B's. So B waits, as with tags, only for ops that precede its own.
# Posting what comes before m in the lane costs buffers, and never time: it was sent before m was.
#
# Connections are made while the groups are (`connect`), since NCCL makes them with the first message, and blocks
# the thread until the other end does so too: first all peers of a stage, then the pairs in one global order.
# Of the pairs not yet connected, both ends of the least have it as their next, so there is always one that
# gets on.

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
