"""The leader's side of a job on several nodes: workers on other nodes look like processes of its own.

On every other node a small server (agent.nodes.server) starts and ends processes for the leader. A `RemoteWorker` has a
pipe and a sentinel like a `WorkerProcess`, so the launcher's loop does not tell them apart. When the connection with a
node breaks, the sentinels of all its workers become readable at once.
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
    LauncherAnswer,
    LeadStatus,
    Spool,
    ask,
    may_go_on,
    pack,
    tell,
)
from openrecycle.agent.workers import worker
from openrecycle.agent.workers.spec import (
    MACHINE,
    WORKLOAD,
    RunSpec,
    WorkerSpec,
    by_name,
    encode_run,
    encode_spec,
    same_on_all,
)
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.jobs.words import count, names, printable

# -- which node runs which cell of the grid ----------------------------------------------------------


def place(job: Job, nodes: int) -> dict[Worker, int]:
    """Returns the node of every cell. Raises InputError for more nodes than workers.

    With up to as many nodes as pipelines, each node gets whole pipelines, in turn, so that neighbouring stages share a
    node. With more nodes, a pipeline is cut over several nodes, which no other pipeline uses. In both cases the
    replicas of a stage are on min(nodes, pipelines) different nodes.
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
    """Returns the node on which to start `cell`: its own (`home`); or, if that is lost, the living one with the fewest
    replicas of its stage, then the fewest workers. where: the node of every worker that runs."""
    if home in living:
        return home

    def burden(node: int) -> tuple[int, int, int]:
        here = [w for w, n in where.items() if n == node]
        return sum(w.stage == cell.stage for w in here), len(here), node

    return min(living, key=burden)


# -- the pool ----------------------------------------------------------------------------------------

CLOCK_SAMPLES = 7
"""In how many round trips a node's clock is compared with the leader's; the quickest one counts."""

CALL_SECONDS = 2.0
"""The interval at which a leader that has taken over looks for launchers that come back."""

NODE_SECONDS = 600.0
"""How long the leader waits for all nodes: a cluster may start them one after the other."""

NAME_SECONDS = 60.0
"""How long to wait for a name: a name server may repeat for half a minute that a new name is unknown."""

MAX_STRANGERS = 64
"""How many connections may be in the handshake at once; for one more, the oldest is closed."""

STRANGERS_SECONDS = 60.0
"""How long the same reason for turning a connection away is not reported again."""

HELLO_BYTES = 64 * 1024
"""The most bytes that a node may send of itself before it takes part."""

MAX_HOST = 255
"""The most characters of the name of a host."""

MAX_STRANGERS_OF_ONE = 16
"""How many connections from one address may be in the handshake at once."""

COPY_SECONDS = 1.0
"""The longest time until other nodes get the next copy of what the leader knows, which also tells them that it
leads."""

LINES_SECONDS = 0.1
"""The shortest time between copies that are sent because the record has grown: each iteration in it keeps its
generation."""

MOST_UNREAD = 20
"""How many copies may be sent to a node before it acknowledges them."""

ANSWER_SECONDS = 5.0
"""How long a node may take to acknowledge a copy before no process is started there: what is sent to a node that is cut
off, or stands still, may never arrive."""

_NO_START = "the job does not start"

ACK_SECONDS = 0.25
"""How long the leader waits in a turn until enough nodes have the copy, before it sends what was decided."""


