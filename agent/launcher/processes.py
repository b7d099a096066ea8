"""Worker processes of this node: forked from one server that has torch loaded, each with a pipe.

The server makes a start cost a fork instead of an import (seconds on a loaded machine), and shares
the libraries' memory. Messages to a worker go through a thread of its own, so that one that is
stopped can't hold up the launcher.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple, Protocol

from openrecycle.agent.config.options import LOOPBACK
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
    """What the launcher asks of a worker's process, here (multiprocessing's own) or on another node.

    sentinel: becomes readable at its end. ends: becomes readable as soon as that begins, where that can be known.
    exitcode: as multiprocessing has it; None while it runs, and where nobody can know it. is_ending: is its end known
    already, with its exit code?
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
"""For the ranks to end whose sibling has died: who needs longer, as one that is stopped, is killed."""
LAST_SECONDS = 0.1
"""For one that was killed for being late. That it has ended is soon known, wherever it can be."""
JOIN_SECONDS = 2.0
"""The same of a worker that was silent: who does not end in that time was the one that hangs."""
GONE_SECONDS = 60.0
"""For all of a process to go whose end has begun: its memory is given back first, 0.1 s a gigabyte and more."""
KILLED_SECONDS = 5.0
"""For those to end that were killed."""
END_SECONDS = 1.0
"""For rank 0 of a silent worker to end once it is told to."""

LOOK_SECONDS = 0.02
"""So often it is looked whether processes that linger have ended; it takes 15 µs for each."""

LAST_WORDS_SECONDS = 0.1

RankOf = tuple[str, int]
"""A rank of a worker: (incarnation, number)."""


class SpareRank(NamedTuple):
    """Where a rank ran that had to end since another one of its worker had; nothing runs there. slot: of its node; -1:
    of another node, which knows it."""

    rank: RankOf
    slot: int


class Spares(NamedTuple):
    """Promised to whoever has them. node: where all of them are."""

    node: int
    left: tuple[SpareRank, ...]

    @property
    def ranks(self) -> tuple[RankOf, ...]:
        return tuple(spare.rank for spare in self.left)


class SpareRanks:
    """What is left of workers that have ended, by node; those that came first are taken first."""

    def __init__(self) -> None:
        self._left: dict[int, list[SpareRank]] = {}

    def on(self, node: int) -> tuple[SpareRank, ...]:
        return tuple(self._left.get(node, ()))

    def all(self) -> list[tuple[int, SpareRank]]:
        """With their nodes."""
        return [(node, spare) for node, left in self._left.items() for spare in left]

    def add(self, node: int, spares: Iterable[SpareRank]) -> None:
        self._left.setdefault(node, []).extend(spares)

    def keep(self, nodes: Collection[int]) -> None:
        """Those of other nodes are lost."""
        self._left = {node: left for node, left in self._left.items() if node in nodes}

    def take(self, ranks: int) -> Spares | None:
        """So many of one node. None: no node has as many."""
        node = next((node for node, left in sorted(self._left.items()) if len(left) >= ranks), None)
        return None if node is None else Spares(node, self.take_of(node, self._left[node][:ranks]))

    def first(self, node: int, ranks: int) -> tuple[SpareRank, ...]:
        """In whose place a worker of so many ranks begins there that was promised none: those that there are."""
        return self.on(node)[:ranks]

    def take_named(self, node: int, ranks: Collection[RankOf]) -> Spares:
        """Those of them that there are, which are spare no more."""
        return Spares(node, self.take_of(node, [spare for spare in self.on(node) if spare.rank in ranks]))

    def replace(self, node: int, spares: Iterable[SpareRank]) -> None:
        """There are those, and no others."""
        self._left[node] = list(spares)

    def take_of(self, node: int, spares: Collection[SpareRank]) -> tuple[SpareRank, ...]:
        """These, which are spare no more."""
        self._left[node] = [spare for spare in self._left.get(node, ()) if spare not in spares]
        return tuple(spares)

    def put_back(self, spares: Spares) -> None:
        """No worker came of them."""
        self._left.setdefault(spares.node, [])[:0] = spares.left


