"""Worker processes of this node. Each is forked from one server that has torch loaded, and has a pipe to the launcher.

With the server, a start costs a fork instead of an import (seconds on a loaded machine), and workers share the
libraries' memory. Each worker has a thread in the launcher that sends its messages, so that a worker that is stopped
can't hold up the launcher.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple, Protocol

from openrecycle.agent.config.options import LOOPBACK
from openrecycle.agent.launcher.restarts import RestartPolicy
from openrecycle.agent.messages import channel
from openrecycle.agent.messages.client import Offset
from openrecycle.agent.messages.protocol import TOKEN_VARIABLE, Doing
from openrecycle.agent.models.workload import WorkloadSource
from openrecycle.agent.monitoring.liveness import Activity, activity
from openrecycle.forking import fork_context, start_server
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.plan import Plan
from openrecycle.scratch import scratch


class ProcessHandle(Protocol):
    """A worker's process as the launcher uses it: multiprocessing's own on this node, or one on another node.

    sentinel: becomes readable when the process has ended. ends: becomes readable as soon as its end begins, where that
    can be known. exitcode: as multiprocessing has it; None while it runs, and where it can't be known. is_ending: says
    whether its end is known already, with its exit code.
    """

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    @property
    def sentinel(self) -> int: ...

    @property
    def ends(self) -> Connection | None: ...

    def is_alive(self) -> bool: ...

    def is_ending(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


LATE_SECONDS = 0.25
"""How long the other ranks have to end once one of them has died. A rank that needs longer, such as a stopped one, is
killed."""
LAST_SECONDS = 0.1
"""How long to wait for a rank that was killed for being late. Where its end can be known at all, it is known soon."""
JOIN_SECONDS = 2.0
"""What LATE_SECONDS is, for a worker that was silent: a rank that does not end in that time is the one that hangs."""
GONE_SECONDS = 60.0
"""How long a process may take to be gone once its end has begun: it first gives back its memory, which takes 0.1 s per
gigabyte and more."""
KILLED_SECONDS = 5.0
"""How long `kill_all` waits for the processes to end."""
END_SECONDS = 1.0
"""How long rank 0 of a silent worker has to end once it is told to."""

LOOK_SECONDS = 0.02
"""The interval at which lingering processes are asked whether they have ended; it takes 15 µs for each."""

LAST_WORDS_SECONDS = 0.1

RankOf = tuple[str, int]
"""A rank of a worker: (incarnation, number)."""


class SpareRank(NamedTuple):
    """The place of a rank that had to end because another rank of its worker had ended; nothing runs there. slot: its
    number on this node; -1: it is on another node, which knows the number."""

    rank: RankOf
    slot: int


class Spares(NamedTuple):
    """Spare ranks that are set aside for a new worker. node: the one on which all of them are."""

    node: int
    left: tuple[SpareRank, ...]

    @property
    def ranks(self) -> tuple[RankOf, ...]:
        return tuple(spare.rank for spare in self.left)


SPARES_TRIED = RestartPolicy(most=5, first=10.0)
"""How often in a row a job that waits for nothing else tries to start a worker from a node's spare ranks, and when."""