class RemoteProcess:
    """A worker's process on another node, as a ProcessHandle. sentinel: becomes readable when it has ended. unstarted:
    its node could not start it."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.spare: tuple[int, ...] = ()
        self.unstarted = False
        self.ends = None
        self.sentinel, write = os.pipe()
        self._write: int | None = write
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
        """Notes that the process has ended. exitcode: None: it can't be known. spare: see
        agent.launcher.processes.WorkerProcess.spare_ranks."""
        self.over(exitcode, spare)
        write, self._write = self._write, None
        if write is not None:
            os.close(write)

    def over(self, exitcode: int | None, spare: tuple[int, ...] = ()) -> None:
        """As `ended`, but `sentinel` does not tell yet."""
        if not self._over.is_set():
            self.exitcode, self.spare = exitcode, spare
            self._over.set()


@dataclass
class RemoteWorker(WorkerProcess):
    """A worker on another node. node: the link through which its messages go."""

    elsewhere: ClassVar[bool] = True
    node: NodeLink = field(kw_only=True)

    def has_ended(self, ready: Collection[object]) -> bool:
        # Those of a lost node end in one turn, though their sentinels can be read one after the other.
        return super().has_ended([*ready, self.process.sentinel] if self.process.is_ending() else ready)

    def kill(self) -> None:
        self.node.kill(self.incarnation, fenced=self.fenced)

    def end(self) -> None:
        """Has its node end the worker."""
        self.asked = True
        self.node.post({"kind": "end", "incarnation": self.incarnation})

    def close(self) -> None:
        self.pipe.close()

    @property
    def clock(self) -> Offset:
        return Offset(self.node.clock_offset // 1000, round(self.node.round_trip * 5e5) + 1)

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        """Its spare ranks, as its node has them."""
        return self.process.spare if isinstance(self.process, RemoteProcess) else ()

    @property
    def ending(self) -> str:
        if self.process.exitcode is not None:
            return f"{super().ending} on node {self.node.rank}"
        if self.node.alive:  # the leader before may not have come to start it
            return f"was not running on node {self.node.rank} when this launcher took the lead"
        return f"was lost with node {self.node.rank}"


class NodeLink:
    """The leader's end of the connection with one node. One thread hears the node, and one sends to it. lost: called
    once, in a thread of the link, when the connection breaks.

    address: at which the node's workers can be reached. clock_offset: nanoseconds to add to the node's monotonic clock
    to get the leader's. round_trip: seconds of a message and its answer.
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
        """until: monotonic seconds by which clocks must be compared. news: notified when the node has `acked` more
        copies, or has `resumed`. Raises NotTrusted and OSError."""
        self.rank, self.address = rank, address
        self._frames, self._lost, self._news = frames, lost, news or threading.Condition()
        self.acked = 0
        """The number of the newest copy that the node has."""
        self.resumed = False
        """Whether the node has told the new leader what it had not told the one before."""
        self.spares: list[RankOf] | None = None
        """The spare ranks that it had then; None: it has not said so, or they were taken over already."""
        self.resumes = 0, 0
        """What it has from the leader before: the term, and how many lines of the record."""
        self.handed = 0
        """The number of the newest copy that was sent to it."""
        self._asked_at = 0.0
        """Since when its answer is pending, if it has not acknowledged the newest copy."""
        self.process = ""
        """Identifies the launcher there, as it says; "": it does not say."""
        self.forgot = False
        """Whether what was sent to it counts no more when nodes choose a leader: the launcher is gone, or has come back
        since without knowing anything."""
        self._lines = 0
        self._plan = ""
        self.alive = True
        self.clock_offset, self.round_trip = _compare_clocks(frames, until)
        self._workers: dict[str, tuple[RemoteProcess, Connection]] = {}
        self._lock = threading.Lock()
        nothing = OSError, NotTrusted, KeyError, TypeError, ValueError
        channel.follow(frames.receive, self._hear, self._break, name=f"from-node-{rank}", gone=nothing)
        frames.open_outbox(f"to-node-{rank}")

    @property
    def answers(self) -> bool:
        return self.acked >= self.handed or time.monotonic() < self._asked_at + ANSWER_SECONDS

    def post(self, message: dict[str, Any], unsendable: Callable[[], object] | None = None) -> None:
        """Sends a message. Returns at once: the link's thread sends it. Does nothing for a node that is gone.
        unsendable: as in Frames."""
        self._frames.post(message, unsendable)

    def start(self, spec: WorkerSpec, pipe: Connection, fill: Iterable[RankOf] = ()) -> RemoteProcess:
        """Has the node start a worker. pipe: gets what the worker says. fill: the node's spare ranks in whose place the
        worker starts."""
        process = self.adopt(spec.incarnation, pipe)
        self.post({"kind": "start", "spec": encode_spec(spec), "fill": list(fill)})
        return process

    def kill(self, incarnation: str, *, fenced: bool = False) -> None:
        """Has the node kill a worker. fenced: as in WorkerProcess: none of its ranks is spare then."""
        self.post({"kind": "kill", "incarnation": incarnation, "fenced": fenced})

    def adopt(self, incarnation: str, pipe: Connection) -> RemoteProcess:
        """Takes over a worker that runs there already, or is about to be started. pipe: as in `start`."""
        process = RemoteProcess(lambda: self.kill(incarnation))
        with self._lock:
            if self.alive:
                self._workers[incarnation] = process, pipe
            else:
                pipe.close()
                process.ended(None)
        return process

    def had(self, term: int, lines: int) -> None:
        """Notes how many lines of the record come from terms up to `term`. If the node has lines from that term, these
        are the same, and need not be sent again."""
        of_term, has = self.resumes
        self._lines = min(has, lines) if of_term == term else 0

    def hand(self, copy: Copy, record: Spool) -> None:
        """Sends the lines of the record that the node lacks, and the copy, with the job and the plan only if they are
        new to it. The thread that sends reads the record, since a node that comes back lacks all of it."""
        self._frames.post_all(record.messages(self._lines, copy.lines))
        message = replace(copy, ahead=self.clock_offset).to_message()
        if self._plan:
            del message["job"]
        if self._plan == copy.plan:
            del message["plan"]
        if self.acked >= self.handed:
            self._asked_at = time.monotonic()
        self._lines, self._plan, self.handed = copy.lines, copy.plan, copy.number
        self.post(message)

    def close(self) -> None:
        self._frames.close()

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] in ("ack", "resumed"):
            with self._news:
                if message["kind"] == "ack":
                    self.acked, self._asked_at = int(message["number"]), time.monotonic()
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
            process.unstarted = message.get("unstarted") is True
            process.ended(_exit_code(message["code"]), _ranks(message.get("spare")))

    def _break(self) -> None:
        with self._lock:
            self.alive = False
            workers, self._workers = self._workers, {}
        for process, _ in workers.values():  # first of all: the first pipe to close may wake the launcher
            process.over(None)
        for process, pipe in workers.values():
            pipe.close()
            process.ended(None)
        self._frames.close()
        self._lost(self)


