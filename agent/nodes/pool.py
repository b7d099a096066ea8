"""The lead's side of a job on several nodes: workers elsewhere, as if they were processes of its own.

On every other node a small server (agent.nodes.server) starts and ends processes for the lead. A
`RemoteWorker` has a pipe and a sentinel like a `WorkerProcess`, so the launcher's loop does not
tell them apart; a node whose connection breaks takes all its workers' sentinels with it at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

from openrecycle.agent.config.devices import memory_group, memory_limit
from openrecycle.agent.coordination.membership import LeadTerm
from openrecycle.agent.launcher.processes import (
    ProcessPool,
    RankOf,
    SpareRank,
    SpareRanks,
    Spares,
    WorkerProcess,
    preload,
)
from openrecycle.agent.messages import channel
from openrecycle.agent.messages.client import Offset, Say
from openrecycle.agent.messages.protocol import boot_id
from openrecycle.agent.models.workload import WorkloadSource
from openrecycle.agent.monitoring.liveness import MOST_OF_A_TURN, LoopLag
from openrecycle.agent.nodes.frames import HANDSHAKE_SECONDS, Frames, NotTrusted, greet, prepare
from openrecycle.agent.nodes.role import LedElsewhere, NodeRole, publish_lead
from openrecycle.agent.nodes.succession import (
    SEEK_SECONDS,
    Address,
    Copy,
    Here,
    LeadStatus,
    Spool,
    ask,
    may_go_on,
    pack,
    tell,
)
from openrecycle.agent.workers import worker
from openrecycle.agent.workers.spec import MACHINE, RunSpec, WorkerSpec, by_name, encode_run, encode_spec
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.jobs.words import count, names, printable

# -- which node runs which cell of the grid ----------------------------------------------------------


def place(job: Job, nodes: int) -> dict[Worker, int]:
    """The node of every cell.

    Up to as many nodes as pipelines: whole pipelines, in turn, so that neighbouring stages share a
    node. Beyond that a pipeline is cut over several nodes, which no other pipeline uses. Either way
    the replicas of a stage are on min(nodes, pipelines) different nodes. Raises InputError for more
    nodes than workers.
    """
    if not 1 <= nodes <= job.pipelines * job.stages:
        raise InputError("--nodes", nodes, f"from 1 to {job.pipelines * job.stages}, a worker for each")
    out = {}
    for cell in job.workers():
        first = cell.pipeline % nodes
        own = range(first, nodes, job.pipelines) if nodes > job.pipelines else (first,)
        out[cell] = own[cell.stage * len(own) // job.stages]
    return out


def stand_in(cell: Worker, home: int, living: Collection[int], where: Mapping[Worker, int]) -> int:
    """The node to start `cell` on: its own, or, where that is lost, the living one with the fewest
    replicas of its stage, then the fewest workers. where: node of every worker that runs."""
    if home in living:
        return home

    def burden(node: int) -> tuple[int, int, int]:
        here = [w for w, n in where.items() if n == node]
        return sum(w.stage == cell.stage for w in here), len(here), node

    return min(living, key=burden)


# -- the pool ----------------------------------------------------------------------------------------

CLOCK_SAMPLES = 7
"""Round trips by which a node's clock is compared with the lead's; the quickest one counts."""

CALL_SECONDS = 2.0
"""So often a lead that has taken over looks for those that come back."""

NODE_SECONDS = 600.0
"""A cluster may start its nodes one after the other."""

NAME_SECONDS = 60.0
"""A name server may repeat for half a minute that a new name is unknown."""

MAX_STRANGERS = 64
"""Connections that may be in the handshake at once; for one more, the oldest makes way."""

STRANGERS_SECONDS = 60.0
"""So long it is not said again that a connection was turned away for the same reason."""

HELLO_BYTES = 64 * 1024
"""Of what a node says of itself before it takes part."""

MAX_HOST = 255
"""Characters of the name of a host."""

MAX_STRANGERS_OF_ONE = 16
"""Of those, from one address."""

COPY_SECONDS = 1.0
"""So often the other nodes get a copy of what the lead knows, at least: so they hear that it leads."""

LINES_SECONDS = 0.1
"""At most so often they get one because the record has got longer: in it each iteration is to keep its generation."""

MOST_UNREAD = 20
"""Copies that a node has been sent, and has not said that it has."""

_NO_START = "the job does not start"

ACK_SECONDS = 0.25
"""So long the lead waits in a turn for those that must have the copy before what was decided is sent."""


class RemoteProcess:
    """What the launcher asks of a process, of one on another node. sentinel: becomes readable at its end."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.spare: tuple[int, ...] = ()
        self.ends = None
        self.sentinel, self._write = os.pipe()
        self._over = threading.Event()
        self._kill = kill

    def is_alive(self) -> bool:
        return not self._over.is_set()

    def is_ending(self) -> bool:
        return self._over.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)

    def kill(self) -> None:
        self._kill()

    def ended(self, exitcode: int | None, spare: tuple[int, ...] = ()) -> None:
        """exitcode: None when nobody can know it. spare: see agent.launcher.processes.WorkerProcess.spare_ranks."""
        if not self._over.is_set():
            self.exitcode, self.spare = exitcode, spare
            self._over.set()
            os.close(self._write)


