"""The lead's side of a job on several nodes: workers elsewhere, as if they were processes of its own.

On every other node a small server (agent.nodes.server) starts and ends processes for the lead. A
`RemoteWorker` has a pipe and a sentinel like a `WorkerProcess`, so the launcher's loop does not
tell them apart; a node whose connection breaks takes all its workers' sentinels with it at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from openrecycle.agent.clock import Offset
from openrecycle.agent.nodes.frames import HANDSHAKE_SECONDS, Frames, NotTrusted, greet
from openrecycle.agent.nodes.placement import place, stand_in
from openrecycle.agent.nodes.role import NodeRole
from openrecycle.agent.nodes.wire import MACHINE, by_name, encode_spec, publish_lead
from openrecycle.agent.processes import ProcessPool, WorkerProcess, preload
from openrecycle.agent.spec import WorkerSpec
from openrecycle.agent.worker import main
from openrecycle.agent.workload import WorkloadSource
from openrecycle.planner.errors import InputError
from openrecycle.planner.job import Job, Worker
from openrecycle.planner.words import printable

CLOCK_SAMPLES = 7
"""Round trips by which a node's clock is compared with the lead's; the quickest one counts."""

NODE_SECONDS = 600.0
"""A cluster may start its nodes one after the other."""

MAX_STRANGERS = 64
"""Connections that may be in the handshake at once; for one more, the oldest makes way."""

HELLO_BYTES = 64 * 1024
"""Of what a node says of itself before it takes part."""

MAX_STRANGERS_OF_ONE = 16
"""Of those, from one address."""

Say = Callable[[str], None]


class RemoteProcess:
    """What the launcher asks of a process, of one on another node. sentinel: becomes readable at its end."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.sentinel, self._write = os.pipe()
        self._over = threading.Event()
        self._kill = kill

    def is_alive(self) -> bool:
        return not self._over.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)

    def kill(self) -> None:
        self._kill()

    def ended(self, exitcode: int | None) -> None:
        """exitcode: None when nobody can know it."""
        if not self._over.is_set():
            self.exitcode = exitcode
            self._over.set()
            os.close(self._write)


@dataclass
class RemoteWorker(WorkerProcess):
    """node: the link that its messages go through."""

    elsewhere: ClassVar[bool] = True
    node: NodeLink | None = None

    def post(self, kind: str, **fields: Any) -> None:
        assert self.node is not None
        self.node.post({"kind": "to", "incarnation": self.incarnation, "message": {"kind": kind, **fields}})

    def kill(self) -> None:
        self.process.kill()

    @property
    def clock(self) -> Offset:
        if self.node is None:
            return Offset(0, 0)
        return Offset(self.node.clock_offset // 1000, round(self.node.round_trip * 5e5) + 1)

    @property
    def ending(self) -> str:
        rank = self.node.rank if self.node else 0
        if self.process.exitcode is None:
            return f"was lost with node {rank}"
        return f"{super().ending} on node {rank}"


class NodeLink:
    """The lead's end of one node. lost: called, once, in a thread of the link.

    address: under which the node's workers reach each other and the lead. clock_offset: nanoseconds
    to add to the node's monotonic clock for the lead's; round_trip: seconds of a message and its answer.
    """

    def __init__(
        self, frames: Frames, rank: int, address: str, lost: Callable[[NodeLink], None], until: float | None = None
    ) -> None:
        """until: monotonic seconds by which clocks must be compared. Raises NotTrusted and OSError."""
        self.rank, self.address = rank, address
        self._frames, self._lost = frames, lost
        self.alive = True
        self.clock_offset, self.round_trip = _compare_clocks(frames, until)
        self._workers: dict[str, tuple[RemoteProcess, Connection]] = {}
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        for target in (self._read, self._write):
            threading.Thread(target=target, name=f"node-{rank}-{target.__name__}", daemon=True).start()

    def post(self, message: dict[str, Any]) -> None:
        """Returns at once; a node that is gone does not matter here."""
        self._outbox.put(message)

    def start(self, spec: WorkerSpec, pipe: Connection) -> RemoteProcess:
        """pipe: where what the worker says is written to."""
        incarnation = spec.incarnation
        process = RemoteProcess(lambda: self.post({"kind": "kill", "incarnation": incarnation}))
        with self._lock:
            if self.alive:
                self._workers[incarnation] = process, pipe
        if not self.alive:
            pipe.close()
            process.ended(None)
        self.post({"kind": "start", "spec": encode_spec(spec)})
        return process

    def close(self) -> None:
        self._outbox.put(None)
        self._frames.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, NotTrusted, KeyError, TypeError):
            while True:
                message = self._frames.receive()
                known = self._workers.get(message["incarnation"])
                if known is None:
                    continue
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
                    process.ended(_exit_code(message["code"]))
        self._break()

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._frames.send(message)
            except OSError:
                self._frames.close()  # the reading thread does the rest
                return

    def _break(self) -> None:
        with self._lock:
            self.alive = False
            workers, self._workers = self._workers, {}
        for process, pipe in workers.values():
            pipe.close()
            process.ended(None)
        self._outbox.put(None)
        self._frames.close()
        self._lost(self)