@dataclass
class WorkerProcess:
    """One incarnation. heard_at: monotonic seconds of its last message. member: of a generation.

    spoke: it has said something. waits: it has asked for its place, and is in no generation yet. fenced: it was held
    for dead while it still is a process: whatever it says is void. since: the generation with which it came to its
    place; what it says of earlier ones concerns its place before, came_from. slots: of each of its ranks a
    number that no other process of this node had at its start, so also its GPU's where it has one. whole: it has all
    of its stage's state.
    asked: as `end` does, to show which of its ranks still can.
    siblings: the processes of its ranks above 0, which live and die with it (agent.workers.worker); meeting: a
    folder where they find each other at their start. made_of: the spare ranks in whose place its own are.
    lived_at: when its system last showed that it is at work. stopped:
    by a signal. looked_at: when that was asked last.
    op_limit: seconds that any of its ops may take. current: what it said last that it is at. excused_until: then it is
    time that it was through with that, whose peers were late, too. stop_borne_until: so long it may be silent, which
    was stopped with all of its stage. plans: that it has. heard: number of its newest message that counts, where its
    node numbers them. hung_up: its pipe has ended. lingers: it has a CUDA context, which the system takes apart before
    it closes the pipe (0.4 s on an H100, seconds on a busy one). ends: that its end has begun is known. ended_at:
    monotonic seconds at which the end of its rank 0 was known; its others end once they hear of that, or are killed at
    _kill_at, and after _over_at are left as they are.
    send: takes what is posted; None: it goes to the process at once. elsewhere: on another node?
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
    """All of its ranks, on purpose."""
    send: Callable[[dict[str, Any]], None] | None = None
    _activity: Mapping[int, Activity] = field(default_factory=dict)

    @property
    def clock(self) -> Offset:
        """From its monotonic clock to this process's."""
        return Offset(0, 0)

    def look(self, now: float) -> None:
        """Asks the system what the process does; of one on another node its launcher does that.

        Of several ranks, one that computes and can't speak meanwhile excuses the worker, whatever the others do; but
        not while one is stopped.
        """
        self.looked_at = now
        before, pids = self._activity, (process.pid for process in (self.process, *self.siblings))
        self._activity = {pid: seen for pid in pids if pid is not None and (seen := activity(pid)) is not None}
        if self._activity:
            self.stopped = any(seen.stopped for seen in self._activity.values())
            if not self.stopped and any(seen.lives_since(before.get(pid)) for pid, seen in self._activity.items()):
                self.lived_at = now

    def post(self, kind: str, **fields: Any) -> None:
        """Sends a message; returns at once. A worker that is gone does not matter here."""
        (self.send or self.outbox.put)({"kind": kind, **fields})

    def open_outbox(self, name: str) -> None:
        """What is put there is sent, by a thread of that name, until `close`."""

        def send(message: dict[str, Any]) -> None:
            try:
                channel.send(self.pipe, **message)
            except OSError:
                pass  # it is gone
            except Exception:  # no JSON, say: a fault of ours, after which it would wait for good
                traceback.print_exc()
                self.kill()

        channel.follow(self.outbox.get, send, self.pipe.close, name=name)

    def close(self) -> None:
        """Of one that has ended. The thread that sends closes the pipe: whatever was opened meanwhile would get its
        number, and what the thread was about to write."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # whoever is writing to it leaves
        self.outbox.put(None)

    def told(self) -> dict[str, Any]:
        """What another launcher needs to know of it, as JSON."""
        about = {"worker": str(self.worker), "came_from": self.came_from and str(self.came_from)}
        return about | {"incarnation": self.incarnation} | {name: getattr(self, name) for name in _TOLD}

    def restore(self, told: Mapping[str, Any]) -> None:
        """As another launcher has `told` of it."""
        for name in _TOLD:
            setattr(self, name, told[name])
        self.came_from = told["came_from"] and Worker.parse(told["came_from"])

    def messages(self) -> Iterator[channel.Message]:
        """Everything that is in its pipe. Where that has ended, `has_ended` tells the rest."""
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
        """Of one that lingers, every LOOK_SECONDS: has its ranks end of which another one has."""
        if self.lingers and not self.fenced and any(process.is_ending() for process in self.siblings):
            # The others hear of it when the connections to that one are closed, which is late; but not before what it
            # has said last is passed on.
            if self._tell_at is None:
                self._tell_at = time.monotonic() + LAST_WORDS_SECONDS
            elif time.monotonic() >= self._tell_at:
                self._tell_at = math.inf
                self.outbox.put({"kind": "fenced"})

    @property
    def sentinels(self) -> list[int | Connection]:
        """What becomes readable when it is to be asked whether it `has_ended`."""
        if self.ended_at is None:
            ends = self.process.ends
            return [self.process.sentinel] if ends is None or self.ends else [self.process.sentinel, ends]
        late = [process for process in self.siblings if not process.is_ending()]
        # Until it is known that the others can have heard of it, also when all of rank 0 is gone.
        first = [self.process] if late and self._kill_at == math.inf else []
        return [process.sentinel for process in (*first, *late)]

    @property
    def looked_for(self) -> bool:
        """Is that to be asked every LOOK_SECONDS, too?"""
        return self.lingers or self.ends or self.ended_at is not None

    def has_ended(self, ready: Collection[object]) -> bool:
        """With all its ranks: each ends when another one of them has, or is killed. Nobody is waited for. ready: what
        can be read. That a process ends may be known before its sentinel says it, which is when the system has taken
        all of it apart: of one that is `looked_for` it is asked every LOOK_SECONDS."""
        now = time.monotonic()
        if self.ended_at is None:
            told = self.process.sentinel in ready
            self.ends = self.ends or (self.process.ends is not None and self.process.ends in ready)
            if not told and not ((self.hung_up or self.lingers or self.ends) and self.process.is_ending()):
                return False
            self.ended_at = now
        if not self._codes:
            ending = [process.is_ending() for process in self.siblings]  # of each, for its exit code
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
        # Who does not end even so, as one that its driver holds, still has its GPU: nobody begins in its place.
        ranks = enumerate((self.process, *self.siblings))
        self._held = {rank for rank, process in ranks if self._codes[rank] is None and not process.is_ending()}
        return True

    def _others_may_be_late(self, ready: Collection[object], now: float) -> bool:
        """From now on, its ranks above 0? Where being late tells that one hangs, not before they can have heard that
        rank 0 ends: by their connections with it, which the system closes when it has given back its memory."""
        assert self.ended_at is not None
        if _one_died(self._ends) and not self.asked:
            return True  # whoever is late is not to blame
        return self.hung_up or self.process.sentinel in ready or now >= self.ended_at + GONE_SECONDS

    def lacks(self, plans: Iterable[Plan]) -> list[Plan]:
        """Of the plans that a deployment names, in order, those that are to be sent with it: the others it has."""
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
        """Of one that is silent. Of several ranks each whose threads run ends by itself, and has shown thereby that it
        was not the one that hangs; whoever does not is killed: rank 0 soon, and the others by `has_ended`."""
        self.asked = True
        if not self.siblings:
            self.post("fenced")
            self.kill()
            return
        self.outbox.put({"kind": "fenced"})  # at once: a lead holds others back until its nodes know of them
        late = threading.Timer(END_SECONDS, _kill, (self.process,))
        late.daemon = True
        late.start()

    @property
    def first_end(self) -> tuple[int, int | None]:
        """(rank, exit code) of the rank that has ended first."""
        ends = list(enumerate(self._ends))
        died = [(rank, code) for rank, code in ends if code is not None and code not in _FOLLOW]
        gave_up = [(rank, code) for rank, code in ends if code == channel.GAVE_UP]
        return next(iter((*died, *gave_up)), (0, self.process.exitcode))

    @property
    def ending(self) -> str:
        """In words, how the process ended."""
        rank, code = self.first_end
        whose = f" (its rank {rank})" if self.siblings else ""
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}{whose}"
        if code == channel.GAVE_UP:
            who = f"its rank {rank}" if self.siblings else "one of its ranks"
            return f"ended: {who} has waited in vain for another one" + (f" ({self.error})" if self.error else "")
        unknown = " (or unknown: the fork server is gone)" if code == UNKNOWN else ""
        return f"ended with exit code {code}{unknown}{whose}" + (f" ({self.error})" if self.error else "")

    @property
    def not_as_wished(self) -> bool:
        """Of one that has ended: is it known that no wish to kill it was done (agent.config.faults)? By that a rank
        ends by SIGKILL, and others may follow it."""
        return _one_died(self._ends) and not {-signal.SIGKILL, UNKNOWN} & {*self._ends}

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        """Of a worker that has ended: which of its ranks had to end because another one had, or hung. Where they ran,
        others can."""
        if (self.fenced and not self.asked) or not self.siblings:
            return ()
        spare = spare_of(self._ends, silent=self.asked or self._killed)
        return tuple(rank for rank in spare if rank not in self._held)

    @property
    def _ends(self) -> tuple[int | None, ...]:
        """Exit codes of its ranks; once they were killed, None of those that did not end by themselves."""
        return self._codes or tuple(process.exitcode for process in (self.process, *self.siblings))


UNKNOWN = 255
"""What multiprocessing has as exit code of a process whose fork server has ended: nobody knows how the process did, or
whether. A user's code may end with this one, too."""
_FOLLOW = (channel.ORPHANED, channel.FENCED, channel.GAVE_UP)
"""Exit codes of ranks that ended because they were told to, or because of another one."""
_TOLD = ("member", "since", "whole", "spoke", "waits", "op_limit")