Electorate = dict[int, NodeLink | None]
"""The nodes that may choose another leader, with the link by which each has come; None: it has not come to this leader.
"""


def _exit_code(code: Any) -> int | None:
    """Checks an exit code that a node has sent; None: it is none."""
    return code if isinstance(code, int) and not isinstance(code, bool) and abs(code) < 1 << 31 else None


def _ranks(spare: Any) -> tuple[int, ...]:
    """Checks the spare ranks that a node has sent; (): they are none."""
    known = isinstance(spare, list) and all(type(rank) is int and 0 <= rank < 64 for rank in spare)
    return tuple(sorted(set(spare))) if known else ()


_SAME_CODE = (
    "Give the node the code with which the job began, and start it again; or end the job, and resume it with the new "
    "code on all nodes"
)
_SAME_SOFTWARE = "Install the same on it, or run the node on an equal machine"


class NodeHub:
    """Listens for other launchers as long as the job lasts. The leader listens for the job's nodes, since a lost one
    may come back. Other nodes listen for those that ask how they stand (see succession), until they lead themselves.

    One thread accepts connections, each handshake has a thread, and so has each node that is looked for. They share the
    condition `news`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        nodes: int,
        token: str,
        say: Say,
        lead_status: LeadStatus | None = None,
        same: Mapping[str, str] = MACHINE,
    ) -> None:
        """lead_status: of this launcher; None: it leads from the start. same: what must be the same on all nodes (see
        agent.workers.spec.same_on_all). Raises OSError if it can't listen there, and InputError as `prepare`."""
        prepare(token)
        self._same = same
        self._nodes, self._token, self._say = nodes, token, say
        self.lead_status = lead_status or LeadStatus(0, lead=0, term=1, run=uuid.uuid4().hex)
        self.links: dict[int, NodeLink] = {}
        self.members: dict[int, Address] = {}
        """Where the other nodes of the job listen that are not known to be gone."""
        self._came: dict[int, NodeLink] = {}
        """The newest link of each node, even if it is broken."""
        self.memory: dict[int, int] = {}
        """How many bytes the workers of a node may use, for the nodes that have said so."""
        self.memory_shared_by = dict[int, str]()
        """A name for each node's memory: nodes with the same name share it."""
        self.hosts: dict[int, str] = {}
        """The name of each node's host, as its workers say it."""
        self.lead: Address | None = None
        """Where the leader listens, if that is another launcher, as far as is known."""
        self.deposed = ""
        """Why this launcher may not lead any more; "": it may."""
        self.hands_out = False
        """Whether it leads a job that has begun, so that every node soon gets a copy."""
        self._expected: frozenset[int] | None = frozenset() if lead_status is None else None
        """Nodes that followed the leader before this one, and are to follow this one: no others are let in meanwhile.
        None: this launcher does not lead."""
        self.news = threading.Condition()
        self._closing = self._began = False
        self._last_word, self._finished = "", False
        self._strangers: dict[socket.socket, str] = {}  # with their addresses, the oldest first
        self._strangers_lock = threading.Lock()
        self._said_of_strangers: dict[str, float] = {}
        """What was reported of strangers in the last STRANGERS_SECONDS, and when."""
        self._listener = socket.create_server((host, port))
        self.host, self.port = self._listener.getsockname()[:2]
        self._accepting = threading.Thread(target=self._accept, name="nodes", daemon=True)
        self._accepting.start()

    def wait_for_all(self, seconds: float) -> None:
        """Waits until all nodes have come. Raises InputError, which names the nodes that did not come, and
        LedElsewhere.
        """
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
        """Leads from now on. expected: nodes that followed the leader before, and are to follow this one."""
        with self.news:
            self.members, self._expected, self.lead, self._began = dict(members), expected, None, True

    def followers(self, seconds: float) -> dict[int, NodeLink]:
        """Waits for the nodes that are expected, and returns the links of those that have come. The others may not come
        any more."""
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
        """The nodes that a copy names which is made now."""
        return {rank: self._came.get(rank) for rank in tuple(self.members)}  # other threads may add to `members`

    def follow(self, number: int, electorate: Electorate) -> bool:
        """Says whether half of those nodes follow this leader: they have that copy, and have come by that link."""
        left = {rank: link for rank, link in electorate.items() if rank in self.members and not (link and link.forgot)}
        have = sum(left.get(rank) is link and link.acked >= number for rank, link in self.links.items())
        return may_go_on(1 + have, 1 + len(left))[0]

    def depose(self, why: str) -> None:
        """Notes that this launcher may not lead any more."""
        with self.news:
            self.deposed = self.deposed or why
            self.news.notify_all()

    def close(self, reason: str, *, finished: bool = False) -> None:
        """Tells every node that the job is over, even one that is being welcomed just now.

        reason: why; "": another launcher leads, so nodes are only told where, if that is known. finished: their
        commands have succeeded, too; otherwise a scheduler may start them again.
        """
        with self.news:
            self._closing, self._last_word, self._finished = True, reason, finished
        # This wakes the accepting thread. Closing alone would not, and the thread might accept from another socket that
        # has the number by then.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(5.0)  # with a limit, since shutting down wakes no thread on macOS
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
            else:  # the node closes the connection then
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
                time.sleep(0.1)  # such as out of file descriptors: the next try would fail at once
                continue
            self._make_room(peer[0])
            with self._strangers_lock:
                self._strangers[connection] = peer[0]
            threading.Thread(target=self._welcome, args=(connection,), name="welcome", daemon=True).start()

    def _make_room(self, address: str) -> None:
        """Makes room for one more connection from there, so that connections that say nothing keep nobody out."""
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
        """Greets a launcher. Returns what it says of itself, and its link; None: it only wanted an answer, or has to
        come again. Raises OSError, NotTrusted, KeyError, TypeError and ValueError."""
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
            # The link of a node that was lost takes a while to break.
            again = isinstance(rank, int) and rank in self.links
            frames.send({"kind": "refused", "reason": refusal, "again": again})
            raise NotTrusted(refusal)
        term, has = map(int, hello.get("resumes", (0, 0)))
        with self.news:
            others = [address for rank, address in self.members.items() if self._began and rank != hello["rank"]]
        # The node is told of the others, since one of them may lead before it gets a copy.
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
            with self._strangers_lock:  # _make_room may shut it down, and must not once it is closed
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
                if earlier is not None and link.process:  # another launcher may be in its place while it still lives
                    earlier.forgot = earlier.forgot or earlier.process == link.process
                self.links[link.rank] = self._came[link.rank] = link
            self.news.notify_all()
        self._say(f"node {link.rank} is here, at {link.address} (answers in {1000 * link.round_trip:.2f} ms)")

    def _say_once(self, text: str) -> None:
        """Reports something about strangers once in STRANGERS_SECONDS, so that endless connections fill no disk."""
        now = time.monotonic()
        with self._strangers_lock:
            known = {said: at for said, at in self._said_of_strangers.items() if now < at + STRANGERS_SECONDS}
            self._said_of_strangers = {text: now} | known
        if text not in known:
            self._say(text)

    def call_back(self, front: Address) -> None:
        """Tells a launcher that comes back to `front` that this one leads, as long as the job lasts: `front` is where
        all nodes first look for their leader."""
        threading.Thread(target=self._call_back, args=(front,), name="calling back", daemon=True).start()

    def _call_back(self, front: Address) -> None:
        while not self._closing:
            if 0 not in self.links:
                tell(front, self._token, {"kind": "led", "lead": (self.host, self.port)})
            time.sleep(CALL_SECONDS)

    def _hear_of_lead(self, message: Mapping[str, Any]) -> None:
        """Takes note of where the leader listens. Ignored if this launcher leads a job that has begun."""
        host, port = message["lead"]
        with self.news:
            if not (self.lead_status.leads and self._began):
                self.lead = str(host), int(port)
            self.news.notify_all()

    def _not_now(self, hello: Mapping[str, Any]) -> str:
        """Says why a node can't take part yet; "": it can."""
        if self._expected is None:
            return f"node {self.lead_status.rank} does not lead"
        if self.lead is not None:
            return f"node {self.lead_status.rank} does not lead: the job has a lead"
        if self._expected and "resumes" not in hello:
            return f"node {self.lead_status.rank} is about to take the lead"
        return ""

    def _objection(self, hello: Mapping[str, Any]) -> str:
        """Says why a node can't take part at all; "": it can."""
        rank, own = hello.get("rank"), self.lead_status.rank
        # As the leader it would otherwise have no place for some of the others, or too many places.
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
        for name, ours in self._same.items():
            if hello.get(name) != ours:
                cure = _SAME_CODE if name == WORKLOAD else _SAME_SOFTWARE
                differs = f"node {rank} has {name} {hello.get(name)}, the leader {ours}"
                return f"{differs}: they would not get the same bits. {cure}"
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
        """Asks a lost node again and again, until it is back or known to be gone. Until then it may follow another
        leader or lead itself, even if another process has come in its place. link: the one that it had."""
        lead_status, process = self.lead_status, "" if link is None else link.process

        def unknown() -> bool:
            if self._came.get(rank) is link:
                return rank in self.members and rank not in self.links
            return link is not None and not link.forgot

        while not self._closing and unknown():
            seen = ask(address, self._token, lead_status.run)
            # This counts whichever process it is: one that was started there since may know of another leader.
            newer = isinstance(seen, LauncherAnswer) and seen.term > lead_status.term
            another = isinstance(seen, LauncherAnswer) and bool(process) and seen.process != process
            with self.news:
                if seen == "gone" or (another and not newer):
                    if link is not None:
                        link.forgot = True
                    if self._came.get(rank) is link and rank not in self.links:
                        self.members.pop(rank, None)
                self.news.notify_all()
            if isinstance(seen, LauncherAnswer) and newer and seen.lead is not None:
                self.depose(f"node {seen.lead} leads the job by now, since this node was not heard for too long")
            time.sleep(0.5)


