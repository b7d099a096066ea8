"""A stage's state from one worker to another, beside the training.

A newcomer joins the groups of its stage first, without micro-batches: it takes part in the reductions and takes
every step, on values that do not matter yet. Meanwhile it asks a peer for one piece after the other: a range of
elements of a parameter, with the same range of all that the optimizer keeps of it. A piece says of which step
its values are; where the newcomer has taken just as many, it puts them in place, and steps them from then on. A
piece that comes too late is asked for again. So nothing has to be copied aside, nobody waits, no time-out applies,
and a newcomer that is slow, breaks off or dies costs the others nothing but its place in the reductions. What it
has stays good across generations. It works for optimizers that step each element by itself; with any other the whole
job waits until the newcomer has everything, however long that takes.

What is small comes at once, with the description of the rest. Nothing is pickled; every piece carries the SHA-256
of its bytes. The connection is a plain one, beside the groups': it is good for one generation and opens with a random
secret, which has come over the groups.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.models.layers import Span
from openrecycle.agent.models.state import DTYPES, StageState, StateError, memory, pack, sha256, unpack
from openrecycle.agent.stages.optimizer import StageOptimizer, of_layers
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.group import TransferError
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.plan import read_json

_TAG = 2**30
# A header of a model with 100,000 tensors is 10 MB; nothing that calls itself larger is one.
MAX_HEADER_BYTES = 2**28
PIECE_ELEMENTS = 1 << 17
"""With Adam and fp32 1.5 MiB: 0.2 ms under the lock to copy, and a link of 50 MB/s carries 30 of them a second."""
SMALL_ELEMENTS = 1024
"""A parameter below this always comes with the description: it may look like a count of steps."""
ASKED_AHEAD = 4
"""Pieces asked for before the first of them is there, so that the link is never idle."""
HANDSHAKE_SECONDS = 10.0
RECONNECT_SECONDS = (0.1, 5.0)
RECHECK_SECONDS = 0.1
PROGRESS_SECONDS = 10.0
MAX_CONNECTIONS = 16
STATE_ATTEMPTS = 3
"""Peers whose state a newcomer could not use, before it gives up."""
_REQUEST, _REPLY = struct.Struct("!q"), struct.Struct("!II")
_SECRET_BYTES = 32
_MAX_REPLY_HEADER = 1 << 16

Version = tuple[int, int]
"""(steps taken, corrections of a step since the generation began): which values a stage holds."""


class StateTransferError(TransferError):
    """What arrived can't be used; the sentence says from whom it came. The next try should ask another peer."""


class StateTransferFailed(RuntimeError):
    """A newcomer has got no usable state from any peer: it ends, and the job goes on without it."""


@dataclass(frozen=True)
class Column:
    """A parameter or buffer, and in which of the stage's tensors its elements are: itself, and what the optimizer
    keeps element by element."""

    name: str
    elements: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    column: str
    start: int
    end: int


def columns(state: StageState) -> list[Column]:
    """Of a stage's state: those that may come piece by piece, in a fixed order."""
    found = []
    for name, tensor in state.tensors.items():
        if not name.startswith("model.") or tensor.numel() < SMALL_ELEMENTS or not tensor.is_contiguous():
            continue
        beside = [
            other
            for other, kept in state.tensors.items()
            if other.startswith(f"optimizer.{name.removeprefix('model.')}.") and kept.shape == tensor.shape
        ]
        if all(state.tensors[other].is_contiguous() for other in beside):
            found.append(Column(name.removeprefix("model."), tensor.numel(), (name, *beside)))
    return found


def pieces_of(name: str, elements: int) -> list[Piece]:
    return [Piece(name, a, min(a + PIECE_ELEMENTS, elements)) for a in range(0, elements, PIECE_ELEMENTS)]


# -- the side that has it -------------------------------------------------------------------------