@dataclass
class RemoteWorker(WorkerProcess):
    """node: the link that its messages go through."""

    elsewhere: ClassVar[bool] = True
    node: NodeLink = field(kw_only=True)

    def kill(self) -> None:
        self.node.kill(self.incarnation, fenced=self.fenced)

    def end(self) -> None:
        """There."""
        self.asked = True
        self.node.post({"kind": "end", "incarnation": self.incarnation})

    def close(self) -> None:
        self.pipe.close()

    @property
    def clock(self) -> Offset:
        return Offset(self.node.clock_offset // 1000, round(self.node.round_trip * 5e5) + 1)

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        """As its node books them."""
        return self.process.spare if isinstance(self.process, RemoteProcess) else ()

    @property
    def ending(self) -> str:
        if self.process.exitcode is not None:
            return f"{super().ending} on node {self.node.rank}"
        if self.node.alive:  # of two leads the first may not have come to start it
            return f"was not running on node {self.node.rank} when this launcher took the lead"
        return f"was lost with node {self.node.rank}"


class NodeLink:
    """The lead's end of one node. lost: called, once, in a thread of the link.

    address: under which the node's workers reach each other and the lead. clock_offset: nanoseconds
    to add to the node's monotonic clock for the lead's; round_trip: seconds of a message and its answer.
    """

    def __init__(
        self,
        frames: Frames,
        rank: int,
        address: str,
        lost: Callable[[NodeLink], None],
        until: float | None = None,
        *,
        news: threading.Condition | None = None,
    ) -> None:
        """until: monotonic seconds by which clocks must be compared. news: told when the node has `acked` more copies,
        or has `resumed`. Raises NotTrusted and OSError."""
        self.rank, self.address = rank, address
        self._frames, self._lost, self._news = frames, lost, news or threading.Condition()
        self.acked = 0
        """The newest copy that it has."""
        self.resumed = False
        """Has it told the new lead what it had not told the one before?"""
        self.spares: list[RankOf] | None = None
        """Those that it had then; None: it has not said so, or that is known."""
        self.resumes = 0, 0
        """Of what it has from the lead before: the term, and how many lines of the record."""
        self.handed = 0
        """The newest copy that was sent there."""
        self.process = ""
        """Of the launcher there, as it says; "": it does not."""
        self.forgot = False
        """Does nobody choose a lead any more by what was sent there? The launcher is gone, or has come back since, as
        one that knows nothing."""
        self._lines = 0
        self._plan = ""
        self.alive = True
        self.clock_offset, self.round_trip = _compare_clocks(frames, until)
        self._workers: dict[str, tuple[RemoteProcess, Connection]] = {}
        self._lock = threading.Lock()
        nothing = OSError, NotTrusted, KeyError, TypeError, ValueError
        channel.follow(frames.receive, self._hear, self._break, name=f"from-node-{rank}", gone=nothing)
        frames.open_outbox(f"to-node-{rank}")

    def post(self, message: dict[str, Any], unsendable: Callable[[], object] | None = None) -> None:
        """Returns at once; a node that is gone does not matter here. unsendable: as of Frames."""
        self._frames.post(message, unsendable)

    def start(self, spec: WorkerSpec, pipe: Connection, fill: Iterable[RankOf] = ()) -> RemoteProcess:
        """pipe: where what the worker says is written to. fill: spare ranks of the node, in whose place it begins."""
        process = self.adopt(spec.incarnation, pipe)
        self.post({"kind": "start", "spec": encode_spec(spec), "fill": list(fill)})
        return process

    def kill(self, incarnation: str, *, fenced: bool = False) -> None:
        """fenced: as of a WorkerProcess: none of its ranks is spare."""
        self.post({"kind": "kill", "incarnation": incarnation, "fenced": fenced})

    def adopt(self, incarnation: str, pipe: Connection) -> RemoteProcess:
        """One that runs there already, or is about to be started; as `start`."""
        process = RemoteProcess(lambda: self.kill(incarnation))
        with self._lock:
            if self.alive:
                self._workers[incarnation] = process, pipe
            else:
                pipe.close()
                process.ended(None)
        return process

    def had(self, term: int, lines: int) -> None:
        """So many lines of the record were written in terms up to that one: what it has of them, from that term, is the
        same."""
        of_term, has = self.resumes
        self._lines = min(has, lines) if of_term == term else 0

    def hand(self, copy: Copy, record: Spool) -> None:
        """What the node lacks of the record, and the copy; the job and the plan only where they are new to it. The
        thread that sends reads the record: a node that comes back lacks all of it."""
        self._frames.post_all(record.messages(self._lines, copy.lines))
        message = replace(copy, ahead=self.clock_offset).to_message()
        if self._plan:
            del message["job"]
        if self._plan == copy.plan:
            del message["plan"]
        self._lines, self._plan, self.handed = copy.lines, copy.plan, copy.number
        self.post(message)

    def close(self) -> None:
        self._frames.close()

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] in ("ack", "resumed"):
            with self._news:
                if message["kind"] == "ack":
                    self.acked = int(message["number"])
                else:
                    self.resumed, self.spares = True, [(str(i), int(rank)) for i, rank in message["spares"]]
                self._news.notify_all()
            return
        known = self._workers.get(message["incarnation"])
        if known is None:
            return
        process, pipe = known
        if message["kind"] == "from":
            said = message["message"]
            said["at"] += self.clock_offset
            with contextlib.suppress(OSError):
                pipe.send_bytes(json.dumps(said).encode())
        elif message["kind"] == "exited":
            with self._lock:
                del self._workers[message["incarnation"]]
            pipe.close()
            process.ended(_exit_code(message["code"]), _ranks(message.get("spare")))

    def _break(self) -> None:
        with self._lock:
            self.alive = False
            workers, self._workers = self._workers, {}
        for process, pipe in workers.values():
            pipe.close()
            process.ended(None)
        self._frames.close()
        self._lost(self)