class SpareRanks:
    """The spare ranks of workers that have ended, by node. The oldest are taken first. Those from which no worker could
    be started are taken again later, or as soon as more come."""

    def __init__(self) -> None:
        self._left: dict[int, list[SpareRank]] = {}
        self._failed: dict[int, tuple[int, float]] = {}
        """For nodes where no worker could be started: how often in a row, and when it is tried again."""

    def on(self, node: int) -> tuple[SpareRank, ...]:
        return tuple(self._left.get(node, ()))

    def all(self) -> list[tuple[int, SpareRank]]:
        """Returns all spare ranks, each with its node."""
        return [(node, spare) for node, left in self._left.items() for spare in left]

    def add(self, node: int, spares: Iterable[SpareRank]) -> None:
        """Takes the spare ranks of a worker that has ended. If it left none, it may have left what new ones lacked."""
        self._left.setdefault(node, []).extend(spares)
        self._failed.pop(node, None)

    def keep(self, nodes: Collection[int]) -> None:
        """Forgets the spare ranks of all nodes but these."""
        self._left = {node: left for node, left in self._left.items() if node in nodes}
        self._failed = {node: failed for node, failed in self._failed.items() if node in nodes}

    def take(self, ranks: int, now: float, there: Callable[[int], bool] = lambda node: True) -> Spares | None:
        """Takes so many spare ranks of one node. None: no node has as many that can be tried now. now: monotonic
        seconds. there: says whether a node is there."""

        def usable(node: int) -> bool:
            return len(self._left[node]) >= ranks and now >= self._tries(node)[1] and there(node)

        node = next(filter(usable, sorted(self._left)), None)
        return None if node is None else Spares(node, self.take_of(node, self._left[node][:ranks]))

    def promise(self, ranks: int, ending: Mapping[int, int]) -> bool:
        """Says whether some node has so many spare ranks, and has not failed too often to start a worker from them.
        ending: how many more may become spare, by node."""
        nodes = {*self._left, *ending}
        return any(
            len(self._left.get(node, ())) + ending.get(node, 0) >= ranks and self._tries(node)[0] < SPARES_TRIED.most
            for node in nodes
        )

    def first(self, node: int, ranks: int) -> tuple[SpareRank, ...]:
        """Returns the spare ranks in whose place a new worker of so many ranks starts on this node, at most all there
        are."""
        return self.on(node)[:ranks]

    def take_named(self, node: int, ranks: Collection[RankOf]) -> Spares:
        """Takes those of `ranks` that are spare on this node."""
        return Spares(node, self.take_of(node, [spare for spare in self.on(node) if spare.rank in ranks]))

    def replace(self, node: int, spares: Iterable[SpareRank]) -> None:
        """Sets the spare ranks of a node."""
        self._left[node] = list(spares)

    def take_of(self, node: int, spares: Collection[SpareRank]) -> tuple[SpareRank, ...]:
        """Takes these spare ranks of a node."""
        self._left[node] = [spare for spare in self._left.get(node, ()) if spare not in spares]
        return tuple(spares)

    def put_back(self, spares: Spares, now: float) -> None:
        """Puts spare ranks back at the front, since no worker could be started from them. now: monotonic seconds."""
        self._left.setdefault(spares.node, [])[:0] = spares.left
        tries = self._tries(spares.node)[0] + 1
        self._failed[spares.node] = tries, now + SPARES_TRIED.delay(tries)

    def _tries(self, node: int) -> tuple[int, float]:
        return self._failed.get(node, (0, -math.inf))