class StateServer:
    """Gives the pieces of this worker's stage to whoever knows the secret, in threads, until it is closed. Raises
    TransferError."""

    def __init__(self, optimizer: StageOptimizer, host: str, rate: float | None) -> None:
        self._optimizer, self._rate = optimizer, rate
        self._since = optimizer.corrections
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, 0), family=family)
        except OSError as error:
            # No reason to end a healthy worker: the next agreement names another one.
            raise TransferError(f"no state can be given at {host}: {error}") from None
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._live: tuple[Version, dict[str, Tensor]] | None = None
        self.address = (host, int(self._listening.getsockname()[1]))
        threading.Thread(target=self._accept, name="state-server", daemon=True).start()

    def send_description(
        self, groups: Groups, to: Worker, at_once: int, span: Span | None = None, **about: str
    ) -> None:
        """Over the generation's groups, while the newcomer waits for it. span: of these layers alone. about: what
        else it is told. Raises TransferError."""
        with self._optimizer.lock:
            state = self._optimizer.state()
            numbers, number = {}, 0
            for column in columns(state):
                numbers[column.name] = number
                number += len(pieces_of(column.name, column.elements))
            if span is not None:
                state = of_layers(state, span)
            large = columns(state)
            size = sum(t.numel() * t.element_size() for t in state.tensors.values())
            if size <= at_once:
                large = []
            apart = {name for column in large for name in column.tensors}
            specs = {
                n: [str(state.tensors[n].dtype).removeprefix("torch."), list(state.tensors[n].shape)] for n in apart
            }
            description = {
                "address": list(self.address),
                "secret": self._secret.hex(),
                "columns": [[c.name, c.elements, numbers[c.name]] for c in large],
                "tensors": specs,
                "bytes": size,
                "moving": self._optimizer.moving_names(span),
                **about,
            }
            small = StageState(
                {"hand_over": description, "state": dict(state.document)},
                {n: t for n, t in state.tensors.items() if n not in apart},
            )
            header, body = pack(small)
        sizes = torch.tensor([len(header), body.numel()], dtype=torch.int64)
        text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for pending in [groups.send(to, tensor, _TAG) for tensor in (sizes, text, body)]:
            pending.wait()

    def close(self) -> None:
        _close(self._listening)
        for connection in list(self._open):
            _close(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            if not self._places.acquire(blocking=False):
                _close(connection)
                continue
            _at_once(connection)
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="state-to-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, EOFError, KeyError, struct.error):
                connection.settimeout(HANDSHAKE_SECONDS)
                if not hmac.compare_digest(_exactly(connection, _SECRET_BYTES), self._secret):
                    return
                connection.settimeout(None)
                self._answer(connection)
        finally:
            self._open.discard(connection)
            _close(connection)
            self._places.release()

    def _answer(self, connection: socket.socket) -> None:
        with self._optimizer.lock:
            elements = {c.name: c.elements for c in columns(self._optimizer.state())}
        pieces = [p for name, count in elements.items() for p in pieces_of(name, count)]
        free_at = time.monotonic()
        while True:
            (number,) = _REQUEST.unpack(_exactly(connection, _REQUEST.size))
            if not 0 <= number < len(pieces):
                return
            header, payload = self._copy(number, pieces[number])
            connection.sendall(_REPLY.pack(len(header), len(payload)) + header)
            connection.sendall(payload)
            if self._rate is not None:
                free_at = max(free_at, time.monotonic() - 1.0) + len(payload) / self._rate
                time.sleep(max(0.0, free_at - time.monotonic()))

    def _copy(self, number: int, piece: Piece) -> tuple[bytes, bytes]:
        """The piece as it is now: what it holds and of which version, and its bytes."""
        with self._optimizer.lock:
            version, live = self._tensors()
            names = _of_column(live, piece.column)
            parts = [live[n].view(-1)[piece.start : piece.end].detach().cpu().clone() for n in names]
        header = {
            "piece": number,
            "version": version,
            "tensors": [[n, str(p.dtype).removeprefix("torch.")] for n, p in zip(names, parts, strict=True)],
            "sha256": sha256(parts),
        }
        return json.dumps(header).encode(), b"".join(bytes(memory(p)) for p in parts)

    def _tensors(self) -> tuple[Version, Mapping[str, Tensor]]:
        version = (self._optimizer.committed, self._optimizer.corrections - self._since)
        if self._live is None or self._live[0] != version:
            self._live = version, dict(self._optimizer.state().tensors)
        return self._live


def _of_column(tensors: Mapping[str, Tensor], column: str) -> list[str]:
    """The names of a column's tensors, as `columns` has them: what the optimizer keeps may have come since."""
    own = tensors[f"model.{column}"]
    kept = [n for n, t in tensors.items() if n.startswith(f"optimizer.{column}.") and t.shape == own.shape]
    return [f"model.{column}", *kept]


# -- the side that needs it -----------------------------------------------------------------------


class StateReceiver:
    """What a newcomer still needs of its stage's state, and the thread that asks a peer for it.

    say: called, from the thread, with what people should know. `missing` is asked by the training thread only.
    """

    def __init__(self, optimizer: StageOptimizer, say: Callable[[str], None]) -> None:
        self._optimizer, self._say = optimizer, say
        self._pieces: list[Piece] = []
        self._numbers: list[int] = []
        """Of each piece, with the peer that is asked."""
        self._arrived: dict[int, Version] = {}
        self._changed = threading.Condition(optimizer.lock)
        self._connection: socket.socket | None = None
        self._live: tuple[Version, dict[str, Tensor]] | None = None
        self._since = self._corrected = 0
        self._session = 0
        self.begun = False
        """Does this worker hold anything of the stage's state?"""
        self._unusable = 0

    @property
    def missing(self) -> int:
        """Pieces that are not in place; 0 before the first description too, when `begun` is False."""
        with self._optimizer.lock:
            self._drop_corrected()
            return len(self._pieces) - len(self._arrived)

    @property
    def complete(self) -> bool:
        return self.begun and not self.missing

    @property
    def blocking(self) -> bool:
        """Must all others wait while pieces are missing? The optimizer does not step elements one by one."""
        return bool(self.missing) and not self._optimizer.elementwise

    def holds_everything(self) -> None:
        """Of a worker that needs nothing: its state is the initial one, or a checkpoint's."""
        self.begun, self._pieces, self._arrived = True, [], {}

    def forget(self) -> None:
        """All is to be taken anew."""
        with self._optimizer.lock:
            self.begun, self._pieces, self._arrived = False, [], {}

    def receive_description(self, groups: Groups, source: Worker) -> Mapping[str, Any]:
        """Waits for what `StateServer.send_description` sends, and where nothing is held yet, loads it.

        Returns the description of the rest. Raises TransferError; StateTransferError, with nothing changed, when
        it can't be used; StateTransferFailed when it is not the first one that can't.
        """
        sizes = groups.receive(source, torch.zeros(2, dtype=torch.int64), _TAG).wait()
        header_size, body_size = (int(n) for n in sizes)
        if not 0 < header_size <= MAX_HEADER_BYTES or body_size < 0:
            raise StateTransferError(f"the state from {source} claims a header of {header_size} bytes")
        text = groups.receive(source, torch.empty(header_size, dtype=torch.uint8), _TAG).wait()
        body = groups.receive(source, torch.empty(body_size, dtype=torch.uint8), _TAG).wait()
        try:
            state = unpack(bytes(memory(text)), body)
            description: Mapping[str, Any] = state.document["hand_over"]
            if not self.begun:
                self._load(state, description)
        except (StateError, KeyError, TypeError, ValueError) as error:
            self._unusable += 1
            why = f"the state from {source} can't be used: {error}"
            if self._unusable >= STATE_ATTEMPTS:
                raise StateTransferFailed(f"{why}; that was attempt {self._unusable}") from None
            raise StateTransferError(why) from None
        self._unusable = 0
        return description

    def _load(self, state: StageState, description: Mapping[str, Any]) -> None:
        # All others wait for this one now: nothing that is large may be written.
        empty = {
            name: torch.empty([int(n) for n in shape], dtype=DTYPES[dtype], device="meta")
            for name, (dtype, shape) in description["tensors"].items()
        }
        pieces = [p for name, elements, _ in description["columns"] for p in pieces_of(str(name), int(elements))]
        if sum(prod(t.shape) for n, t in empty.items() if n.startswith("model.")) != sum(
            p.end - p.start for p in pieces
        ):
            raise StateError("the pieces are not those of the tensors")
        with self._optimizer.lock:
            self._optimizer.load_state(StageState(state.document["state"], {**state.tensors, **empty}))
            self._pieces, self._arrived, self.begun = pieces, {}, True

    def agreed(self, iteration: int, *, corrected: bool) -> None:
        """An agreement has led to `iteration`: what was put in place later, or of a step that has been put right
        since, is no longer there. Called after a roll-back, which leaves other tensors than there were; and what is on
        its way by now may be of a step that was put right."""
        self.stop()
        with self._optimizer.lock:
            self._live = None
            last = iteration - 1 if corrected else iteration
            self._arrived = {n: v for n, v in self._arrived.items() if v[0] <= last}
            self._since = self._corrected = self._optimizer.corrections
            self._arrived = {n: (v[0], 0) for n, v in self._arrived.items()}

    def begin(self, description: Mapping[str, Any], source: Worker) -> None:
        """Starts to ask `source` for what is missing, until `stop`."""
        self.stop()
        session = self._session
        firsts = {str(name): int(number) for name, _, number in description["columns"]}
        self._numbers = [firsts[piece.column] + piece.start // PIECE_ELEMENTS for piece in self._pieces]
        address = str(description["address"][0]), int(description["address"][1])
        secret, size = bytes.fromhex(description["secret"]), int(description["bytes"])
        threading.Thread(
            target=self._run, args=(session, address, secret, source, size), name="state-from-peer", daemon=True
        ).start()

    def stop(self) -> None:
        """No more pieces from whoever is asked now; what is in place stays."""
        with self._optimizer.lock:
            self._session += 1
            self._changed.notify_all()
            connection, self._connection = self._connection, None
        if connection is not None:
            _close(connection)

    def wait(self, seconds: float) -> None:
        """Until everything is in place, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self.missing, seconds)

    # -- in the thread --------------------------------------------------------------------------

    def _run(self, session: int, address: tuple[str, int], secret: bytes, source: Worker, size: int) -> None:
        pause, longest = RECONNECT_SECONDS
        began, tries = time.monotonic(), 0
        while self._session == session:
            before = len(self._arrived)
            try:
                with socket.create_connection(address, HANDSHAKE_SECONDS) as connection:
                    with self._optimizer.lock:
                        if self._session != session:
                            return
                        self._connection = connection
                    connection.settimeout(None)
                    _at_once(connection)
                    connection.sendall(secret)
                    self._fetch(connection, session, source, size, began)
                return
            except (OSError, EOFError, StateError, ValueError, KeyError, struct.error) as error:
                reason = str(error) or type(error).__name__
            if self._session != session:
                return
            if not self.missing:
                time.sleep(RECHECK_SECONDS)
                continue
            tries += 1
            # A peer that dies is told of by the next generation; until then there may be no reason to ask so often.
            pause = RECONNECT_SECONDS[0] if len(self._arrived) > before else min(2 * pause, longest)
            self._say(f"its state from {source} broke off ({reason}); try {tries + 1} follows in {pause:.1f} s")
            time.sleep(pause)

    def _fetch(self, connection: socket.socket, session: int, source: Worker, size: int, began: float) -> None:
        """Asks for pieces until the session is over: a step that is put right may take back what was complete. Raises
        OSError and others."""
        said = time.monotonic()
        asked: deque[int] = deque()
        wanted: deque[int] = deque()
        while self._session == session:
            if not wanted and not asked:
                with self._changed:
                    self._changed.wait_for(lambda: self._session != session or self.missing, RECHECK_SECONDS)
                    wanted.extend(n for n in range(len(self._pieces)) if n not in self._arrived)
                if not wanted:
                    continue
            while len(asked) < ASKED_AHEAD and wanted:
                asked.append(wanted.popleft())
                connection.sendall(_REQUEST.pack(self._numbers[asked[-1]]))
            number = asked.popleft()
            if not self._take(connection, session, number):
                wanted.append(number)
            if time.monotonic() - said >= PROGRESS_SECONDS:
                said = time.monotonic()
                done = len(self._arrived) / max(1, len(self._pieces))
                self._say(
                    f"has {done:.0%} of its state from {source} ({size / 2**20:,.0f} MiB) after {said - began:.0f} s"
                )

    def _take(self, connection: socket.socket, session: int, number: int) -> bool:
        """Puts the next piece in place, unless it is of another step than the values here, or the session is over;
        returns whether."""
        header_size, payload_size = _REPLY.unpack(_exactly(connection, _REPLY.size))
        if header_size > _MAX_REPLY_HEADER or payload_size > 64 * 16 * PIECE_ELEMENTS:
            raise StateError(f"piece {number} claims {payload_size} bytes")
        header = read_json(_exactly(connection, header_size))
        payload = _exactly(connection, payload_size)
        piece = self._pieces[number]
        if header["piece"] != self._numbers[number]:
            raise StateError(f"got piece {header['piece']}, expected {self._numbers[number]}")
        parts, at = [], 0
        for _, dtype in header["tensors"]:
            count = piece.end - piece.start
            kind = DTYPES[dtype]
            end = at + count * kind.itemsize
            # A copy starts at an aligned address, which a part of the payload need not.
            parts.append(torch.frombuffer(bytearray(payload[at:end]), dtype=kind))
            at = end
        if at != payload_size or sha256(parts) != header["sha256"]:
            raise StateError(f"piece {number}: the checksum does not match")
        with self._changed:
            self._drop_corrected()
            version, live = self._tensors()
            if tuple(header["version"]) != version or self._session != session:
                return False
            names = _of_column(live, piece.column)
            if [n for n, _ in header["tensors"]] != names:
                raise StateError(f"{piece.column}: got {[n for n, _ in header['tensors']]}, expected {names}")
            with torch.no_grad():
                for name, part in zip(names, parts, strict=True):
                    live[name].view(-1)[piece.start : piece.end].copy_(part)
            self._arrived[number] = version
            if len(self._arrived) == len(self._pieces):
                self._changed.notify_all()
            return True

    def _tensors(self) -> tuple[Version, Mapping[str, Tensor]]:
        version = (self._optimizer.committed, self._optimizer.corrections - self._since)
        if self._live is None or self._live[0] != version:
            self._live = version, dict(self._optimizer.state().tensors)
        return self._live

    def _drop_corrected(self) -> None:
        """A validation that changed the last step has taken back what was put in place since that step."""
        if self._optimizer.corrections != self._corrected:
            self._corrected = self._optimizer.corrections
            at = (self._optimizer.committed, self._optimizer.corrections - self._since)
            self._arrived = {n: v for n, v in self._arrived.items() if v[0] < at[0] or v == at}


def _at_once(connection: socket.socket) -> None:
    """Requests and ends of pieces must not wait for an acknowledgement, 40 ms each, in which a step may be taken."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError when the other end closes before."""
    out = bytearray(size)
    view = memoryview(out)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the connection was closed")
        view = view[got:]
    return bytes(out)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()