Electorate = dict[int, NodeLink | None]
"""Nodes by which another lead may be chosen, and by what link each has come; None: it has not come to this lead."""


def _exit_code(code: Any) -> int | None:
    """As a node says it; None for what is none."""
    return code if isinstance(code, int) and not isinstance(code, bool) and abs(code) < 1 << 31 else None


def _ranks(spare: Any) -> tuple[int, ...]:
    """Those that a node says are spare; none for what are none."""
    known = isinstance(spare, list) and all(type(rank) is int and 0 <= rank < 64 for rank in spare)
    return tuple(sorted(set(spare))) if known else ()


class NodeHub:
    """Where a launcher listens as long as the job lasts: the lead for the job's nodes, of which one that was lost may
    come back; the others, until they lead, for those that ask how they stand."""

    def __init__(
        self, host: str, port: int, nodes: int, token: str, say: Say, lead_status: LeadStatus | None = None
    ) -> None:
        """lead_status: of this launcher; None: it leads from the start. Raises OSError when it can't listen there, and
        InputError as `prepare`."""
        prepare(token)
        self._nodes, self._token, self._say = nodes, token, say
        self.lead_status = lead_status or LeadStatus(0, lead=0, term=1, run=uuid.uuid4().hex)
        self.links: dict[int, NodeLink] = {}
        self.members: dict[int, Address] = {}
        """Where the other nodes listen that are in the job, and not known to be gone."""
        self._came: dict[int, NodeLink] = {}
        """The newest link of each node, also where it is broken."""
        self.memory: dict[int, int] = {}
        """Bytes that the workers of a node may take, of the nodes that have said so."""
        self.memory_shared_by = dict[int, str]()
        """Of that, with which other nodes."""
        self.hosts: dict[int, str] = {}
        """The name of a node's host, as its workers say it."""
        self.lead: Address | None = None
        """Where the lead listens, if that is another launcher, as far as is known."""
        self.deposed = ""
        """Why this launcher may not lead any more; "": it may."""
        self.hands_out = False
        """Does it lead a job that has begun? Then every node soon gets a copy."""
        self._expected: frozenset[int] | None = frozenset() if lead_status is None else None
        """Nodes that have followed the lead before this one, and are to follow it: no others are let in meanwhile.
        None: this launcher does not lead."""
        self.news = threading.Condition()
        self._closing = self._began = False
        self._last_word, self._finished = "", False
        self._strangers: dict[socket.socket, str] = {}  # with their addresses, the oldest first
        self._strangers_lock = threading.Lock()
        self._said_of_strangers: dict[str, float] = {}
        """When, in the last STRANGERS_SECONDS, by what."""
        self._listener = socket.create_server((host, port))
        self.host, self.port = self._listener.getsockname()[:2]
        self._accepting = threading.Thread(target=self._accept, name="nodes", daemon=True)
        self._accepting.start()

    def wait_for_all(self, seconds: float) -> None:
        """Raises InputError naming the nodes that did not come, and LedElsewhere."""
        with self.news:
            came = self.news.wait_for(lambda: self.lead or len(self.links) == self._nodes - 1, seconds)
            lead = self.lead
            self._began = lead is None
            if not came:
                missing = sorted(set(range(1, self._nodes)) - set(self.links))
                raise InputError(
                    "--nodes",
                    self._nodes,
                    f"so many to come to {self.host}:{self.port} within {seconds:.0f} s; "
                    f"missing: node {', '.join(map(str, missing))}",
                )
        if lead is not None:
            raise LedElsewhere(*lead)

    def take_over(self, members: Mapping[int, Address], expected: frozenset[int]) -> None:
        """This launcher leads from now on. expected: nodes that have followed the lead before, and are to follow."""
        with self.news:
            self.members, self._expected, self.lead, self._began = dict(members), expected, None, True

    def followers(self, seconds: float) -> dict[int, NodeLink]:
        """Of those that are expected: who has come in so many seconds. Others of them may not come any more."""
        with self.news:
            expected = self._expected or frozenset()
            self.news.wait_for(lambda: expected <= self.links.keys(), seconds)
            self._expected = frozenset()
            out, missing = dict(self.links), self.members.keys() - self.links.keys()
        for rank in missing:
            self._watch(rank, self.members[rank])
        return out

    @property
    def electorate(self) -> Electorate:
        """As a copy that is made now names them."""
        return {rank: self._came.get(rank) for rank in tuple(self.members)}  # others may add to them

    def follow(self, number: int, electorate: Electorate) -> bool:
        """Do half of those nodes follow this lead, as they have that copy, and have come by that link?"""
        left = {rank: link for rank, link in electorate.items() if rank in self.members and not (link and link.forgot)}
        have = sum(left.get(rank) is link and link.acked >= number for rank, link in self.links.items())
        return may_go_on(1 + have, 1 + len(left))[0]

    def depose(self, why: str) -> None:
        """This launcher leads no more."""
        with self.news:
            self.deposed = self.deposed or why
            self.news.notify_all()

    def close(self, reason: str, *, finished: bool = False) -> None:
        """Tells every node that the job is over, also one that is being welcomed just now. "": no more than where the
        lead is, if that is known, since another launcher leads. finished: their commands have succeeded, too; else
        whoever started them may start them again."""
        with self.news:
            self._closing, self._last_word, self._finished = True, reason, finished
        # Wakes the accepting thread; closing alone would not, and it might go on to accept where another socket has the
        # number by then.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(5.0)  # where shutting down wakes nobody, as on macOS
        self._listener.close()
        for link in list(self.links.values()):
            self._dismiss(link)
        deadline = time.monotonic() + 5.0
        with self.news:
            self.news.wait_for(lambda: not self.links, deadline - time.monotonic())
        for link in list(self.links.values()):
            link.close()

    def _dismiss(self, link: NodeLink) -> None:
        if not self._last_word:
            if self.lead is None:
                link.close()
            else:  # which closes it
                link.post({"kind": "moved", "lead": self.lead})
            return
        link.post({"kind": "over", "reason": self._last_word, "finished": self._finished})
        link.post({"kind": "bye"})

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.1)  # out of file descriptors, say: the same again would be refused
                continue
            self._make_room(peer[0])
            with self._strangers_lock:
                self._strangers[connection] = peer[0]
            threading.Thread(target=self._welcome, args=(connection,), name="welcome", daemon=True).start()

    def _make_room(self, address: str) -> None:
        """For one more from there: whoever says nothing shuts nobody out."""
        with self._strangers_lock:
            same = [stranger for stranger, where in self._strangers.items() if where == address]
            crowded = same if len(same) >= MAX_STRANGERS_OF_ONE else []
            if not crowded and len(self._strangers) >= MAX_STRANGERS:
                crowded = list(self._strangers)
            if crowded:
                del self._strangers[crowded[0]]
                # Its thread, which waits for it, closes it.
                with contextlib.suppress(OSError):
                    crowded[0].shutdown(socket.SHUT_RDWR)

    def _meet(self, connection: socket.socket) -> tuple[dict[str, Any], NodeLink | None]:
        """What it says of itself, and its link; None: it only wanted an answer, or has to come again. Raises OSError,
        NotTrusted, KeyError, TypeError and ValueError."""
        until = time.monotonic() + HANDSHAKE_SECONDS
        frames = greet(connection, self._token, "lead", until)
        hello = frames.receive(until, most=HELLO_BYTES)
        if hello.get("kind") in ("look", "vote"):
            frames.send(self.lead_status.answer(hello))
            return hello, None
        if hello.get("kind") == "led":
            self._hear_of_lead(hello)
            return hello, None
        if passing := self._not_now(hello):
            frames.send({"kind": "refused", "reason": passing, "again": True, "lead": self.lead})
            return hello, None
        refusal = self._objection(hello)
        if refusal:
            rank = hello.get("rank")
            # The link of one that was lost takes a while to break.
            again = isinstance(rank, int) and rank in self.links
            frames.send({"kind": "refused", "reason": refusal, "again": again})
            raise NotTrusted(refusal)
        term, has = map(int, hello.get("resumes", (0, 0)))
        with self.news:
            others = [address for rank, address in self.members.items() if self._began and rank != hello["rank"]]
        # Of whom one may lead before the node gets a copy.
        frames.send({"kind": "welcome", "begun": self.hands_out, "others": others})
        rank, address = int(hello["rank"]), str(hello["address"])
        link = NodeLink(frames, rank, address, self._forget, until, news=self.news)
        link.resumes = term, has
        return hello, link

    def _welcome(self, connection: socket.socket) -> None:
        hello: dict[str, Any] = {}
        link: NodeLink | None = None
        try:
            hello, link = self._meet(connection)
        except (OSError, NotTrusted, KeyError, TypeError, ValueError) as error:
            if isinstance(error, NotTrusted):
                self._say_once(f"a node was turned away: {printable(str(error))}")
        finally:
            with self._strangers_lock:  # which _make_room shuts down: so not once it is closed
                self._strangers.pop(connection, None)
        if link is None:
            connection.close()
            return
        with self.news:
            if link.rank in self.links or ("resumes" in hello and link.rank not in (self._expected or ())):
                link.close()
                return
            if self._closing:
                self._dismiss(link)
                return
            if link.alive:
                if isinstance(port := hello.get("port"), int):
                    self.members[link.rank] = link.address, port
                if isinstance(memory := hello.get("memory"), int):
                    self.memory[link.rank] = memory
                self.memory_shared_by[link.rank] = str(hello.get("memory_shared_by", ""))
                if isinstance(host := hello.get("host"), str):
                    self.hosts[link.rank] = host[:MAX_HOST]
                link.process = str(hello.get("process", ""))[:64]
                earlier = self._came.get(link.rank)
                if earlier is not None and link.process:  # another may have been started in its place, and it may live
                    earlier.forgot = earlier.forgot or earlier.process == link.process
                self.links[link.rank] = self._came[link.rank] = link
            self.news.notify_all()
        self._say(f"node {link.rank} is here, at {link.address} (answers in {1000 * link.round_trip:.2f} ms)")

    def _say_once(self, text: str) -> None:
        """Of strangers: whoever knocks without end, with a fault or to do harm, fills no disk with it."""
        now = time.monotonic()
        with self._strangers_lock:
            known = {said: at for said, at in self._said_of_strangers.items() if now < at + STRANGERS_SECONDS}
            self._said_of_strangers = {text: now} | known
        if text not in known:
            self._say(text)

    def call_back(self, front: Address) -> None:
        """This launcher leads, and not from `front`, where all nodes look for their lead: whoever listens there again
        is told so, as long as the job lasts."""
        threading.Thread(target=self._call_back, args=(front,), name="calling back", daemon=True).start()

    def _call_back(self, front: Address) -> None:
        while not self._closing:
            if 0 not in self.links:
                tell(front, self._token, {"kind": "led", "lead": (self.host, self.port)})
            time.sleep(CALL_SECONDS)

    def _hear_of_lead(self, message: Mapping[str, Any]) -> None:
        """It does not matter to who leads a job that has begun."""
        host, port = message["lead"]
        with self.news:
            if not (self.lead_status.leads and self._began):
                self.lead = str(host), int(port)
            self.news.notify_all()

    def _not_now(self, hello: Mapping[str, Any]) -> str:
        """Why a node can't take part yet; empty when it can."""
        if self._expected is None:
            return f"node {self.lead_status.rank} does not lead"
        if self.lead is not None:
            return f"node {self.lead_status.rank} does not lead: the job has a lead"
        if self._expected and "resumes" not in hello:
            return f"node {self.lead_status.rank} is about to take the lead"
        return ""

    def _objection(self, hello: Mapping[str, Any]) -> str:
        """Why a node can't take part; empty when it can."""
        rank, own = hello.get("rank"), self.lead_status.rank
        # As the lead it would have no place for some of the others, or too many.
        if (nodes := hello.get("nodes", self._nodes)) != self._nodes:
            return f"--nodes: got {nodes!r}, expected {self._nodes}, as on node {own}, which leads"
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self._nodes or rank == own:
            others = f"from 1 to {self._nodes - 1}" if own == 0 else f"below {self._nodes}, and not {own}, which leads"
            return f"--node-rank: got {rank!r}, expected a whole number {others}"
        if "resumes" in hello and rank not in (self._expected or ()):
            return f"node {rank} has come too late: node {own} leads without it"
        if rank in self.links:
            return f"--node-rank: got {rank}, and there is a node {rank} already"
        address = hello.get("address")
        if not isinstance(address, str) or not 0 < len(address) < 256:
            return f"node {rank} has not said under which address it is reached"
        for name, ours in MACHINE.items():
            if hello.get(name) != ours:
                return f"node {rank} has {name} {hello.get(name)}, the leader {ours}: they would not get the same bits"
        return ""

    def _forget(self, link: NodeLink) -> None:
        with self.news:
            if self.links.get(link.rank) is link:
                del self.links[link.rank]
            self.news.notify_all()
            address = self.members.get(link.rank)
        if not self._closing:
            self._say(f"the connection with node {link.rank} is broken: its workers count as ended")
            if address is not None:
                self._watch(link.rank, address, link)

    def _watch(self, rank: int, address: Address, link: NodeLink | None = None) -> None:
        args = rank, address, link
        threading.Thread(target=self._find_out, args=args, name=f"node-{rank}-gone", daemon=True).start()

    def _find_out(self, rank: int, address: Address, link: NodeLink | None) -> None:
        """Until a node that is lost is known to be gone, it may follow another lead, or be one; also where another
        process has come in its place. link: which it had."""
        lead_status, process = self.lead_status, "" if link is None else link.process

        def unknown() -> bool:
            if self._came.get(rank) is link:
                return rank in self.members and rank not in self.links
            return link is not None and not link.forgot

        while not self._closing and unknown():
            seen = ask(address, self._token, lead_status.run)
            # Whichever process it is: one that has begun there since may know of another lead by now.
            newer = isinstance(seen, Here) and seen.term > lead_status.term
            another = isinstance(seen, Here) and bool(process) and seen.process != process
            with self.news:
                if seen == "gone" or (another and not newer):
                    if link is not None:
                        link.forgot = True
                    if self._came.get(rank) is link and rank not in self.links:
                        self.members.pop(rank, None)
                self.news.notify_all()
            if isinstance(seen, Here) and newer and seen.lead is not None:
                self.depose(f"node {seen.lead} leads the job by now, since this node was not heard for too long")
            time.sleep(0.5)