@dataclass
class WorkerProcess:
    """One incarnation of a worker: its processes, its pipe, and what the launcher knows of it. Times are monotonic
    seconds.

    process: that of rank 0. siblings: the processes of its ranks above 0, which live and die with it
    (agent.workers.worker). meeting: a folder where the ranks find each other at their start. slots: for each rank a
    number that no other process of this node had at its start, which also says which GPU it uses. made_of: the spare
    ranks in whose place its own run. elsewhere: it is on another node. unknown: it is ended since the leader never
    knew of it: the one before was lost as it started it.
    member: it is in a generation. waits: it has asked for its place, and is in no generation yet. fenced: it counts as
    dead while its process may still run, and all that it says is void. asked: `end` has told it to end, which shows
    which of its ranks hang. since: the generation in which it came to its place; what it says of earlier ones concerns
    its place before, came_from. whole: it has all of its stage's state.
    heard_at: when its last message came. spoke: it has said something. heard: the number of its newest message that
    counts, where its node numbers them. current: what it said last that it is doing. op_limit: seconds that any of its
    ops may take. excused_until: until then its current op may be late, since its peers were late, too. lived_at: when
    its operating system last showed that it is at work. stopped: it is stopped by a signal. looked_at: when the system
    was asked last. stop_borne_until: until then it may be silent, since it was stopped with all of its stage.
    plans: the plans that it has been sent. send: takes what is posted; None: messages go to `outbox`.
    hung_up: its pipe has ended. lingers: it has a CUDA context, which the system takes apart before it closes the pipe
    (0.4 s on an H100, seconds on a busy one). ends: it is known that the end of rank 0 has begun. ended_at: when that
    end was known. The other ranks end once they hear of it, or are killed at _kill_at; after _over_at the launcher
    waits for them no longer.
    """

    elsewhere: ClassVar[bool] = False
    worker: Worker
    incarnation: str
    process: ProcessHandle
    pipe: Connection
    heard_at: float
    outbox: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)
    error: str = ""
    member: bool = False
    fenced: bool = False
    unknown: bool = False
    asked: bool = False
    since: int = 0
    came_from: Worker | None = None
    slots: tuple[int, ...] = ()
    siblings: tuple[ProcessHandle, ...] = ()
    meeting: str = ""
    made_of: tuple[RankOf, ...] = ()
    whole: bool = True
    spoke: bool = False
    waits: bool = False
    lived_at: float = float("-inf")
    stopped: bool = False
    looked_at: float = float("-inf")
    op_limit: float | None = None
    current: Doing | None = None
    excused_until: float = float("-inf")
    stop_borne_until: float = float("-inf")
    plans: dict[str, None] = field(default_factory=dict)
    heard: int = 0
    hung_up: bool = False
    lingers: bool = False
    ends: bool = False
    ended_at: float | None = None
    _kill_at: float = math.inf
    _over_at: float = math.inf
    _tell_at: float | None = None
    _codes: tuple[int | None, ...] = ()
    _held: Collection[int] = ()
    _killed: bool = False
    """Whether `kill` was called, which kills all of its ranks."""
    send: Callable[[dict[str, Any]], None] | None = None
    _activity: Mapping[int, Activity] = field(default_factory=dict)

    @property
    def clock(self) -> Offset:
        """The offset from the worker's monotonic clock to this process's."""
        return Offset(0, 0)

    def look(self, now: float) -> None:
        """Asks the operating system what the processes do. For a worker on another node, its own launcher does that.

        One rank that computes, and so can't speak, excuses the whole worker, whatever the other ranks do, unless one of
        them is stopped.
        """
        self.looked_at = now
        before, pids = self._activity, (process.pid for process in (self.process, *self.siblings))
        self._activity = {pid: seen for pid in pids if pid is not None and (seen := activity(pid)) is not None}
        if self._activity:
            self.stopped = any(seen.stopped for seen in self._activity.values())
            if not self.stopped and any(seen.lives_since(before.get(pid)) for pid, seen in self._activity.items()):
                self.lived_at = now

    def post(self, kind: str, **fields: Any) -> None:
        """Sends a message. Returns at once: the outbox's thread sends it. Does nothing for a worker that is gone."""
        (self.send or self.outbox.put)({"kind": kind, **fields})

    def open_outbox(self, name: str) -> None:
        """Starts the thread that sends what is put into the outbox, until `close`."""

        def send(message: dict[str, Any]) -> None:
            try:
                channel.send(self.pipe, **message)
            except OSError:
                pass  # the worker is gone
            except Exception:  # a fault of ours, such as no JSON: the worker would wait for the message for ever
                traceback.print_exc()
                self.kill()

        channel.follow(self.outbox.get, send, self.pipe.close, name=name)

    def close(self) -> None:
        """Ends the outbox's thread of a worker that has ended. That thread closes the pipe: if another thread did, a
        file opened meanwhile could get the pipe's number, and what the outbox's thread was about to write."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # a thread that is writing to the pipe fails at once
        self.outbox.put(None)

    def told(self) -> dict[str, Any]:
        """Returns what another launcher needs to know of this worker, as JSON."""
        about = {"worker": str(self.worker), "came_from": self.came_from and str(self.came_from)}
        return about | {"incarnation": self.incarnation} | {name: getattr(self, name) for name in _TOLD}

    def restore(self, told: Mapping[str, Any]) -> None:
        """Takes over what another launcher has `told`."""
        for name in _TOLD:
            setattr(self, name, told[name])
        self.made_of = tuple((incarnation, rank) for incarnation, rank in told["made_of"])  # JSON has no tuples
        self.came_from = told["came_from"] and Worker.parse(told["came_from"])

    def messages(self) -> Iterator[channel.Message]:
        """Yields all messages that wait in its pipe. At the end of the pipe it sets `hung_up`, which `has_ended`
        uses."""
        while True:
            try:
                if not self.pipe.poll():
                    return
                message = channel.receive(self.pipe)
            except (EOFError, OSError):
                self.hung_up = True
                return
            yield message

    def tell_ranks(self) -> None:
        """Tells a worker that lingers to end once one of its ranks has ended. Called every LOOK_SECONDS."""
        if self.lingers and not self.fenced and any(process.is_ending() for process in self.siblings):
            # Otherwise the other ranks hear of it only when their connections to that rank are closed, which is late.
            # But they must first pass on what it said last.
            if self._tell_at is None:
                self._tell_at = time.monotonic() + LAST_WORDS_SECONDS
            elif time.monotonic() >= self._tell_at:
                self._tell_at = math.inf
                self.outbox.put({"kind": "fenced"})

    @property
    def sentinels(self) -> list[int | Connection]:
        """What becomes readable when `has_ended` is to be asked."""
        if self.ended_at is None:
            ends = self.process.ends
            return [self.process.sentinel] if ends is None or self.ends else [self.process.sentinel, ends]
        late = [process for process in self.siblings if not process.is_ending()]
        # Rank 0's sentinel is watched until it is known that the other ranks can have heard of its end.
        first = [self.process] if late and self._kill_at == math.inf else []
        return [process.sentinel for process in (*first, *late)]

    @property
    def looked_for(self) -> bool:
        """Whether `has_ended` is also to be asked every LOOK_SECONDS."""
        return self.lingers or self.ends or self.ended_at is not None

    def has_ended(self, ready: Collection[object]) -> bool:
        """Says whether the worker has ended with all its ranks. Never waits. Each rank ends when another one has, or is
        killed when it is late.

        ready: those of `sentinels` that can be read. A sentinel says that a process has ended only once the system has
        taken all of it apart. Its end may be known earlier, so a worker that is `looked_for` is asked every
        LOOK_SECONDS.
        """
        now = time.monotonic()
        if self.ended_at is None:
            told = self.process.sentinel in ready
            self.ends = self.ends or (self.process.ends is not None and self.process.ends in ready)
            if not told and not ((self.hung_up or self.lingers or self.ends) and self.process.is_ending()):
                return False
            self.ended_at = now
        if not self._codes:
            ending = [process.is_ending() for process in self.siblings]  # asks each, which also takes its exit code
            if self._kill_at == math.inf and self._others_may_be_late(ready, now):
                self._kill_at = now + (JOIN_SECONDS if self.asked else LATE_SECONDS)
            if now < self._kill_at and not all(ending):
                return False
            self._codes = self._ends
            self._kill_ranks()
            self._over_at = now + LAST_SECONDS
        late = [process for process, code in zip(self.siblings, self._codes[1:], strict=True) if code is None]
        if now < self._over_at and not all(process.is_ending() for process in late):
            return False
        # A rank that does not end even now, such as one that its driver holds, still has its GPU. Nothing may be
        # started in its place.
        ranks = enumerate((self.process, *self.siblings))
        self._held = {rank for rank, process in ranks if self._codes[rank] is None and not process.is_ending()}
        return True

    def _others_may_be_late(self, ready: Collection[object], now: float) -> bool:
        """Says whether the ranks above 0 may be late from now on. If lateness is to show which rank hangs, they must
        first be able to hear that rank 0 has ended: the system closes its connections when it has given back its
        memory.
        """
        assert self.ended_at is not None
        if _one_died(self._ends) and not self.asked:
            return True  # a rank has died, so a late one is not to blame
        return self.hung_up or self.process.sentinel in ready or now >= self.ended_at + GONE_SECONDS

    def lacks(self, plans: Iterable[Plan]) -> list[Plan]:
        """Returns, in order, those of the plans of a deployment that must be sent with it: the worker has the
        others."""
        new = []
        for plan in plans:
            if plan.fingerprint not in self.plans:
                new.append(plan)
            channel.keep_newest(self.plans, plan.fingerprint, None)
        return new

    def kill(self) -> None:
        self._killed = True
        self._kill_ranks()

    def _kill_ranks(self) -> None:
        for process in (self.process, *self.siblings):
            _kill(process)

    def end(self) -> None:
        """Ends a silent worker. A rank whose threads still run ends by itself, which shows that it is not the one that
        hangs. A rank that does not is killed: rank 0 after END_SECONDS, and the others by `has_ended`."""
        self.asked = True
        if not self.siblings:
            self.post("fenced")
            self.kill()
            return
        self.outbox.put({"kind": "fenced"})  # not by `post`: a leader holds that back until its nodes know of it
        late = threading.Timer(END_SECONDS, _kill, (self.process,))
        late.daemon = True
        late.start()

    @property
    def first_end(self) -> tuple[int, int | None]:
        """(rank, exit code) of the rank whose end made the others end."""
        ends = list(enumerate(self._ends))
        died = [(rank, code) for rank, code in ends if code is not None and code not in _FOLLOW]
        gave_up = [(rank, code) for rank, code in ends if code == channel.GAVE_UP]
        return next(iter((*died, *gave_up)), (0, self.process.exitcode))

    @property
    def ending(self) -> str:
        """How the worker ended, in words."""
        rank, code = self.first_end
        whose = f" (its rank {rank})" if self.siblings else ""
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}{whose}"
        if code == channel.GAVE_UP:
            who = f"its rank {rank}" if self.siblings else "one of its ranks"
            return f"ended: {who} has waited in vain for another one" + (f" ({self.error})" if self.error else "")
        unknown = " (also said if nobody saw its end)" if code == UNKNOWN else ""
        return f"ended with exit code {code}{unknown}{whose}" + (f" ({self.error})" if self.error else "")

    @property
    def not_as_wished(self) -> bool:
        """Whether it is known that no kill on purpose (agent.config.faults) ended this worker. Such a kill ends a rank
        by SIGKILL, and the other ranks may follow."""
        return _one_died(self._ends) and not {-signal.SIGKILL, UNKNOWN} & {*self._ends}

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        """The ranks of an ended worker that had to end because another one had ended or hung. New ranks can run where
        they ran."""
        if (self.fenced and not self.asked) or not self.siblings:
            return ()
        spare = spare_of(self._ends, silent=self.asked or self._killed)
        return tuple(rank for rank in spare if rank not in self._held)

    @property
    def spare_again(self) -> tuple[SpareRank, ...]:
        """The spare ranks that an ended worker was made of, if it is unknown: none was at fault. Its slots are in their
        order."""
        if not self.unknown:
            return ()
        places = enumerate(zip(self.made_of, self.slots, strict=False))
        return tuple(SpareRank(spare, slot) for rank, (spare, slot) in places if rank not in self._held)

    @property
    def _ends(self) -> tuple[int | None, ...]:
        """The exit codes of its ranks. Once the ranks were killed, None stands for each that did not end by itself."""
        return self._codes or tuple(process.exitcode for process in (self.process, *self.siblings))


UNKNOWN = 255
"""The exit code that multiprocessing reports for a process whose fork server has ended. It is not known then how, or
whether, the process has ended. A user's code may also end with this code."""
_FOLLOW = (channel.ORPHANED, channel.FENCED, channel.GAVE_UP)
"""Exit codes of ranks that ended because they were told to, or because of another one."""
_TOLD = ("member", "since", "whole", "spoke", "waits", "op_limit", "made_of")