def _kill(process: ProcessHandle) -> None:
    """SIGKILL, which also ends a stopped process."""
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _join(processes: Iterable[ProcessHandle], seconds: float) -> None:
    """Returns when all have ended, or after so long."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _one_died(codes: Iterable[int | None]) -> bool:
    return any(code is not None and code not in _FOLLOW for code in codes)


def spare_of(codes: Sequence[int | None], *, silent: bool) -> tuple[int, ...]:
    """Exit codes of a worker's ranks, None of those that did not end in time: those that ended because they were told
    to, or because another one had. Where all did, nobody is known to be at fault, and none is to be used again.

    silent: it was fenced for that, and who does not end is the one that hangs; or all were killed. Else it is only
    late, where another one is known to have died. Where none has, and one has waited for another in vain, that one
    hangs, and its threads may have ended it nevertheless: then only who has waited is known to be well.
    """
    died = _one_died(codes)
    late_too = died and not silent
    known = died or (silent and None in codes)
    well = (channel.GAVE_UP,) if channel.GAVE_UP in codes and not known else _FOLLOW
    spare = tuple(rank for rank, code in enumerate(codes) if code in well or (code is None and late_too))
    return spare if len(spare) < len(codes) else ()


def preload(workload: WorkloadSource) -> list[str]:
    """Modules that the server imports once, for all workers; it passes over what is not here. Of torch, those that it
    imports by itself with the first optimizer and the first backward: more than a second, in every worker anew."""
    return [
        "openrecycle.agent.workers.worker",
        "openrecycle.agent.stages.numba_add",
        "torch._dynamo",
        "torch.fx.experimental.symbolic_shapes",
        *workload.modules,
    ]


def start_worker_server(preload: list[str]) -> None:
    """Starts the server that forks workers, unless it runs; it imports `preload` while the caller goes on."""
    # Before the server starts: its libraries size their thread pools from the environment.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Broken connections are this program's daily bread; c10d would print a stack for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A module that asks torch.cuda.is_available() while it is imported must not wake the driver: workers that are
    # forked afterwards could use no GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Workers inherit its environment, and the token in ours may be one that operates.
    start_server(preload, without=[TOKEN_VARIABLE])


class ProcessPool:
    """Starts and keeps the processes. host: address of this node, as all workers of the job reach it."""

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
        """Starts a process for `worker`, or one for each of its ranks; make_spec maps its new incarnation to what it is
        told, to which its slot is added. spares: in their place, as far as they go; None: in the place of those that
        there are. node: there; None: where its place is."""
        incarnation = uuid.uuid4().hex[:16]
        ours, theirs = self.context.Pipe(duplex=True)
        # Those put aside still hold what they held, until they have ended.
        taken = {slot for entry in self.entries if not entry.elsewhere for slot in entry.slots}
        spec = make_spec(incarnation)
        ranks = getattr(spec, "ranks", 1)  # those of agent.profiling have none, and no slot
        filled = self.spares.first(self.own_node, ranks) if spares is None else spares.left
        taken |= {spare.slot for spare in (*filled, *self.spares.on(self.own_node))}
        free = (n for n in itertools.count() if n not in taken)
        slots = (*(spare.slot for spare in filled), *itertools.islice(free, ranks - len(filled)))
        if spares is None:
            slots = tuple(sorted(slots))
        meeting = tempfile.mkdtemp(prefix="ranks-", dir=scratch()) if ranks > 1 else ""
        pairs = [self.context.Pipe(duplex=True) for _ in slots[1:]]

        def launch(rank: int, *pipes: Any) -> ProcessHandle:
            own, name = spec, str(worker)
            if hasattr(spec, "slot"):
                own = replace(own, slot=slots[rank])
            if ranks > 1:
                own, name = replace(own, rank=rank, meeting=f"{meeting}/store"), f"{worker}.{rank}"
            process = self.context.Process(target=self._target, args=(own, *pipes), name=name, daemon=True)
            process.start_watched()
            return process

        given = [(theirs, *([[rank_0 for rank_0, _ in pairs]] if pairs else [])), *((pipe,) for _, pipe in pairs)]
        started: list[ProcessHandle] = []
        try:
            for rank, pipes in enumerate(given):
                started.append(launch(rank, *pipes))
        except (OSError, EOFError):
            for one in started:  # no rank is any good without its siblings
                one.kill()
            ours.close()
            shutil.rmtree(meeting or os.devnull, ignore_errors=True)
            raise
        finally:
            for pipe in (theirs, *itertools.chain.from_iterable(pairs)):
                pipe.close()  # an end that is open here hides that the process at it is gone
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
        """Of a worker that has ended: remembers what is left of it."""
        ranks = entry.spare_ranks  # once: another one may end meanwhile
        left = [(rank, -1 if entry.elsewhere else entry.slots[rank]) for rank in ranks]
        self.spares.add(self.node_of(entry), [SpareRank((entry.incarnation, rank), slot) for rank, slot in left])

    def take_spares(self, ranks: int) -> Spares | None:
        """So many of one node that is there. None: no node has as many."""
        return self.spares.take(ranks)

    @property
    def own_node(self) -> int:
        return 0

    def node_of(self, entry: WorkerProcess) -> int:
        return self.own_node

    def host_of(self, entry: WorkerProcess, name: str) -> str:
        """As people are told of the host, which calls itself `name`."""
        return name

    def has_node(self, node: int) -> bool:
        """Is it there, so that processes can be started on it?"""
        return True

    def recorded(self, line: dict[str, Any]) -> str:
        """A line of the record, for other nodes (see agent.nodes.pool). Returns a warning, or ""."""
        return ""

    def decide(self, send: Callable[[], None]) -> None:
        """To send something that has just been decided, or found, once `hand_out` lets it."""
        send()

    def hand_out(self, run: Any, saved: Callable[[], dict[str, Any] | None], *, last: bool = False) -> str:
        """At the end of each turn of the launcher: other nodes get what they need to go on without this one.
        run: see agent.workers.spec. last: the job is at its end. Returns why this launcher may not go on itself; "": it
        may."""
        return ""

    @property
    def entries(self) -> list[WorkerProcess]:
        """Every process that has not ended, those removed from the job too."""
        return [*self.running.values(), *self._aside]

    def move(self, source: Worker, to: Worker, generation: int) -> bool:
        """From `generation` on the process of `source`, if it lives, is that of `to`; said twice, it has moved.
        Returns whether it moves now.

        One that is being started for `to`, and is in no generation yet, takes the place of `source` in turn.
        """
        entry, occupant = self.running.get(source), self.running.get(to)
        if entry is None or (occupant is not None and (occupant.member or occupant.came_from == source)):
            return False
        del self.running[source]
        if occupant is not None:
            occupant.worker, self.running[source] = source, occupant
        entry.worker, entry.came_from, entry.since = to, source, generation
        self.running[to] = entry
        return True

    def vacancy(self, worker: Worker, cells: Iterable[Worker]) -> Worker | None:
        """Where a new process for `worker` finds its place: there, or, if somebody has moved in, where
        that one came from, or, if others have come there since, at any empty place of `cells`. None:
        `worker` itself still runs, or nothing is empty."""
        occupant = self.running.get(worker)
        if occupant is not None and occupant.came_from is None:
            return None
        place: Worker | None = worker
        while place is not None and (entry := self.running.get(place)) is not None:
            place = entry.came_from
        return place if place is not None else next((c for c in cells if c not in self.running), None)

    def fence(self, entry: WorkerProcess, reason: str, *, silent: bool = False) -> None:
        """Makes room for a successor: tells the process to end, and ends it. It may hang, and then
        only SIGKILL reaches it; on another host nothing may, so all that it says is void.

        silent: that is the reason. Of several ranks, then, those that are not are spare (`WorkerProcess.end`).
        """
        entry.fenced, entry.error = True, reason
        del self.running[entry.worker]
        self._aside.append(entry)
        if silent:
            entry.end()
        else:
            entry.post("fenced")
            entry.kill()

    def forget(self, entry: WorkerProcess) -> None:
        """Of a process that has ended."""
        entry.close()
        if entry.meeting:
            shutil.rmtree(entry.meeting, ignore_errors=True)
        if self.running.get(entry.worker) is entry:
            del self.running[entry.worker]
        elif entry in self._aside:
            self._aside.remove(entry)

    def kill_all(self, unfinished: str = "") -> None:
        """unfinished: why the job ends before its last iteration; for a job of several nodes, whose others are told."""
        entries = self.entries
        for entry in entries:
            entry.kill()
        _join((process for entry in entries for process in (entry.process, *entry.siblings)), KILLED_SECONDS)
        for entry in entries:
            self.forget(entry)