Fits = Callable[[Collection[Worker], int | None, str], str]
"""(workers, the bytes that they may have where that is known, where) to a warning, or ""; raises InputError."""


def open_pool(
    role: NodeRole, job: Job, workload: WorkloadSource, token: str | None, say: Say, fits: Fits | None = None
) -> SpreadPool:
    """Waits for all nodes of a job that this one leads. fits: asked about the workers of each machine; of one on which
    this node is alone it has been. Raises InputError, and LedElsewhere."""
    homes = place(job, role.nodes)
    by_name(workload)
    wait_for_name(role.host, role.port, say)
    try:
        hub = NodeHub(role.host, role.port, role.nodes, token or "", say)
    except OSError as error:
        raise InputError(
            "--lead", f"{role.host}:{role.port}", f"an address of this host and a free port ({error.strerror})"
        ) from None
    try:
        if role.store is not None:
            publish_lead(role.store, hub.port)
        say(f"waiting for {count(role.nodes - 1, 'more node')} at {hub.host}:{hub.port}")
        hub.wait_for_all(NODE_SECONDS)
        if fits is not None:
            for nodes, workers, has in sharing(hub, homes, role.rank):
                which = names([*map(str, nodes)], last=" and ")
                where = f"on node {which}" if len(nodes) == 1 else f"of nodes {which} on one machine"
                if nodes != [role.rank] and (warning := fits(workers, has, where)):
                    say(warning)
    except LedElsewhere:
        hub.close("")
        raise
    except BaseException:
        hub.close(_NO_START)
        raise
    return SpreadPool(preload(workload), hub, homes)