def _exit_code(code: Any) -> int | None:
    """As a node says it; None for what is none."""
    return code if isinstance(code, int) and not isinstance(code, bool) and abs(code) < 1 << 31 else None


class NodeHub:
    """Listens for the job's nodes as long as it lasts: one that was lost may come back."""

    def __init__(self, host: str, port: int, nodes: int, token: str, say: Say) -> None:
        """Raises OSError when it can't listen there."""
        self._nodes, self._token, self._say = nodes, token, say
        self.links: dict[int, NodeLink] = {}
        self._news = threading.Condition()
        self._closing = False
        self._last_word = ""
        self._strangers: dict[socket.socket, str] = {}  # with their addresses, the oldest first
        self._strangers_lock = threading.Lock()
        self._listener = socket.create_server((host, port))
        self.host, self.port = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def wait_for_all(self, seconds: float) -> None:
        """Raises InputError naming the nodes that did not come."""
        with self._news:
            if not self._news.wait_for(lambda: len(self.links) == self._nodes - 1, seconds):
                missing = sorted(set(range(1, self._nodes)) - set(self.links))
                raise InputError(
                    "--nodes",
                    self._nodes,
                    f"so many to come to {self.host}:{self.port} within {seconds:.0f} s; "
                    f"missing: node {', '.join(map(str, missing))}",
                )

    def close(self, reason: str) -> None:
        """Tells every node that the job is over, also one that is being welcomed just now."""
        with self._news:
            self._closing, self._last_word = True, reason
        # Wakes the accepting thread; closing alone would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self.links.values()):
            self._dismiss(link)
        deadline = time.monotonic() + 5.0
        with self._news:
            self._news.wait_for(lambda: not self.links, deadline - time.monotonic())
        for link in list(self.links.values()):
            link.close()

    def _dismiss(self, link: NodeLink) -> None:
        link.post({"kind": "over", "reason": self._last_word})
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
            threading.Thread(target=self._meet, args=(connection,), name="welcome", daemon=True).start()

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

    def _meet(self, connection: socket.socket) -> None:
        try:
            self._welcome(connection)
        finally:
            with self._strangers_lock:
                self._strangers.pop(connection, None)

    def _welcome(self, connection: socket.socket) -> None:
        try:
            until = time.monotonic() + HANDSHAKE_SECONDS
            frames = greet(connection, self._token, "lead", until)
            hello = frames.receive(until, most=HELLO_BYTES)
            refusal = self._objection(hello)
            if refusal:
                rank = hello.get("rank")
                # The link of one that was lost takes a while to break.
                again = isinstance(rank, int) and rank in self.links
                frames.send({"kind": "refused", "reason": refusal, "again": again})
                raise NotTrusted(refusal)
            frames.send({"kind": "welcome"})
            link = NodeLink(frames, int(hello["rank"]), str(hello["address"]), self._forget, until)
        except (OSError, NotTrusted, KeyError, TypeError, ValueError) as error:
            connection.close()
            if isinstance(error, NotTrusted):
                self._say(f"a node was turned away: {printable(str(error))}")
            return
        with self._news:
            if link.rank in self.links:
                link.close()
                return
            if self._closing:
                self._dismiss(link)
                return
            if link.alive:
                self.links[link.rank] = link
            self._news.notify_all()
        self._say(f"node {link.rank} is here, at {link.address} (answers in {1000 * link.round_trip:.2f} ms)")

    def _objection(self, hello: Mapping[str, Any]) -> str:
        """Why a node can't take part; empty when it can."""
        rank = hello.get("rank")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank < self._nodes:
            return f"--node-rank: got {rank!r}, expected a whole number from 1 to {self._nodes - 1}"
        if rank in self.links:
            return f"--node-rank: got {rank}, and there is a node {rank} already"
        address = hello.get("address")
        if not isinstance(address, str) or not 0 < len(address) < 256:
            return f"node {rank} has not said under which address it is reached"
        for name, ours in MACHINE.items():
            if hello.get(name) != ours:
                return f"node {rank} has {name} {hello.get(name)}, the lead {ours}: they would not get the same bits"
        return ""

    def _forget(self, link: NodeLink) -> None:
        with self._news:
            if self.links.get(link.rank) is link:
                del self.links[link.rank]
            self._news.notify_all()
        if not self._closing:
            self._say(f"the connection with node {link.rank} is broken: its workers count as ended")