Fits = Callable[[Collection[Worker], int | None, str], str]
"""Takes workers, the bytes that they may use (None: not known), and where they are. Returns a warning, or "". Raises
InputError."""


def open_pool(
    role: NodeRole, job: Job, workload: WorkloadSource, token: str | None, say: Say, fits: Fits | None = None
) -> SpreadPool:
    """Waits for all nodes of a job that this one leads, and returns the pool. fits: asked about the workers of each
    machine, except this node's own if it is alone there, since it was asked before. Raises InputError, and
    LedElsewhere.
    """
    homes = place(job, role.nodes)
    by_name(workload)
    wait_for_name(role.host, role.port, say)
    try:
        hub = NodeHub(role.host, role.port, role.nodes, token or "", say, same=same_on_all(workload))
    except OSError as error:
        raise InputError(
            "--lead", f"{role.host}:{role.port}", f"an address of this host and a free port ({error.strerror})"
        ) from None
    try:
        if role.store is not None:
            publish_lead(role.store, hub.port)
        missing = count(role.nodes - 1, "more node")
        say(f"waiting for {missing} at {hub.host}:{hub.port}, for up to {NODE_SECONDS / 60:g} min")
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
    """A node's memory. workers: those that start there. has: the bytes that these may use; None: the node has not said
    so. host: as in `host_of`."""

    workers: list[Worker]
    has: int | None
    host: str