class NodeMemory(NamedTuple):
    """workers: those that begin there. has: the bytes that those may have that are there; None: it has not said so.
    host: as `host_of`."""

    workers: list[Worker]
    has: int | None
    host: str


def memory_shared_by() -> str:
    """The same for nodes that share the memory which they say that they have; "": that is not known."""
    machine, group = boot_id(), memory_group()
    return f"{machine}/{group}" if machine and group is not None else ""


def host_of(node: int, name: str) -> str:
    """Where a worker is, for people, and no other node's are there: hosts may all have the same name."""
    suffix = f" (node {node})"
    return f"{name[: MAX_HOST - len(suffix)]}{suffix}".strip()


def machines(hub: NodeHub, homes: Mapping[Worker, int], own: int) -> dict[int, NodeMemory]:
    """By node. Of memory that several nodes share, as launchers of one machine do, each has what its workers are of all
    of them."""
    hosts = {**hub.hosts, own: socket.gethostname()}
    out = dict[int, NodeMemory]()
    for nodes, together, has in sharing(hub, homes, own):
        for node in nodes:
            workers = [worker for worker in together if homes[worker] == node]
            part = None if has is None else has * len(workers) // len(together)
            out[node] = NodeMemory(workers, part, host_of(node, hosts.get(node, "")))
    return dict(sorted(out.items()))