def open_pool(role: NodeRole, job: Job, workload: WorkloadSource, token: str | None, say: Say) -> SpreadPool:
    """Waits for all nodes of a job that this one leads. Raises InputError."""
    homes = place(job, role.nodes)
    by_name(workload)
    try:
        hub = NodeHub(role.host, role.port, role.nodes, token or "", say)
    except OSError as error:
        raise InputError(
            "--lead", f"{role.host}:{role.port}", f"an address of this host and a free port ({error.strerror})"
        ) from None
    try:
        if role.store is not None:
            publish_lead(role.store, hub.port)
        say(f"waiting for {role.nodes - 1} more nodes at {hub.host}:{hub.port}")
        hub.wait_for_all(NODE_SECONDS)
    except BaseException:
        hub.close("the job does not start")
        raise
    return SpreadPool(preload(workload), hub, homes)


class SpreadPool(ProcessPool):
    """Starts each worker on the node that `homes` says; see agent.nodes.placement for those of lost nodes."""

    def __init__(self, modules: list[str], hub: NodeHub, homes: Mapping[Worker, int]):
        super().__init__(main, modules)
        self.host = hub.host
        self._hub, self._homes = hub, homes
        self._where: dict[str, int] = {}
        """Node of every incarnation that runs."""

    def start(self, worker: Worker, make_spec: Callable[[str], Any], now: float) -> WorkerProcess:
        links = dict(self._hub.links)
        where = {w: self._where[entry.incarnation] for w, entry in self.running.items()}
        node = stand_in(worker, self._homes[worker], {0, *links}, where)
        if node == 0:
            entry = super().start(worker, lambda i: replace(make_spec(i), address=self._hub.host), now)
        else:
            entry = self._start_there(links[node], worker, make_spec, now)
            self.running[worker] = entry
        self._where[entry.incarnation] = node
        return entry

    def forget(self, entry: WorkerProcess) -> None:
        super().forget(entry)
        self._where.pop(entry.incarnation, None)
        if isinstance(entry, RemoteWorker):
            os.close(entry.process.sentinel)

    def kill_all(self) -> None:
        super().kill_all()
        self._hub.close("the job is over")

    def _start_there(self, link: NodeLink, worker: Worker, make_spec: Callable[[str], Any], now: float) -> RemoteWorker:
        incarnation = uuid.uuid4().hex[:16]
        ours, theirs = self.context.Pipe(duplex=False)
        process = link.start(replace(make_spec(incarnation), address=link.address), theirs)
        return RemoteWorker(worker, incarnation, process, ours, now, node=link)


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
