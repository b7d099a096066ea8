"""A node that does not lead, in this process, and a lead that says what a test has it say."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from openrecycle.agent.launcher.processes import ProcessPool, SpareRanks, WorkerProcess
from openrecycle.agent.nodes.frames import Frames, greet
from openrecycle.agent.nodes.server import NodeServer
from openrecycle.agent.nodes.succession import Copy
from openrecycle.planner.jobs.job import Worker

NODES, RANK = 3, 2
"""The node that is tried is number 2; 0 leads, and 1 is to lead next."""


class FirstLead:
    """Takes the node in, and nobody else: whoever asks how it stands gets no answer."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.frames: Frames | None = None
        self.node: tuple[str, int] | None = None

    def hear(self) -> Frames:
        """What the node says of itself."""
        connection, _ = self._listener.accept()
        self.frames = greet(connection, "", "lead")
        hello = self.frames.receive()
        self.node = hello["address"], hello["port"]
        return self.frames

    def welcome(self, *, begun: bool = False) -> None:
        self.hear().send({"kind": "welcome", "begun": begun})

    def hand(self, copy: Copy) -> None:
        """Returns once the node has it."""
        assert self.frames is not None
        self.frames.send(copy.to_message())
        assert self.frames.receive() == {"kind": "ack", "number": copy.number}

    def close(self) -> None:
        self._listener.close()
        if self.frames is not None:
            self.frames.close()

    def begin_to_say(self) -> None:
        """A message of 1,000 bytes, of which some come."""
        assert self.frames is not None
        self.frames.write(struct.pack(">I", 1000) + b'{"kind":')


class Node:
    """Serves in a thread; ended: what `run` has returned or raised."""

    def __init__(
        self, front: tuple[str, int], lead: tuple[str, int] | None = None, rank: int = RANK, **parts: Any
    ) -> None:
        """parts: of a NodeServer, in place of its own."""
        self.said: list[str] = []
        self.ended: Any = None
        self._server = NodeServer(rank, NODES, front, None, None, self.said.append, lead, **parts)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.ended = self._server.run(20.0)
        except Exception as error:
            self.ended = error

    def stop(self) -> None:
        self._server.stop(15)
        self._thread.join(20)
        assert not self._thread.is_alive()


class GivenProcesses(ProcessPool):
    """Starts no process: those that are to be started are these, in order; once there are no more, none can be.
    asked: in whose place."""

    def __init__(self, entries: Iterable[WorkerProcess] = ()) -> None:
        self.running, self._aside, self.spares = {}, [], SpareRanks()
        self._entries, self.asked = list(entries), list[Any]()

    def start(self, worker: Worker, make_spec: Any, now: float, spares: Any = None, node: Any = None) -> WorkerProcess:
        self.asked.append(spares)
        if not self._entries:
            raise OSError("no room")
        entry = self._entries.pop(0)
        entry.worker, self.running[worker] = worker, entry
        return entry

    def kill_all(self, unfinished: str = "") -> None:
        """Whoever has given them ends them."""


@contextlib.contextmanager
def node_with(pool: ProcessPool) -> Iterator[FirstLead]:
    """The lead of a node that starts its processes there."""
    lead = FirstLead()
    node = Node(lead.address, make_pool=lambda _: pool)
    try:
        lead.welcome()
        yield lead
    finally:
        node.stop()
        lead.close()