def sharing(hub: NodeHub, homes: Mapping[Worker, int], own: int) -> list[tuple[list[int], list[Worker], int | None]]:
    """Of each memory: the nodes that share it, the workers that begin there, and the bytes that all of them may have;
    None: nobody has said so."""
    has = {**hub.memory, **({} if (limit := memory_limit()) is None else {own: limit})}
    shared_by = {**hub.memory_shared_by, own: memory_shared_by()}
    groups = dict[str, list[int]]()
    for node in sorted(set(homes.values())):
        groups.setdefault(shared_by.get(node) or f"node {node}", []).append(node)
    return [
        (
            nodes,
            [worker for worker, home in homes.items() if home in nodes],
            min((has[node] for node in nodes if node in has), default=None),
        )
        for nodes in groups.values()
    ]


def wait_for_name(host: str, port: int, say: Say, seconds: float = NAME_SECONDS) -> None:
    """Until this host's own name is known: a pod of Kubernetes runs before that. After so many seconds it returns all
    the same; whoever listens there says what is wrong."""
    deadline, said = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(host, port)
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                return
            if not said:
                say(f"{host} has no address yet ({error.strerror}); it is tried again for {seconds:.0f} s")
                said = True
            time.sleep(min(1.0, seconds / 10))
        else:
            return


