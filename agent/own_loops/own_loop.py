"""Runs the plan in a training loop of the user's own (Reporter.schedule): the ops of the plan in force, their
transfers, and what becomes of an iteration in which a worker died. It uses the process group that the loop has made.

What each worker does and exchanges is in a Script, and agent.transport exchanges it, as for the executor. Three things
differ from a job of the launcher's (agent.workers.loop), whose workers can roll back a step and declare their shapes:

- Plans change between iterations. In the reduction that ends an iteration, all workers say which generation they know.
  If all say the same, its plan holds from the next iteration on. So all have the same plan without asking the console.
- Shapes are learned: before the first message in a lane, its sender says of which shapes and types the messages are.
- Nobody takes the step before all workers have reduced (`ScheduledOp.reduce`). So if any worker has stepped, all others
  have what their step needs. A worker that a death kept from its step takes it later, alone, from what it has kept. If
  no worker has stepped, all run the iteration again from its start. So the user's loop need not undo anything.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import Tensor

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.messages.protocol import Deployment
from openrecycle.agent.models.layers import CPU, StageOutput, TensorSpec
from openrecycle.agent.monitoring.heartbeat import Status
from openrecycle.agent.monitoring.liveness import AT_REST
from openrecycle.agent.own_loops.own_group import GroupLost
from openrecycle.agent.transport.communicator import TaggedTransfers
from openrecycle.agent.transport.group import GivenGlooGroup, TransferError, first_line, from_bits, to_bits
from openrecycle.agent.transport.transfers import GenerationGroups, Lane, Script, TransferLayout
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import MicroBatch, Op

# torch ships no types for the functions that are used here.
dist: Any = torch.distributed
T = TypeVar("T")

MOST_TENSORS, MOST_DIMENSIONS = 8, 8
"""At most so many tensors in a transfer, and so many dimensions in each tensor."""
AGREE_SECONDS = 60.0
"""How long a new process group waits for a plan of exactly its workers. The console may need most of this to notice a
death."""
ASK_SECONDS = 0.2
_HEADER_TAG = 2**30
_NONE = -1
_DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
)


class Peer(NamedTuple):
    """The other end of a transfer. worker: its name. rank: its rank in the process group."""

    worker: str
    rank: int


class ScheduledOp:
    """One op of this worker; the glossary of planner.plans.schedule.Op has the kinds.

    kind: F, I, W, B (I and W in one) or O. pipeline, micro_batch: the pipeline that the micro-batch belongs to, and its
    index there; for O, this worker's pipeline and -1. stage: this worker's. source: the worker whose output or gradient
    the op takes; destination: the worker that takes the op's own; None where there is none. peers: for O, all workers
    of the stage, with how many micro-batches each has run.
    """

    def __init__(
        self, loop: OwnLoop, op: Op, source: Peer | None, destination: Peer | None, peers: Mapping[str, int]
    ) -> None:
        self.kind, self.pipeline, self.micro_batch, self.stage = op.kind, op.pipeline, op.micro_batch, op.stage
        self.source, self.destination, self.peers = source, destination, peers
        self._loop = loop
        self.waited = 0.0
        """Seconds spent waiting for other workers in this op's transfers. They do not count as the op's own."""
        self.received = self.sent = self.reduced = False

    def receive(self) -> Any:
        """Waits for what `source` sends for this op. Returns a tensor on the CPU, or a tuple of several."""
        if self.source is None or self.received:
            raise InputError("receive", self, "an op with a source, and once for each")
        arrived = self._exchange(lambda transfers: transfers.receive(self._direction, self._key))
        self.received = True
        return arrived[0] if len(arrived) == 1 else tuple(arrived.values())

    def send(self, *tensors: Tensor) -> None:
        """Starts to send tensors to `destination`. They must not be changed in place before the iteration is over, and
        must have the same shapes and types in each iteration."""
        if self.destination is None or self.sent:
            raise InputError("send", self, "an op with a destination, and once for each")
        if not 0 < len(tensors) <= MOST_TENSORS:
            raise InputError("send", f"{len(tensors)} tensors", f"1 to {MOST_TENSORS}")
        outgoing = {i: tensor.detach().to(CPU) for i, tensor in enumerate(tensors)}
        self._exchange(lambda transfers: transfers.send("F" if self.kind == "F" else "I", self._key, outgoing))
        self.sent = True

    def reduce(self, *tensors: Tensor, measure: Callable[[], float] = float) -> float:
        """Sums each tensor over `peers`, in place. Returns when all workers of the job have done so. Only for O, and
        needed even without tensors. The optimizer's step must follow directly: between the two nothing may fail, or
        need other workers.

        measure: called when the tensors are summed. The sum of what it returns over the stages, with one worker each,
        is returned: the sum of squared norms, say, to clip gradients.
        """
        if self.kind != "O" or self.reduced:
            raise InputError("reduce", self, "an op O, and once for each")
        started = time.perf_counter()
        total = self._loop.reduce(tensors, measure)
        self.reduced, self.waited = True, self.waited + time.perf_counter() - started
        return total

    @property
    def lacks(self) -> str:
        """The call that was left out; "": none."""
        if self.source is not None and not self.received:
            return "receive"
        return "send" if self.destination is not None and not self.sent else ""

    @property
    def _key(self) -> MicroBatch:
        return self.pipeline, self.micro_batch

    @property
    def _direction(self) -> str:
        return "F" if self.kind == "F" else "I"

    def _exchange(self, act: Callable[[LearnedTransfers], T]) -> T:
        started = time.perf_counter()
        try:
            return self._loop.exchange(act)
        finally:
            self.waited += time.perf_counter() - started

    def __repr__(self) -> str:
        micro_batch = "" if self.kind == "O" else f" of micro-batch {self.pipeline}.{self.micro_batch}"
        return f"{self.kind}{micro_batch} on stage {self.stage}"


class LearnedTransfers(TaggedTransfers):
    """Transfers of shapes that nobody has declared. The first message in a lane has a fixed size, and describes the
    others.

    It has its own tag, and is sent right before the first data of the lane. So a worker that waits for it waits for
    nothing that comes later than the data it needs.
    """

    def __init__(self, lines: GenerationGroups, job: Job) -> None:
        super().__init__(lines, TransferLayout(job, (), (), MOST_TENSORS, CPU))
        self._learned: dict[Lane, StageOutput] = {}
        self._said: dict[Lane, StageOutput] = {}

    def send(self, kind: str, key: MicroBatch, tensors: Mapping[int, Tensor]) -> None:
        """Raises InputError for other shapes than before in the same lane."""
        lane = kind, (self._script.after if kind == "F" else self._script.before)[key]
        specs = tuple(TensorSpec.of(tensor) for tensor in tensors.values())
        if lane not in self._said:
            group = self._lines.forward if kind == "F" else self._lines.backward
            pending = group.send(self._lines.rank[lane[1]], _header(specs), _HEADER_TAG + "FI".index(kind))
            self._sent.setdefault((self._iteration, kind, key), []).append(pending)
            self._said[lane] = specs
        if self._said[lane] != specs:
            text = ", ".join(map(str, specs))
            raise InputError("send", text, f"{', '.join(map(str, self._said[lane]))}, as sent to {lane[1]} before")
        super().send(kind, key, tensors)

    def receive(self, kind: str, key: MicroBatch) -> dict[int, Tensor]:
        lane = self._lane(kind, key)
        if lane not in self._learned:
            group = self._lines.forward if kind == "F" else self._lines.backward
            header = torch.zeros_like(_header(()))
            pending = group.receive(self._lines.rank[lane[1]], header, _HEADER_TAG + "FI".index(kind))
            self._learned[lane] = _read(pending.wait())
            for waiting in [transfer for transfer in self._receiving if self._lane(*transfer) == lane]:
                self._listen(*waiting)
        return super().receive(kind, key)

    def _specs(self, kind: str, key: MicroBatch) -> dict[int, TensorSpec]:
        """Returns no specs, so that nothing is received yet, before the shapes of the lane are known."""
        return dict(enumerate(self._learned.get(self._lane(kind, key), ())))

    def _lane(self, kind: str, key: MicroBatch) -> Lane:
        return kind, (self._script.before if kind == "F" else self._script.after)[key]


class _Joined(NamedTuple):
    """What was made for one process group. world: that group, as a weak reference, which does not keep it alive."""

    world: Any
    lines: GenerationGroups
    transfers: LearnedTransfers
    members: tuple[Worker, ...]


class OwnLoop:
    """The schedule of one worker, through all the process groups of its loop.

    newest: returns what the console has deployed last. wait: waits for a newer generation than the given one, for at
    most so many seconds. done: called when an iteration is done.
    """

    def __init__(
        self,
        me: Worker,
        job: Job,
        status: Status,
        newest: Callable[[], tuple[Deployment, Plan] | None],
        wait: Callable[[int, float], None],
        done: Callable[[int], None],
    ) -> None:
        self._me, self._job, self._progress, self._times = me, job, status.progress, status.times
        self._newest, self._wait, self._done = newest, wait, done
        self._timeouts = Timeouts()
        self._joined: _Joined | None = None
        self._world: Any = None
        """A weak reference to the process group that was used last, whether it is lost or not."""
        self._lock = threading.Lock()
        self.generation = 0
        """The generation whose plan is run."""
        self._agreed: tuple[Deployment, Plan] | None = None
        """What all workers have agreed to change to with the next iteration."""
        self._script: Script
        self._peers: dict[str, int] = {}
        self._iteration = 0
        self.released: int | None = None
        """The last iteration whose step this worker has taken, or is about to take."""
        self.kept: tuple[int, list[Tensor]] | None = None
        """The number and the sums of an iteration that this worker has reduced, while it does not know whether all
        workers have. They are handed over with this worker's state: the step may be all that is left of the
        iteration."""
        self._late = False
        self._unheard: tuple[int, float | None] = _NONE, None
        """An iteration that this worker has reduced without hearing that all have, and what `reduce` returns there;
        None: that depends on the others."""
        self.alone = False
        """Have the others ended? They have taken the last step, which is all that is left to do here, too."""
        self._total = 0.0
        """What the last iteration's `reduce` has returned."""
        # Why the last group was lost, and the other end of the transfer that broke, where that is known.
        self.lost: tuple[str, str] = "", ""
        self._used, self._incomplete = False, ""
        """Has this iteration had a transfer? And the first call that was left out, in words."""
        self._open: ScheduledOp | str = ""
        """The op that the current iterator has reached; "": it is at its end."""

    # -- for the reporter -------------------------------------------------------------------------

    def may_step_alone(self, iteration: int) -> bool:
        """Says whether this worker has reduced the iteration, was kept from its step, and needs nothing more for it."""
        reduced, total = self._unheard
        return self.kept is not None and self.kept[0] == reduced == iteration and total is not None

    def begin(self, iteration: int) -> Iterator[ScheduledOp]:
        """Returns the ops of an iteration, after all workers have agreed on them. Raises GroupLost, InputError or
        RuntimeError."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None:
            raise RuntimeError("schedule: there is no process group: call torch.distributed.init_process_group first")
        known = self._world is not None and self._world() is world
        if known and self._joined is None:
            raise RuntimeError(
                f"schedule: the process group of generation {self.generation} is lost: destroy it, and form a new one "
                "of the workers that Reporter.membership names"
            )
        if known and self._open:
            raise RuntimeError(
                f"schedule: iteration {self._iteration} was left at {self._open}, and its peers wait for the rest: "
                "iterate to the end, or form a new process group"
            )
        expected = self._iteration + 1 if known else None if self.released is None else self.released + 1
        if expected is not None and iteration != expected:
            raise InputError("iteration", iteration, f"{expected}, which is the next one on this worker")
        try:
            if self.alone:
                self._late, self._iteration, self._open = True, iteration, "its beginning"
                self._total = self._unheard[1] or 0.0
                return self._ops(iteration)
            if not known:
                self._enter(world, iteration)
            elif self._agreed is not None:
                self._change_to(*self._agreed)
            joined = self._need()
            if not self._late:
                joined.transfers.let_go(iteration)
                joined.transfers.begin(iteration, self._script)
        except RuntimeError as error:
            raise self._lose(error) from error
        self._iteration, self._open = iteration, "its beginning"
        return self._ops(iteration)

    def lost_without(self, deployment: Deployment) -> None:
        """Wakes the loop if it waits for a worker that the console has given up. May be called in any thread."""
        with self._lock:
            joined = self._joined
        staying = {*deployment.living, *deployment.leaving}
        if joined is not None and not staying.issuperset(map(str, joined.members)):
            _cancel(joined)

    # -- for the ops ------------------------------------------------------------------------------

    def exchange(self, act: Callable[[LearnedTransfers], T]) -> T:
        """Makes a transfer. Raises GroupLost."""
        self._used = True
        self._check_complete()
        try:
            with self._progress.waiting():
                return act(self._need().transfers)
        except TransferError as error:
            raise self._lose(error) from error

    def reduce(self, tensors: tuple[Tensor, ...], measure: Callable[[], float]) -> float:
        """See ScheduledOp.reduce. Raises GroupLost."""
        iteration = self._iteration
        if self._late:  # the others have stepped, so all have agreed on these sums
            kept = self.kept[1] if self.kept is not None else []
            if [t.shape for t in tensors] != [t.shape for t in kept]:
                raise InputError("reduce", len(tensors), "the tensors that this iteration was reduced with")
            with torch.no_grad():
                for mine, total in zip(tensors, kept, strict=True):
                    mine.copy_(total)
            self.kept, self.released = None, iteration
            return self._total
        newest, measured = self._newest(), None
        generation = newest[0].generation if newest is not None else 0
        try:
            joined = self._need()
            with self._progress.waiting():
                for tensor in tensors:
                    joined.transfers.reduce(tensor.detach())
                measured = measure()
                known = self._gather(joined.lines, [generation, to_bits(measured)])
        except TransferError as error:
            if measured is not None:
                self.kept = iteration, [tensor.detach().clone() for tensor in tensors]
                self._unheard = iteration, measured if measure is float or self._job.stages == 1 else None
            raise self._lose(error) from error
        self.released = iteration
        if newest is not None and generation > self.generation and all(row[0] == generation for row in known.values()):
            self._agreed = newest
        speakers = {worker.stage: row for worker, row in sorted(known.items(), reverse=True)}
        self._total = math.fsum(from_bits(row[1]) for row in speakers.values())
        return self._total

    # -- in between -------------------------------------------------------------------------------

    def _ops(self, iteration: int) -> Iterator[ScheduledOp]:
        self._used, self._incomplete = False, ""
        for planned in self._script.ops:
            if self._late and planned.kind != "O":
                continue
            op = self._open = self._scheduled(planned)
            self._progress.at(op.kind, None if op.kind == "O" else (op.pipeline, op.micro_batch))
            started = time.perf_counter()
            try:
                yield op
            finally:
                seconds = time.perf_counter() - started
                self._progress.at(AT_REST)
            self._times.add(op.kind, seconds - op.waited)
            if op.lacks:
                self._incomplete = self._incomplete or f"{op!r} has ended without {op.lacks}: its peer waits for it"
            self._check_complete()
            if op.kind == "O" and not op.reduced:
                raise RuntimeError(f"{op!r} has ended without reduce: all workers wait for it")
        self._open, self._late = "", False
        self._progress.warmed_up()
        self._done(iteration)

    def _check_complete(self) -> None:
        """Raises RuntimeError where some transfers are left out, since peers wait for them. A loop may leave out all of
        them, and move its data by other means."""
        if self._used and self._incomplete:
            raise RuntimeError(self._incomplete)

    def _scheduled(self, op: Op) -> ScheduledOp:
        script, key = self._script, (op.pipeline, op.micro_batch)
        before, after = script.before.get(key), script.after.get(key)
        source, destination = {"F": (before, after), "I": (after, before), "B": (after, before)}.get(
            op.kind, (None, None)
        )
        return ScheduledOp(self, op, self._peer(source), self._peer(destination), self._peers if op.kind == "O" else {})

    def _peer(self, worker: Worker | None) -> Peer | None:
        return None if worker is None else Peer(str(worker), self._need().lines.rank[worker])

    def _enter(self, world: Any, iteration: int) -> None:
        """Enters a new process group. Its workers agree who is in it, on a plan, and on the iteration to go on from."""
        self._world, self._joined, self._agreed, self._open, self._late = weakref.ref(world), None, None, "", False
        rank, ranks, form = dist.get_rank(), range(dist.get_world_size()), timedelta(seconds=self._timeouts.form)
        all_ranks = dist.new_group(timeout=form, backend="gloo")
        names = (Worker(0, 0),) * len(ranks)
        # All workers ask at the same pace, so these waits need not be longer than to form a group.
        asking = replace(self._timeouts, transfer=self._timeouts.form / 2, group=self._timeouts.form)
        control = GivenGlooGroup(all_ranks, rank, names, asking)
        deadline = time.monotonic() + AGREE_SECONDS
        while True:
            newest = self._newest()
            generation = newest[0].generation if newest is not None else 0
            kept = self.kept[0] if self.kept is not None else _NONE
            released = _NONE if self.released is None else self.released
            overdue = int(time.monotonic() > deadline)
            mine = [*self._me, generation, overdue, iteration, kept, released, to_bits(self._total)]
            table = torch.zeros((len(ranks), len(mine)), dtype=torch.int64)
            table[rank] = torch.tensor(mine)
            control.sum(table)
            rows = table.tolist()
            members = tuple(Worker(row[0], row[1]) for row in rows)
            generations = {row[2] for row in rows}
            if len(set(members)) < len(members):
                raise _Unmendable(f"two processes of the process group are the same worker: {_names(members)}")
            if newest is not None and generations == {generation} and set(newest[0].living) == set(map(str, members)):
                break
            if any(row[3] for row in rows):
                plan = "no plan" if newest is None else f"a plan for {', '.join(newest[0].living)}"
                raise TransferError(f"the process group has {_names(members)}, and the console has {plan}")
            self._wait(generation, ASK_SECONDS)
        next_one = max(row[4] for row in rows)
        for member, (_, _, _, _, asked, kept, *_) in zip(members, rows, strict=True):
            if asked < next_one and not asked == next_one - 1 == kept:
                raise _Unmendable(f"{member} asks for iteration {asked}, and others for {next_one}")
        self._late = iteration < next_one
        if self._late:
            self._total = next(from_bits(row[7]) for row in rows if row[6] == iteration)
        else:
            self.kept = None
        stage = [member for member in members if member.stage == self._me.stage]
        peers = None
        if len(stage) > 1:
            at = [members.index(member) for member in stage]
            made = dist.new_group(at, timeout=form, backend="gloo", use_local_synchronization=True)
            peers = GivenGlooGroup(made, stage.index(self._me), stage, self._timeouts)
        control = GivenGlooGroup(all_ranks, rank, members, self._timeouts)
        lines = GenerationGroups(self._me, control, control, peers, {member: i for i, member in enumerate(members)})
        joined = _Joined(self._world, lines, LearnedTransfers(lines, self._job), members)
        with self._lock:
            self._joined = joined
        self._change_to(*newest)

    def _change_to(self, deployment: Deployment, plan: Plan) -> None:
        """Changes to another plan. All workers do this at once, between two iterations."""
        joined, self._agreed = self._need(), None
        grid = self._job.pipelines, self._job.stages, self._job.micro_batches
        if (plan.job.pipelines, plan.job.stages, plan.job.micro_batches) != grid:
            found = f"{plan.job.pipelines} pipelines, {plan.job.stages} stages, {plan.job.micro_batches} micro-batches"
            raise InputError("job", f"a plan of {found}", f"{grid[0]}, {grid[1]} and {grid[2]}, as this Reporter's job")
        if set(deployment.living) != set(map(str, joined.members)):
            raise TransferError(f"from generation {deployment.generation} on the job has other workers")
        schedule = plan.schedule()
        self.generation, self._script = deployment.generation, Script.of(schedule, self._me)
        stage = sorted(member for member in joined.members if member.stage == self._me.stage)
        self._peers = {str(w): sum(op.kind == "F" for op in schedule.ops.get(w, ())) for w in stage}

    def _gather(self, lines: GenerationGroups, values: list[int]) -> dict[Worker, list[int]]:
        """Returns the `values` of all workers."""
        table = torch.zeros((len(lines.rank), len(values)), dtype=torch.int64)
        table[lines.rank[self._me]] = torch.tensor(values)
        lines.forward.sum(table)
        return {worker: table[rank].tolist() for worker, rank in lines.rank.items()}

    def _need(self) -> _Joined:
        if self._joined is None:
            raise TransferError("the process group is lost")
        return self._joined

    def _lose(self, error: RuntimeError) -> RuntimeError:
        """Lets go of what was made in the group, which wakes whatever waits in it, and returns the error to raise."""
        with self._lock:
            joined, self._joined = self._joined, None
        if joined is not None:
            _cancel(joined)
        if isinstance(error, _Unmendable):
            return RuntimeError(f"schedule: {error}")
        peer = error.peer if isinstance(error, TransferError) else None
        why = first_line(error)
        self.lost = why, "" if peer is None else str(peer)
        return GroupLost(f"the process group of generation {self.generation} is lost: {why}", peer)


class _Unmendable(RuntimeError):
    """The workers of a process group do not fit together, and a new group of the same processes would not help."""


def _cancel(joined: _Joined) -> None:
    for group in (joined.lines.forward, joined.lines.peers):
        if group is not None:
            group.cancel()
            group.close()  # this also wakes peers that no wait here is for


def _names(members: tuple[Worker, ...]) -> str:
    return ", ".join(map(str, members))


def _header(specs: StageOutput) -> Tensor:
    """Describes tensors: how many there are; and of each its type, its number of dimensions, and their sizes."""
    numbers = [len(specs)]
    for i, spec in enumerate(specs):
        if spec.dtype not in _DTYPES or len(spec.shape) > MOST_DIMENSIONS:
            expected = f"one of {', '.join(_DTYPES)}, with up to {MOST_DIMENSIONS} dimensions"
            raise InputError(f"send[{i}]", spec, expected)
        dimensions = [*spec.shape, *[0] * (MOST_DIMENSIONS - len(spec.shape))]
        numbers += [_DTYPES.index(spec.dtype), len(spec.shape), *dimensions]
    size = 1 + MOST_TENSORS * (2 + MOST_DIMENSIONS)
    return torch.tensor(numbers + [0] * (size - len(numbers)), dtype=torch.int64)


def _read(header: Tensor) -> StageOutput:
    count, *rest = header.tolist()
    parts = [rest[i * (2 + MOST_DIMENSIONS) :] for i in range(count)]
    return tuple(TensorSpec(tuple(part[2 : 2 + part[1]]), _DTYPES[part[0]]) for part in parts)