def memory_shared_by() -> str:
    """Returns a name that is the same for launchers that share memory; "": that is not known."""
    machine, group = boot_id(), memory_group()
    return f"{machine}/{group}" if machine and group is not None else ""


def host_of(node: int, name: str) -> str:
    """Returns a name for a node's host, for people. It has the node's number, since hosts may all have the same
    name."""
    suffix = f" (node {node})"
    return f"{name[: MAX_HOST - len(suffix)]}{suffix}".strip()


def machines(hub: NodeHub, homes: Mapping[Worker, int], own: int) -> dict[int, NodeMemory]:
    """Returns the memory of each node. If several nodes share memory, as launchers on one machine do, each gets a share
    in proportion to its workers."""
    hosts = {**hub.hosts, own: socket.gethostname()}
    out = dict[int, NodeMemory]()
    for nodes, together, has in sharing(hub, homes, own):
        for node in nodes:
            workers = [worker for worker in together if homes[worker] == node]
            part = None if has is None else has * len(workers) // len(together)
            out[node] = NodeMemory(workers, part, host_of(node, hosts.get(node, "")))
    return dict(sorted(out.items()))


def sharing(hub: NodeHub, homes: Mapping[Worker, int], own: int) -> list[tuple[list[int], list[Worker], int | None]]:
    """Returns, for each memory, the nodes that share it, the workers that start there, and the bytes that all of these
    may use; None: no node has said so."""
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
    """Waits until this host's own name is known, since a Kubernetes pod runs before that; for at most `seconds`. It
    raises nothing: listening there later says what is wrong."""
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
    """The leader's pool: starts each worker on the node that `homes` says (see `stand_in` for those of lost nodes).

    What workers are told waits until `hand_out` has told the other nodes. record: the lines of the record so far.
    """

    def __init__(
        self, modules: list[str], hub: NodeHub, homes: Mapping[Worker, int], record: Spool | None = None
    ) -> None:
        super().__init__(worker.main, modules)
        self.host = hub.host
        self._hub, self._homes = hub, homes
        self._record = Spool() if record is None else record
        self._decided: list[Callable[[], None]] | None = []
        """What is sent once the other nodes have a copy; None: the job is at its end, so nothing has to wait."""
        self._copies = 0
        self._due, self._lines = 0.0, 0
        self._followed_at, self._lag = time.monotonic(), LoopLag()
        self._linked = dict(hub.links)
        """The links when spare ranks were last looked for."""
        self._electorates = [hub.electorate]
        """The electorates of the newest copy that enough nodes have, and of the copies since: nodes may choose a leader
        by any of them."""
        self._job: dict[str, Any] = {}

    @property
    def lead(self) -> str:
        """Which launcher leads, as a console is told it."""
        return str(LeadTerm(self._hub.lead_status.term, self._hub.lead_status.rank))

    @property
    def machines(self) -> list[NodeMemory]:
        """The memory of each node."""
        return list(machines(self._hub, self._homes, self.own_node).values())

    def depose(self, why: str) -> None:
        """Notes that another launcher leads. May be called from any thread."""
        self._hub.depose(why)

    def start(
        self,
        worker: Worker,
        make_spec: Callable[[str], Any],
        now: float,
        spares: Spares | None = None,
        node: int | None = None,
    ) -> WorkerProcess:
        if spares is None:
            # Those that were taken already are in no worker yet: what a node tells now would have them spare again.
            self._look_for_spares()
        links = dict(self._hub.links)
        own = self.own_node
        if spares is not None:
            node = spares.node
        elif node is None:
            where = {w: self.node_of(entry) for w, entry in self.running.items()}
            node = stand_in(worker, self._homes[worker], {own, *filter(self.has_node, links)}, where)
        if node == own:
            own_spec = partial(self._told, make_spec, own, self._hub.host)
            entry = super().start(worker, own_spec, now, spares)
            self._hold_back(entry)
        elif node not in links:
            raise OSError(f"node {node} is lost")  # it was lost after the caller found it to be there
        else:
            entry = self._start_there(links[node], worker, make_spec, now, spares)
            self.running[worker] = entry
        return entry

    def spare(self, entry: WorkerProcess) -> None:
        if isinstance(entry.process, RemoteProcess) and entry.process.unstarted:
            filled = tuple(SpareRank(rank, -1) for rank in entry.made_of)
            self.spares.put_back(Spares(self.node_of(entry), filled), time.monotonic())
        else:
            super().spare(entry)

    def take_spares(self, ranks: int) -> Spares | None:
        self._look_for_spares()
        return super().take_spares(ranks)

    def promises_spares(self, ranks: int) -> bool:
        self._look_for_spares()
        return super().promises_spares(ranks)

    def _look_for_spares(self) -> None:
        """Brings the spare ranks up to date. Those of a node that is gone are lost, even if it is back. A node that has
        followed the leader before says which ones it has. Those of a worker that this leader still has come with that
        worker's end."""
        links = dict(self._hub.links)
        self.spares.keep({self.own_node, *(node for node, link in links.items() if self._linked.get(node) is link)})
        self._linked = links
        for node, link in links.items():
            with self._hub.news:  # the link's thread sets them once, with the same lock
                told, link.spares = link.spares, None
            if told is not None:
                running = {entry.incarnation for entry in self.entries}
                filled = {rank for entry in self.entries if not _never_ran(entry) for rank in entry.made_of}
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
        return node == self.own_node or (link is not None and link.alive and link.answers)

    def adopt(self, entry: WorkerProcess) -> None:
        """Takes over a worker of this node that was started for the leader before."""
        self._hold_back(entry)
        self.running[entry.worker] = entry

    def adopt_there(self, link: NodeLink, worker: Worker, incarnation: str, now: float) -> RemoteWorker:
        """Takes over a worker of another node that was started for the leader before."""
        ours, theirs = self.context.Pipe(duplex=False)
        entry = self._remote(link, worker, incarnation, link.adopt(incarnation, theirs), ours, now)
        self.running[worker] = entry
        return entry

    def know_spares(self, here: SpareRanks) -> None:
        """Takes over this node's spare ranks, which it kept under the number 0 before it led. The other nodes say which
        are theirs."""
        self.spares.replace(self.own_node, here.on(0))

    def decide(self, send: Callable[[], None]) -> None:
        """Calls `send`, which sends a decision, once `hand_out` has told the other nodes."""
        if self._decided is None:
            send()
        else:
            self._decided.append(send)

    def recorded(self, line: dict[str, Any]) -> str:
        return self._record.add([line])

    def hand_out(self, run: RunSpec, saved: Callable[[], dict[str, Any] | None], *, last: bool = False) -> str:
        # Time for which this process itself stood still does not count as silence of the others.
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
                self._followed_at = now  # there was nothing to follow until now
                hub.hands_out = True
            self._copies += 1
            with hub.news:
                nodes, links, electorate = dict(hub.members), dict(hub.links), hub.electorate
            if electorate != self._electorates[-1]:
                self._electorates.append(electorate)
            copy = self._copy(run, document, nodes)
            for rank, link in links.items():
                # Copies must not pile up for a node that stands still; but a decision must not come without a copy.
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
        if isinstance(entry, RemoteWorker):
            os.close(entry.process.sentinel)

    def call_off(self) -> None:
        """Calls off a job for which nothing was started yet."""
        self._hub.close(_NO_START)

    def kill_all(self, unfinished: str = "") -> None:
        super().kill_all()
        word = f"the job is over: {unfinished}" if unfinished else "the job is over"
        self._hub.close(word if self._decided is None else "", finished=not unfinished)

    def _acked(self, number: int, until: float) -> bool:
        """Waits until enough nodes have that copy, at most until then. Returns whether they have."""
        hub = self._hub

        def enough() -> bool:
            return all(hub.follow(number, electorate) for electorate in self._electorates)

        with hub.news:
            hub.news.wait_for(lambda: hub.deposed or enough(), max(0.0, until - time.monotonic()))
            return not hub.deposed and enough()

    def _copy(self, run: RunSpec, document: dict[str, Any], nodes: Mapping[int, Address]) -> Copy:
        lead_status = self._hub.lead_status
        self._job = self._job or encode_run(run)
        workers = [entry.told() | {"node": self.node_of(entry)} for entry in self.running.values()]
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
        # A message that can't be sent is a fault of ours, and the worker would wait for it for ever: so it is killed.
        entry.send = lambda message: self.decide(lambda: link.post(whom | {"message": message}, entry.kill))
        return entry


def _never_ran(entry: WorkerProcess) -> bool:
    """Says whether the node of a worker knows nothing of it: the leader before did not come to start it there."""
    return entry.process.is_ending() and entry.process.exitcode is None


def _compare_clocks(frames: Frames, until: float | None) -> tuple[int, float]:
    """Returns the node's clock offset in ns and the round trip in seconds. The offset is wrong by at most half the
    round trip. Raises NotTrusted and OSError."""
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