class SpreadPool(ProcessPool):
    """Starts each worker on the node that `homes` says; see `stand_in` for those of lost nodes.

    What workers are told waits for `hand_out`. record: its lines so far.
    """

    def __init__(
        self, modules: list[str], hub: NodeHub, homes: Mapping[Worker, int], record: Spool | None = None
    ) -> None:
        super().__init__(worker.main, modules)
        self.host = hub.host
        self._hub, self._homes = hub, homes
        self._where: dict[str, int] = {}
        """Node of every incarnation that runs."""
        self._record = Spool() if record is None else record
        self._decided: list[Callable[[], None]] | None = []
        """What waits for the others to have a copy; None: nothing has to, as the job is at its end."""
        self._copies = 0
        self._due, self._lines = 0.0, 0
        self._followed_at, self._lag = time.monotonic(), LoopLag()
        self._linked = dict(hub.links)
        """When it was last looked which spare ranks there are."""
        self._electorates = [hub.electorate]
        """Of the newest copy that enough nodes have, and of those since: by any of them others may choose a lead."""
        self._job: dict[str, Any] = {}

    @property
    def lead(self) -> str:
        """As a console is told which launcher asks."""
        return str(LeadTerm(self._hub.lead_status.term, self._hub.lead_status.rank))

    @property
    def machines(self) -> list[NodeMemory]:
        """Of the nodes."""
        return list(machines(self._hub, self._homes, self._hub.lead_status.rank).values())

    def depose(self, why: str) -> None:
        """Another launcher leads; from any thread."""
        self._hub.depose(why)

    def start(
        self,
        worker: Worker,
        make_spec: Callable[[str], Any],
        now: float,
        spares: Spares | None = None,
        node: int | None = None,
    ) -> WorkerProcess:
        self._look_for_spares()
        links = dict(self._hub.links)
        own = self.own_node
        if spares is not None:
            node = spares.node
        elif node is None:
            where = {w: self._where[entry.incarnation] for w, entry in self.running.items()}
            node = stand_in(worker, self._homes[worker], {own, *links}, where)
        if node == own:
            own_spec = partial(self._told, make_spec, own, self._hub.host)
            entry = super().start(worker, own_spec, now, spares)
            self._hold_back(entry)
        elif node not in links:
            raise OSError(f"node {node} is lost")  # since it was found to be there
        else:
            entry = self._start_there(links[node], worker, make_spec, now, spares)
            self.running[worker] = entry
        self._where[entry.incarnation] = node
        return entry

    def take_spares(self, ranks: int) -> Spares | None:
        self._look_for_spares()
        return super().take_spares(ranks)

    def _look_for_spares(self) -> None:
        """Those of a node that is gone are lost, also where it is back. One that has followed from the lead before says
        which it has: what it tells of a worker that this lead still knows comes with that one's end."""
        links = dict(self._hub.links)
        self.spares.keep({self.own_node, *(node for node, link in links.items() if self._linked.get(node) is link)})
        self._linked = links
        for node, link in links.items():
            with self._hub.news:  # under which the link's thread says them, once
                told, link.spares = link.spares, None
            if told is not None:
                running = {entry.incarnation for entry in self.entries}
                filled = {rank for entry in self.entries for rank in entry.made_of}
                left = [rank for rank in told if rank[0] not in running and rank not in filled]
                self.spares.replace(node, [SpareRank(rank, -1) for rank in left])

    @property
    def own_node(self) -> int:
        return self._hub.lead_status.rank

    def node_of(self, entry: WorkerProcess) -> int:
        return entry.node.rank if isinstance(entry, RemoteWorker) else self.own_node

    def host_of(self, entry: WorkerProcess, name: str) -> str:
        return host_of(self.node_of(entry), name)

    def has_node(self, node: int) -> bool:
        link = self._hub.links.get(node)
        return node == self._hub.lead_status.rank or (link is not None and link.alive)

    def adopt(self, entry: WorkerProcess) -> None:
        """A worker of this node, which was started for the lead before."""
        self._hold_back(entry)
        self.running[entry.worker] = entry
        self._where[entry.incarnation] = self._hub.lead_status.rank

    def adopt_there(self, link: NodeLink, worker: Worker, incarnation: str, now: float) -> RemoteWorker:
        """As `adopt`, of another node's."""
        ours, theirs = self.context.Pipe(duplex=False)
        entry = self._remote(link, worker, incarnation, link.adopt(incarnation, theirs), ours, now)
        self.running[worker] = entry
        self._where[incarnation] = link.rank
        return entry

    def know_spares(self, here: SpareRanks) -> None:
        """Of this node, as it knew them, under the number 0, before it led. The others say which are theirs."""
        self.spares.replace(self.own_node, here.on(0))

    def decide(self, send: Callable[[], None]) -> None:
        if self._decided is None:
            send()
        else:
            self._decided.append(send)

    def recorded(self, line: dict[str, Any]) -> str:
        return self._record.add([line])

    def hand_out(self, run: RunSpec, saved: Callable[[], dict[str, Any] | None], *, last: bool = False) -> str:
        # What this process itself stood still is no silence of the others'.
        self._followed_at = min(time.monotonic(), self._followed_at + self._lag.late(MOST_OF_A_TURN))
        try:
            return self._hand_out(run, saved, last=last)
        finally:
            self._lag.late(0.0)

    def _hand_out(self, run: RunSpec, saved: Callable[[], dict[str, Any] | None], *, last: bool) -> str:
        hub, now = self._hub, time.monotonic()
        if hub.deposed or self._decided is None:
            return hub.deposed
        longer = len(self._record) > self._lines and now >= self._due - COPY_SECONDS + LINES_SECONDS
        if not (self._decided or last or longer or now >= self._due):
            return ""
        self._due, self._lines = now + COPY_SECONDS, len(self._record)
        document = saved()
        if document is not None:
            if not self._copies:
                self._followed_at = now  # until now there was nothing to follow
                hub.hands_out = True
            self._copies += 1
            with hub.news:
                nodes, links, electorate = dict(hub.members), dict(hub.links), hub.electorate
            if electorate != self._electorates[-1]:
                self._electorates.append(electorate)
            copy = self._copy(run, document, nodes)
            for rank, link in links.items():
                # Of one that stands still nothing is to pile up; what is decided may not come without a copy.
                if rank in nodes and (self._decided or last or link.handed - link.acked < MOST_UNREAD):
                    link.hand(copy, self._record)
            if not self._acked(copy.number, time.monotonic() + (COPY_SECONDS if last else ACK_SECONDS)):
                if now > self._followed_at + SEEK_SECONDS:
                    hub.depose(f"for {SEEK_SECONDS:.0f} s too few of the other nodes have answered")
                return hub.deposed
            self._electorates, self._followed_at = [electorate], now
        decided, self._decided = self._decided, None if last else []
        for send in decided:
            send()
        return ""

    def forget(self, entry: WorkerProcess) -> None:
        self._look_for_spares()
        super().forget(entry)
        self._where.pop(entry.incarnation, None)
        if isinstance(entry, RemoteWorker):
            os.close(entry.process.sentinel)

    def call_off(self) -> None:
        """The job, for which nothing has been started yet."""
        self._hub.close(_NO_START)

    def kill_all(self, unfinished: str = "") -> None:
        super().kill_all()
        word = f"the job is over: {unfinished}" if unfinished else "the job is over"
        self._hub.close(word if self._decided is None else "", finished=not unfinished)

    def _acked(self, number: int, until: float) -> bool:
        """Have enough nodes got that copy, by then?"""
        hub = self._hub

        def enough() -> bool:
            return all(hub.follow(number, electorate) for electorate in self._electorates)

        with hub.news:
            hub.news.wait_for(lambda: hub.deposed or enough(), max(0.0, until - time.monotonic()))
            return not hub.deposed and enough()

    def _copy(self, run: RunSpec, document: dict[str, Any], nodes: Mapping[int, Address]) -> Copy:
        lead_status = self._hub.lead_status
        self._job = self._job or encode_run(run)
        workers = [entry.told() | {"node": self._where[entry.incarnation]} for entry in self.running.values()]
        heard = {entry.incarnation: entry.heard for entry in self.entries}
        plan = document.pop("plan")
        own = self._hub.host, self._hub.port
        return Copy(
            *(lead_status.run, lead_status.term, self._copies, lead_status.rank, 0, {**nodes, lead_status.rank: own}),
            *(heard, len(self._record), pack(document | {"workers": workers}), plan, self._job),
        )

    @staticmethod
    def _told(make_spec: Callable[[str], Any], node: int, address: str, incarnation: str) -> Any:
        return replace(make_spec(incarnation), node=node, address=address)

    def _hold_back(self, entry: WorkerProcess) -> None:
        entry.send = lambda message: self.decide(lambda: entry.outbox.put(message))

    def _start_there(
        self, link: NodeLink, worker: Worker, make_spec: Callable[[str], Any], now: float, spares: Spares | None
    ) -> RemoteWorker:
        incarnation = uuid.uuid4().hex[:16]
        ours, theirs = self.context.Pipe(duplex=False)
        spec = self._told(make_spec, link.rank, link.address, incarnation)
        if spares is None:
            filled = self.spares.first(link.rank, spec.ranks)
            spares = Spares(link.rank, self.spares.take_of(link.rank, filled))
        process = link.start(spec, theirs, spares.ranks)
        entry = self._remote(link, worker, incarnation, process, ours, now)
        entry.made_of = spares.ranks
        return entry

    def _remote(
        self, link: NodeLink, worker: Worker, incarnation: str, process: RemoteProcess, pipe: Connection, now: float
    ) -> RemoteWorker:
        entry = RemoteWorker(worker, incarnation, process, pipe, now, node=link)
        whom = {"kind": "to", "incarnation": incarnation}
        # Whatever can't be sent to it is a fault of ours, after which it would wait for good.
        entry.send = lambda message: self.decide(lambda: link.post(whom | {"message": message}, entry.kill))
        return entry


def _compare_clocks(frames: Frames, until: float | None) -> tuple[int, float]:
    """(offset in ns, round trip in seconds). Error: at most half the round trip. Raises NotTrusted and OSError."""
    samples = []
    for _ in range(CLOCK_SAMPLES):
        started = time.monotonic_ns()
        frames.send({"kind": "clock"})
        theirs = frames.receive(until, most=HELLO_BYTES).get("at")
        if not isinstance(theirs, int) or abs(theirs) >= 1 << 63:
            raise NotTrusted(f"a clock that says {str(theirs)[:40]!r}")
        ended = time.monotonic_ns()
        samples.append((ended - started, (started + ended) // 2 - theirs))
    round_trip, offset = min(samples)
    return offset, round_trip / 1e9