def _kill(process: ProcessHandle) -> None:
    """Sends SIGKILL, which also ends a stopped process."""
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _join(processes: Iterable[ProcessHandle], seconds: float) -> None:
    """Waits until all have ended, for at most `seconds` in all."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _one_died(codes: Iterable[int | None]) -> bool:
    return any(code is not None and code not in _FOLLOW for code in codes)


def spare_of(codes: Sequence[int | None], *, silent: bool) -> tuple[int, ...]:
    """Returns the spare ranks of a worker: those that ended because they were told to, or because another one had. If
    that is true of all, none is known to be at fault, and none is to be used again.

    codes: the exit codes of its ranks; None: the rank did not end in time. silent: the worker was fenced for silence,
    so a rank that did not end in time is the one that hangs; or all were killed. Otherwise such a rank is only late, if
    another one is known to have died. If none has died and a rank has waited for another in vain, that other one hangs,
    though its threads may have ended it nevertheless. Then only the rank that has waited is known to be well.
    """
    died = _one_died(codes)
    late_too = died and not silent
    known = died or (silent and None in codes)
    well = (channel.GAVE_UP,) if channel.GAVE_UP in codes and not known else _FOLLOW
    spare = tuple(rank for rank, code in enumerate(codes) if code in well or (code is None and late_too))
    return spare if len(spare) < len(codes) else ()


def preload(workload: WorkloadSource) -> list[str]:
    """Returns the modules that the server imports once for all workers. It passes over those that are not installed.
    The modules of torch are those that it imports with the first optimizer and the first backward, which would take
    each worker more than a second."""
    return [
        "openrecycle.agent.workers.worker",
        "openrecycle.agent.stages.numba_add",
        "torch._dynamo",
        "torch.fx.experimental.symbolic_shapes",
        *workload.modules,
    ]


def start_worker_server(preload: list[str]) -> None:
    """Starts the server that forks workers, unless it runs. The server imports `preload` while the caller goes on."""
    # Set before the server starts, since its libraries size their thread pools from the environment.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Broken connections are normal in this program, and c10d would print a stack for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A module that asks torch.cuda.is_available() while it is imported must not wake the driver: workers that are
    # forked afterwards could use no GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Workers inherit the server's environment, and the token in this process's may be that of an operator.
    start_server(preload, without=[TOKEN_VARIABLE])


class ProcessPool:
    """Starts the worker processes of this node, and keeps them. Used by the launcher's thread.

    running: the worker processes that count, by place. host: the address of this node that all workers of the job can
    reach.
    """

    host = LOOPBACK

    def __init__(self, target: Callable[..., None], preload: list[str]) -> None:
        start_worker_server(preload)
        self.context = fork_context()
        self._target = target
        self.running: dict[Worker, WorkerProcess] = {}
        self.spares = SpareRanks()
        self._aside: list[WorkerProcess] = []

    def start(
        self,
        worker: Worker,
        make_spec: Callable[[str], Any],
        now: float,
        spares: Spares | None = None,
        node: int | None = None,
    ) -> WorkerProcess:
        """Starts a process for `worker`, or one for each of its ranks. Raises OSError or EOFError if that fails.

        make_spec: returns, for the new incarnation, the spec that its processes get; each rank's slot is added to it.
        now: monotonic seconds. spares: the spare ranks in whose place the ranks start, as far as there are enough;
        None: those of this node. node: where to start it; None: where its place is.
        """
        incarnation = uuid.uuid4().hex[:16]
        ours, theirs = self.context.Pipe(duplex=True)
        # Processes that were put aside keep their slots until they have ended.
        taken = {slot for entry in self.entries if not entry.elsewhere for slot in entry.slots}
        spec = make_spec(incarnation)
        ranks = getattr(spec, "ranks", 1)  # the specs of agent.profiling have no ranks and no slot
        filled = self.spares.first(self.own_node, ranks) if spares is None else spares.left
        taken |= {spare.slot for spare in (*filled, *self.spares.on(self.own_node))}
        free = (n for n in itertools.count() if n not in taken)
        slots = (*(spare.slot for spare in filled), *itertools.islice(free, ranks - len(filled)))
        if spares is None:
            slots = tuple(sorted(slots))
        meeting = tempfile.mkdtemp(prefix="ranks-", dir=scratch()) if ranks > 1 else ""
        pairs = [self.context.Pipe(duplex=True) for _ in slots[1:]]

        def launch(rank: int, *pipes: Any) -> ProcessHandle:
            # On a node that does not lead, the pool's cells are made up.
            own, name = spec, str(getattr(spec, "worker", worker))
            if hasattr(spec, "slot"):
                own = replace(own, slot=slots[rank])
            if ranks > 1:
                own, name = replace(own, rank=rank, meeting=f"{meeting}/store"), f"{name}.{rank}"
            process = self.context.Process(target=self._target, args=(own, *pipes), name=name, daemon=True)
            process.start_watched()
            return process

        given = [(theirs, *([[rank_0 for rank_0, _ in pairs]] if pairs else [])), *((pipe,) for _, pipe in pairs)]
        started: list[ProcessHandle] = []
        try:
            for rank, pipes in enumerate(given):
                started.append(launch(rank, *pipes))
        except (OSError, EOFError):
            for one in started:  # a rank is of no use without its siblings
                one.kill()
            ours.close()
            shutil.rmtree(meeting or os.devnull, ignore_errors=True)
            raise
        finally:
            for pipe in (theirs, *itertools.chain.from_iterable(pairs)):
                pipe.close()  # while this end is open, nobody would see that the process at it is gone
        process, *siblings = started
        entry = WorkerProcess(
            *(worker, incarnation, process, ours, now),
            slots=slots,
            siblings=tuple(siblings),
            meeting=meeting,
            lingers=getattr(spec, "on_gpu", False),
        )
        entry.made_of = tuple(spare.rank for spare in filled)
        if spares is None:
            self.spares.take_of(self.own_node, filled)
        entry.open_outbox(name=f"to-{worker}")
        self.running[worker] = entry
        return entry

    def spare(self, entry: WorkerProcess) -> None:
        """Remembers the spare ranks of a worker that has ended."""
        ranks = entry.spare_ranks  # read once, since another rank may end meanwhile
        left = [(rank, -1 if entry.elsewhere else entry.slots[rank]) for rank in ranks]
        spares = [SpareRank((entry.incarnation, rank), slot) for rank, slot in left]
        self.spares.add(self.node_of(entry), [*entry.spare_again, *spares])

    def take_spares(self, ranks: int) -> Spares | None:
        """Takes so many spare ranks of one node that is there. None: no node has as many that can be tried now."""
        return self.spares.take(ranks, time.monotonic(), self.has_node)

    def promises_spares(self, ranks: int) -> bool:
        """Says whether so many ranks of one node are spare, or may be as soon as the silent workers there that were
        told to end have done so, and those that the leader does not know."""
        ending = Counter[int]()
        for entry in self._aside:
            ending[self.node_of(entry)] += ranks - 1 if entry.asked else len(entry.made_of) if entry.unknown else 0
        return self.spares.promise(ranks, ending)

    @property
    def own_node(self) -> int:
        return 0

    def node_of(self, entry: WorkerProcess) -> int:
        return self.own_node

    def host_of(self, entry: WorkerProcess, name: str) -> str:
        """Returns the host's name as people are told it. name: what the host calls itself."""
        return name

    def has_node(self, node: int) -> bool:
        """Says whether the node is there, so that processes can be started on it."""
        return True

    def recorded(self, line: dict[str, Any]) -> str:
        """Takes a line of the record for other nodes (see agent.nodes.pool). Returns a warning, or ""."""
        return ""

    def hand_out(self, run: Any, saved: Callable[[], dict[str, Any] | None], *, last: bool = False) -> str:
        """Gives other nodes what they need to go on without this one. Called at the end of each turn of the launcher.

        run: see agent.workers.spec. saved: returns what another launcher needs. last: the job is at its end. Returns
        why this launcher may not go on itself; "": it may.
        """
        return ""

    @property
    def entries(self) -> list[WorkerProcess]:
        """All workers whose processes have not ended, including those that were removed from the job."""
        return [*self.running.values(), *self._aside]

    def place(self, places: Mapping[str, Worker], generation: int) -> tuple[dict[Worker, Worker], list[WorkerProcess]]:
        """Puts each process of `places` (by incarnation) that lives into its place, from `generation` on. Returns where
        each process was that has another place now, by that place, and the members that stood in somebody's way and
        have no place any more.

        A process that is being started, and is in no generation yet, makes room: it takes a place that was left.
        """
        moving = [entry for worker, entry in self.running.items() if places.get(entry.incarnation, worker) != worker]
        left = [entry.worker for entry in moving]
        for source in left:
            del self.running[source]
        displaced = [e for one in moving if (e := self.running.pop(places[one.incarnation], None)) is not None]
        taken = {places[one.incarnation] for one in moving}
        empty = iter([source for source in left if source not in taken])
        moves = [(entry, places[entry.incarnation]) for entry in moving]
        moves += [(entry, next(empty)) for entry in displaced if not entry.member]
        came = {to: entry.worker for entry, to in moves}
        for entry, to in moves:
            if entry.member:
                entry.came_from, entry.since = entry.worker, generation
            entry.worker, self.running[to] = to, entry
        return came, [entry for entry in displaced if entry.member]

    def vacancy(self, worker: Worker, cells: Iterable[Worker]) -> Worker | None:
        """Returns the place for a new process for `worker`: its own; if a process has moved in there, the place which
        that one came from; if that is filled too, any empty place of `cells`. None: `worker` itself still runs, or no
        place is empty."""
        occupant = self.running.get(worker)
        if occupant is not None and occupant.came_from is None:
            return None
        there = dict(self.running)
        place: Worker | None = worker
        while place is not None and (entry := there.pop(place, None)) is not None:  # some may have moved in a circle
            place = entry.came_from
        empty = place is not None and place not in self.running
        return place if empty else next((c for c in cells if c not in self.running), None)

    def fence(self, entry: WorkerProcess, reason: str, *, silent: bool = False) -> None:
        """Makes room for a successor: tells the process to end, and kills it. If it hangs, only SIGKILL reaches it; on
        another host perhaps nothing does, so all that it says is void from now on.

        silent: it is fenced for its silence. Then those of its ranks that can still end by themselves are spare
        (`WorkerProcess.end`).
        """
        entry.fenced, entry.error = True, reason
        if self.running.get(entry.worker) is entry:
            del self.running[entry.worker]
        self._aside.append(entry)
        if silent:
            entry.end()
        else:
            entry.post("fenced")
            entry.kill()

    def forget(self, entry: WorkerProcess) -> None:
        """Drops a worker whose processes have ended."""
        entry.close()
        if entry.meeting:
            shutil.rmtree(entry.meeting, ignore_errors=True)
        if self.running.get(entry.worker) is entry:
            del self.running[entry.worker]
        elif entry in self._aside:
            self._aside.remove(entry)

    def kill_all(self, unfinished: str = "") -> None:
        """Kills all workers. unfinished: why the job ends before its last iteration, which other nodes are told."""
        entries = self.entries
        for entry in entries:
            entry.kill()
        _join((process for entry in entries for process in (entry.process, *entry.siblings)), KILLED_SECONDS)
        for entry in entries:
            self.forget(entry)
