"""Workers without processes: real executors over groups without tags, in an order drawn by chance.

Threads of which one runs at a time. Whoever waits says for what; when all wait for what nobody will do,
that is a deadlock, found at once. Each message carries a label, of which the code under test knows
nothing; whoever asks for a message must get the one with its label.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from openrecycle.agent.config.faults import FaultInjector
from openrecycle.agent.models.layers import CPU, TensorSpec
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.transport.ranks import Ranks
from openrecycle.agent.transport.transfers import (
    GenerationGroups,
    OrderedTransfers,
    Script,
    TransferLayout,
    Transfers,
    connect,
)
from openrecycle.agent.workers.executor import Executor, OpError
from openrecycle.agent.workers.recovery import Redo
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.schedule import MicroBatch, Schedule

WIDE, NARROW = TensorSpec((2,), "float32"), TensorSpec((1,), "int64", gradient=False)


class Deadlock(AssertionError):
    """Everybody waits."""


class Mispaired(AssertionError):
    """A receive got a message that was meant for another one."""


class _Ended(BaseException):
    pass


class Baton:
    """Runs functions in threads, one at a time; who is next is drawn."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._turn: dict[int, threading.Semaphore] = {}
        self._ready: dict[int, Callable[[], bool]] = {}
        self._back = threading.Semaphore(0)
        self._mine = threading.local()
        self._error: BaseException | None = None
        self._ending = False

    def run(self, tasks: list[Callable[[], None]]) -> None:
        """Raises what the first task to fail raised, or Deadlock."""
        threads = []
        for number, task in enumerate(tasks):
            self._turn[number], self._ready[number] = threading.Semaphore(0), lambda: True
            threads.append(threading.Thread(target=self._live, args=(number, task), daemon=True))
        for thread in threads:
            thread.start()
        while self._ready and self._error is None:
            able = [number for number, ready in self._ready.items() if ready()]
            if not able:
                self._error = Deadlock(f"{len(self._ready)} of {len(tasks)} workers wait for each other")
                break
            self._give(self._random.choice(able))
        self._ending = True
        for number in list(self._ready):
            self._give(number)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def until(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets others run, until `ready`."""
        number = self._mine.number
        self._ready[number] = ready
        self._back.release()
        self._turn[number].acquire()
        if self._ending:
            raise _Ended

    def _give(self, number: int) -> None:
        self._turn[number].release()
        self._back.acquire()

    def _live(self, number: int, task: Callable[[], None]) -> None:
        self._mine.number = number
        self._turn[number].acquire()
        try:
            if not self._ending:
                task()
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        del self._ready[number]
        self._back.release()


@dataclass
class _Pending:
    baton: Baton
    tensor: Tensor
    label: Any
    done: bool = False
    taken: bool = False

    def arrived(self) -> bool:
        return self.done

    def wait(self) -> Tensor:
        self.baton.until(lambda: self.done)
        self.taken = True
        return self.tensor


@dataclass
class Wires:
    """All lanes of a grid. met: for each pair, which of its ends have connected. sums: of each stage, what each worker
    has come to. messages: that arrived. awaited: the receives of each rank that it has posted and not waited for. most:
    that anybody had of those at once. tags: that were said; the wires go by none."""

    baton: Baton
    sent: dict[Any, deque[_Pending]] = field(default_factory=dict)
    posted: dict[Any, deque[_Pending]] = field(default_factory=dict)
    met: dict[Any, set[int]] = field(default_factory=dict)
    sums: dict[Any, list[list[str]]] = field(default_factory=dict)
    messages: int = 0
    awaited: dict[int, list[_Pending]] = field(default_factory=dict)
    most: int = 0
    tags: set[int] = field(default_factory=set)

    def put(self, where: dict[Any, deque[_Pending]], lane: Any, tensor: Tensor, label: Any = None) -> _Pending:
        pending = _Pending(self.baton, tensor, label)
        where.setdefault(lane, deque()).append(pending)
        out, into = self.sent.get(lane), self.posted.get(lane)
        while out and into:
            message, receive = out.popleft(), into.popleft()
            if _form(message.tensor) != _form(receive.tensor):
                raise Mispaired(f"lane {lane}: sent {message.tensor}, expected {receive.tensor}")
            receive.tensor.copy_(message.tensor)
            receive.tensor.label = message.label  # type: ignore[attr-defined]
            message.done = receive.done = True
            self.messages += 1
        return pending

    def post(self, rank: int, lane: Any, buffer: Tensor) -> _Pending:
        pending = self.put(self.posted, lane, buffer)
        self.awaited[rank] = [known for known in self.awaited.get(rank, ()) if not known.taken] + [pending]
        self.most = max(self.most, len(self.awaited[rank]))
        return pending


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


class Group:
    """As NCCL: no tags, and the first message of a pair blocks until the other end is there."""

    def __init__(self, wires: Wires, name: str, rank: int) -> None:
        self._wires, self._name, self.rank = wires, name, rank
        self.label: Any = None

    def send(self, to: int, tensor: Tensor, tag: int) -> _Pending:
        self._wires.tags.add(tag)
        self._connect(to)
        return self._wires.put(self._wires.sent, (self._name, self.rank, to), tensor.clone(), self.label)

    def receive(self, source: int, buffer: Tensor, tag: int) -> _Pending:
        self._wires.tags.add(tag)
        self._connect(source)
        return self._wires.post(self.rank, (self._name, source, self.rank), buffer)

    def cancel(self) -> None:
        raise NotImplementedError

    halt = cancel

    def _connect(self, other: int) -> None:
        met = self._wires.met.setdefault((self._name, *sorted((self.rank, other))), set())
        if len(met) < 2:
            met.add(self.rank)
            self._wires.baton.until(lambda: len(met) == 2)
        self._wires.baton.until()


@dataclass
class _Met:
    """A sum that this worker has come to. number: among those of its stage."""

    peers: Peers
    number: int
    tensor: Tensor

    def wait(self) -> Tensor:
        self.peers.all_there(self.number)
        return self.tensor


class Peers(Group):
    """The reduction of a stage: nobody leaves before all are there, who come to the same."""

    def __init__(self, wires: Wires, stage: int, size: int) -> None:
        super().__init__(wires, f"stage{stage}", 0)
        self._size, self._count = size, 0

    def begin_sum(self, tensor: Tensor) -> _Met:
        return self._begin("sum", tensor)

    def begin_broadcast(self, tensor: Tensor, source: int) -> _Met:
        return self._begin(f"from {source}", tensor)

    def _begin(self, what: str, tensor: Tensor) -> _Met:
        rounds = self._wires.sums.setdefault(self._name, [])
        if len(rounds) <= self._count:
            rounds.append([])
        rounds[self._count].append(what)
        if len(set(rounds[self._count])) > 1:
            raise Mispaired(f"{self._name}: {rounds[self._count]}")
        self._count += 1
        return _Met(self, self._count - 1, tensor)

    def sum(self, tensor: Tensor) -> None:
        self.begin_sum(tensor).wait()

    def all_there(self, number: int) -> None:
        self._wires.baton.until(lambda: len(self._wires.sums[self._name][number]) == self._size)


@dataclass(frozen=True)
class Round:
    """One iteration as all run it. keys: those that are run, None for all. void: at which of its ops
    each worker finds out that the iteration counts no more; {} where it does. left_out: by all."""

    keys: frozenset[MicroBatch] | None = None
    void: Mapping[Worker, int] = field(default_factory=dict)
    left_out: frozenset[MicroBatch] = frozenset()


class _Stage:
    """Holds nothing; its outputs have the shapes that the stage_io say."""

    def __init__(
        self,
        outgoing: tuple[TensorSpec, ...],
        incoming: tuple[TensorSpec, ...],
        took: Callable[[MicroBatch, Any], None],
    ) -> None:
        self._outgoing, self._incoming, self._took = outgoing, incoming, took
        self._parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
        # Each is a bucket: one begins beside the last backward.
        self.gradients = GradientSum(self._parameters, terms=1, bucket_bytes=1)

    def count_elsewhere(self, keys: frozenset[MicroBatch]) -> None: ...

    def forward(self, key: MicroBatch, x: Any, *, seed: int, loss: Any = None, wanted: Any = None) -> Any:
        self._took(key, x)
        y = tuple(torch.full_like(spec.empty(), -1) for spec in self._outgoing)
        return y[0] if len(y) == 1 else y

    def input_backward(self, key: MicroBatch, dy: Any) -> Any:
        return tuple(spec.empty() if spec.gradient else None for spec in self._incoming)

    def weight_backward(self, key: MicroBatch) -> None:
        self._to_come -= 1
        if not self._to_come:
            self._last.add(self._parameters[1], torch.zeros(1))

    def expect(self, micro_batches: int, last: Any) -> None:
        self._to_come, self._last = micro_batches, last

    def counted(self, key: MicroBatch) -> bool:
        return False

    def abandon(self, *, keep_settled: bool = False, let_go: Any = None) -> None: ...


class _Steps:
    """Overturns the step before at the op that the round says, at the latest before its own."""

    in_doubt = False

    def __init__(self, me: Worker) -> None:
        self._me = me
        self._left: int | None = None

    def begin(self, current: Round) -> None:
        self._left = current.void.get(self._me)

    def overturned(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0

    def settle(self) -> bool:
        return self._left is not None

    def take(self, incomplete: int, *, by_all: bool = True) -> float:
        return 0.0


class Labelled(Transfers):
    """Labels what it sends, and looks at the labels of what it gets."""

    def __init__(self, lines: GenerationGroups, layout: TransferLayout) -> None:
        super().__init__(lines, layout)
        self.lines, self.iteration = lines, 0

    def begin(self, iteration: int, script: Script) -> None:
        self.iteration = iteration
        super().begin(iteration, script)

    def send(self, kind: str, key: MicroBatch, tensors: Mapping[int, Tensor]) -> None:
        group: Any = self.lines.forward if kind == "F" else self.lines.backward
        group.label = self.iteration, kind, key
        super().send(kind, key, tensors)

    def receive(self, kind: str, key: MicroBatch) -> dict[int, Tensor]:
        got = super().receive(kind, key)
        for tensor in got.values():
            if (label := tensor.label) != (self.iteration, kind, key):  # type: ignore[attr-defined]
                raise Mispaired(f"{self.lines.me} got {label}, expected {self.iteration, kind, key}")
        return got


class LabelledByOrder(Labelled, OrderedTransfers):
    """As workers have them over NCCL."""


NOTHING_READ = SimpleNamespace(inputs=lambda *place: None, targets=lambda *place: None)


def train(
    schedule: Schedule,
    rounds: list[Round],
    *,
    width: int,
    seed: int,
    kind: type[Transfers] = LabelledByOrder,
    connects: bool = True,
    runs: Mapping[Worker, tuple[Worker, ...]] | None = None,
    workload: Any = NOTHING_READ,
    took: Callable[[Worker, MicroBatch, Any], None] = lambda worker, key, x: None,
) -> Wires:
    """Every worker of `schedule` runs the rounds; width: tensors per boundary. connects: before the first. runs: see
    Script.of. workload: what is read. took: is told of each worker's forwards, whose outputs are -1.
    Raises Mispaired or Deadlock."""
    job, living = schedule.problem.job, sorted(schedule.ops)
    baton = Baton(seed)
    wires, rank = Wires(baton), {w: i for i, w in enumerate(living)}
    stage_io = ((WIDE, NARROW, WIDE)[:width],) * (job.stages - 1)

    def task(me: Worker) -> Callable[[], None]:
        peers = tuple(w for w in living if w.stage == me.stage)
        size = len(peers)
        lines: Any = GenerationGroups(
            me,
            *(Group(wires, name, rank[me]) for name in ("forward", "backward")),  # type: ignore[arg-type]
            Peers(wires, me.stage, size) if size > 1 else None,  # type: ignore[arg-type]
            rank,
        )
        incoming = stage_io[me.stage - 1] if me.stage else ()
        stage = _Stage(stage_io[me.stage] if me.stage < job.stages - 1 else (), incoming, partial(took, me))
        steps = _Steps(me)
        executor = Executor(
            me,
            job,
            0,
            workload,
            stage,  # type: ignore[arg-type]
            steps,  # type: ignore[arg-type]
            FaultInjector(me, [], lambda kill: None),
            {},
            lambda: False,
            lambda iteration, loss: None,
            stage_io,
        )
        groups: Any = SimpleNamespace(
            transfers=partial(kind, lines), ranks=Ranks(), peer_group=lines.peers, peers=peers
        )
        script = Script.of(schedule, me, runs)

        def live() -> None:
            if connects:
                connect(lines, script.neighbours, CPU)
            for number, current in enumerate(rounds):
                steps.begin(current)
                redo = Redo(current.keys, frozenset()) if current.keys is not None else None
                try:
                    executor.run(number, script, groups, redo, current.left_out)
                except OpError as error:
                    assert error.__cause__ is not None
                    raise error.__cause__ from None
                awaited = wires.awaited.get(rank[me], [])
                assert all(pending.taken for pending in awaited), "what was posted has not been asked for"

        return live

    baton.run([task(me) for me in living])
    assert not any(wires.sent.values()) and not any(wires.posted.values()), "messages are left over"
    return wires
