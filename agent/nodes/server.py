"""A node that does not lead: starts and ends worker processes for the lead, and passes on what they say.

It decides nothing. When the lead is gone, so are its workers: the state of the job went with it.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from openrecycle.agent import channel, worker
from openrecycle.agent.client import Backoff
from openrecycle.agent.nodes.frames import Frames, NotTrusted, greet
from openrecycle.agent.nodes.wire import MACHINE, decode_spec
from openrecycle.agent.processes import ProcessPool, WorkerProcess, preload
from openrecycle.agent.timeouts import ALIVE_SECONDS
from openrecycle.planner.job import Worker

Say = Callable[[str], None]


class LeadLost(Exception):
    """The lead can't be reached, or turned this node away; the sentence says why."""


class NodeServer:
    """token: shared by the job's nodes. address: under which this
    node's workers can be reached; the one this host reaches the lead from, unless given."""

    def __init__(self, rank: int, lead: tuple[str, int], token: str | None, address: str | None, say: Say) -> None:
        self._rank, self._lead, self._token, self._say = rank, lead, token, say
        self._address = address
        self._pool: ProcessPool | None = None
        self._started = 0
        self._entries: dict[str, WorkerProcess] = {}
        self._over = ""
        self._stop = 0

    def stop(self, number: int) -> None:
        """Ends this node soon; from the handler of signal `number`."""
        self._stop = self._stop or number

    def run(self, timeout: float) -> str:
        """Serves until the job is over; returns the lead's last sentence.

        timeout: seconds to wait for the lead. Raises LeadLost; no process is left behind.
        """
        frames = self._join(timeout)
        try:
            while True:
                self._turn(frames)
                if self._stop:
                    raise LeadLost(f"stopped by {signal.Signals(self._stop).name}")
        except _Bye:
            return self._over
        except (OSError, NotTrusted, ValueError) as error:
            raise LeadLost(f"the connection with the lead broke ({error}); this node's workers are ended") from None
        finally:
            frames.close()
            if self._pool is not None:
                self._pool.kill_all()

    def _join(self, timeout: float) -> Frames:
        host, port = self._lead
        deadline, backoff = time.monotonic() + timeout, Backoff(0.1, 2.0)
        said = ""
        while True:
            why = ""
            try:
                connection = socket.create_connection((host, port), 5.0)
            except OSError as error:
                why = f"no lead answers at {host}:{port}"
                reason = str(error)
            else:
                try:
                    return self._introduce(connection)
                except _Later as error:
                    why, reason = "the lead turned this node away", str(error)
                except OSError as error:
                    why, reason = f"no understanding with the lead at {host}:{port}", str(error)
                except (NotTrusted, KeyError) as error:
                    connection.close()
                    raise LeadLost(f"no understanding with the lead at {host}:{port}: {error}") from None
                except LeadLost:
                    connection.close()
                    raise
                connection.close()
                if said != reason:
                    self._say(f"{why}: {reason}; it is tried again for {max(0.0, deadline - time.monotonic()):.0f} s")
                    said = reason
            if time.monotonic() > deadline or self._stop:
                raise LeadLost(f"{why} within {timeout:.0f} s ({reason})")
            time.sleep(backoff.seconds())

    def _introduce(self, connection: socket.socket) -> Frames:
        """Raises _Later, or OSError, for what may pass; LeadLost, NotTrusted and KeyError for what does not."""
        frames = greet(connection, self._token or "", "node")
        address = self._address or connection.getsockname()[0]
        frames.send({"kind": "hello", "rank": self._rank, "address": address, **MACHINE})
        answer = frames.receive()
        if answer["kind"] != "welcome":
            if answer.get("again"):
                raise _Later(answer["reason"])
            raise LeadLost(f"the lead turned this node away: {answer['reason']}")
        self._say(f"node {self._rank} works for {self._lead[0]}:{self._lead[1]}, its workers at {address}")
        return frames

    # -- one turn of the loop -----------------------------------------------------------------

    def _turn(self, frames: Frames) -> None:
        pipes = {entry.pipe: incarnation for incarnation, entry in self._entries.items()}
        sentinels = {entry.process.sentinel: incarnation for incarnation, entry in self._entries.items()}
        ready = wait([frames.fileno(), *pipes, *sentinels], 0.0 if frames.waiting else 0.5)
        for item in ready:
            if item in pipes:
                self._pass_on(frames, pipes[item])  # type: ignore[index]
        for item in ready:
            if item in sentinels:
                self._ended(frames, sentinels[item])  # type: ignore[index]
        if frames.waiting or frames.fileno() in ready:
            self._obey(frames, frames.receive())
        self._vouch(frames)

    def _vouch(self, frames: Frames) -> None:
        """Says of workers that can't speak, and are seen at work, that they compute: the lead can't look there."""
        now = time.monotonic()
        for incarnation, entry in self._entries.items():
            if now - entry.heard_at > 2.5 * ALIVE_SECONDS and now - entry.looked_at >= ALIVE_SECONDS:
                entry.look(now)
                if entry.lived_at == now:
                    message = {"kind": "computes", "at": time.monotonic_ns()}
                    frames.send({"kind": "from", "incarnation": incarnation, "message": message})

    def _pass_on(self, frames: Frames, incarnation: str) -> None:
        """Everything that is in the worker's pipe."""
        entry = self._entries[incarnation]
        pipe, entry.heard_at = entry.pipe, time.monotonic()
        while True:
            try:
                if not pipe.poll():
                    return
                message = channel.receive(pipe)
            except (EOFError, OSError):
                return  # its sentinel tells the rest
            frames.send({"kind": "from", "incarnation": incarnation, "message": message})

    def _ended(self, frames: Frames, incarnation: str) -> None:
        self._pass_on(frames, incarnation)
        entry = self._entries.pop(incarnation)
        entry.process.join()
        if self._pool is not None:
            self._pool.forget(entry)
        frames.send({"kind": "exited", "incarnation": incarnation, "code": entry.process.exitcode})

    def _obey(self, frames: Frames, message: dict[str, Any]) -> None:
        entry = self._entries.get(str(message.get("incarnation")))
        match message["kind"]:
            case "start":
                self._start(message["spec"])
            case "to" if entry is not None:
                entry.post(**message["message"])
            case "kill" if entry is not None:
                entry.kill()
            case "clock":
                frames.send({"kind": "clock", "at": time.monotonic_ns()})
            case "over":
                self._over = str(message["reason"])
            case "bye":
                raise _Bye

    def _start(self, document: dict[str, Any]) -> None:
        spec = decode_spec(document)
        if self._pool is None:
            self._pool = ProcessPool(worker.main, preload(spec.run.workload))
        # The pool files processes by cell; here one cell may have several, as workers migrate.
        self._started += 1
        entry = self._pool.start(Worker(self._started, spec.worker.stage), lambda _: spec, time.monotonic())
        self._entries[spec.incarnation] = entry


class _Later(Exception):
    """The lead can't take this node now, for a reason that may pass."""


class _Bye(Exception):
    """The lead has said its last word."""
