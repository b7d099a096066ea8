"""Sends a stage's state from one worker to another, beside the training.

A newcomer first joins the groups of its stage, without micro-batches: it takes part in the reductions and takes every
step, on values that do not matter yet. Meanwhile it asks all peers that hold the state, at the same time, for one piece
after the other. A piece is a range of elements of a parameter, with the same range of all that the optimizer keeps of
it. It says of which step its values are, and by which validation that step was taken. If the newcomer has taken as many
steps, and the last one by the same validation, it puts the values in place and steps them from then on. (A peer that
has lost a validation with a worker that died has stepped as if it were clean, while others may know the validation; it
still gives pieces until the generation ends.) A piece that comes too late is asked for again. A piece that a peer is
slow to give, or can't give since it has died, is asked of another one.

So no copy of the whole state is needed, no worker waits, and no time-out applies. A newcomer that is slow, breaks off
or dies costs the others nothing but its place in the reductions. What it has received is kept across generations. This
works for optimizers that step each element by itself. With any other, the whole job waits until the newcomer has
everything, however long that takes.

What is small comes at once, from the first of the peers, with the description of the rest. Nothing is pickled, and
every piece carries the SHA-256 of its bytes. The connections are plain TCP connections beside the groups'. They last
for one generation, and open with a random secret, which has come over the groups.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.models.layers import Span
from openrecycle.agent.models.state import (
    DTYPES,
    StageState,
    StateError,
    decode,
    dtype_name,
    layer_of,
    memory,
    messages_for,
    of_layers,
    pack,
    sha256,
    unpack,
)
from openrecycle.agent.stages.optimizer import Shards, StageOptimizer
from openrecycle.agent.stages.post_validation import ValidationResult
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.group import TransferError
from openrecycle.agent.workers import tags
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.plan import read_json

# The header of a model with 100,000 tensors is 10 MB; a larger one is taken for an error.
MAX_HEADER_BYTES = 2**28
PIECE_ELEMENTS = 1 << 17
"""Elements of a piece. With Adam in fp32 these are 1.5 MiB: copying them takes 0.2 ms under the lock, and a link of
50 MB/s carries 30 of them a second."""
SMALL_ELEMENTS = 1024
"""A parameter with fewer elements always comes with the description: its state may look like a count of steps."""
ASKED_AHEAD = 4
"""How many pieces are asked of a peer before the first of them has come, so that the link is never idle."""
ASK_ANOTHER_SECONDS = 1.0
"""How long after a piece was asked of one peer, another peer that has nothing else to give is asked for it, too. At
50 MB/s the last of the pieces asked ahead comes after 0.1 s. No more comes twice than was asked ahead of slow peers."""
HANDSHAKE_SECONDS = 10.0
RECONNECT_SECONDS = (0.1, 5.0)
RECHECK_SECONDS = 0.1
PROGRESS_SECONDS = 10.0
MAX_CONNECTIONS = 16
"""The most connections at a time, unless more offers were made: then as many as these."""
STATE_ATTEMPTS = 3
"""After the state of so many peers could not be used, a newcomer gives up."""
_REQUEST, _REPLY = struct.Struct("!q"), struct.Struct("!II")
_SECRET_BYTES = 32
_OFFER_BYTES = 1024
_MAX_REPLY_HEADER = 1 << 16

Version = tuple[int, float | None]
"""Identifies the values that a stage holds: see StageOptimizer.version."""


class StateTransferError(TransferError):
    """What arrived can't be used; the message says from which peer it came. The next try should ask another one."""


class StateTransferFailed(RuntimeError):
    """A newcomer got no usable state in several attempts: it ends, and the job goes on without it."""


@dataclass(frozen=True)
class Column:
    """A parameter or buffer, with the names of the stage's tensors that have its elements: its own, and those that the
    optimizer keeps per element."""

    name: str
    elements: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class ColumnPiece:
    column: str
    start: int
    end: int


def columns(state: StageState, moving: Collection[str]) -> list[Column]:
    """Returns the columns of a stage's state that may come piece by piece, in a fixed order.

    moving: names of buffers that are changed within a forward, so that no other thread may read them meanwhile. They
    come with the description, between two iterations.
    """
    found = []
    for name, tensor in state.tensors.items():
        if name.removeprefix("model.") in moving:
            continue
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


@dataclass(frozen=True)
class Holder:
    """A peer that gives pieces, at this address, to a connection that opens with the secret. numbering: a hash of how
    it numbers the pieces."""

    worker: Worker
    address: tuple[str, int]
    secret: bytes
    numbering: str


def pieces_of(name: str, elements: int) -> list[ColumnPiece]:
    return [ColumnPiece(name, a, min(a + PIECE_ELEMENTS, elements)) for a in range(0, elements, PIECE_ELEMENTS)]


def large_untrained(optimizer: StageOptimizer, span: Span | None = None) -> dict[str, Tensor]:
    """Returns untrained parameters and buffers that are too large to come with the description, where the optimizer's
    state is sharded. span: only those of these layers."""
    assert optimizer.shards is not None
    trained, module = set(optimizer.shards.parameter_names), optimizer.module
    named = [*module.named_parameters(), *module.named_buffers()]
    return {
        name: tensor.detach()
        for name, tensor in named
        if name not in trained and tensor.numel() >= SMALL_ELEMENTS and (span is None or layer_of(name) in span)
    }


def segment_pieces(shards: Shards) -> list[ColumnPiece]:
    """Returns the pieces where the optimizer's state is sharded: one for each segment."""
    return [ColumnPiece(name, s.start, s.end) for name, s in zip(shards.names, shards.segments, strict=True)]


class LiveTensors:
    """The tensors of a stage's state, looked up once for each version of it. Used with the optimizer's lock held."""

    def __init__(self, optimizer: StageOptimizer) -> None:
        self._optimizer = optimizer
        self._found: tuple[Version, Mapping[str, Tensor]] | None = None

    def now(self) -> Mapping[str, Tensor]:
        version = self._optimizer.version
        if self._found is None or self._found[0] != version:
            self._found = version, dict(self._optimizer.state().tensors)
        return self._found[1]


# -- the side that has the state ------------------------------------------------------------------


class StateServer:
    """Gives the pieces of this worker's stage to peers that know the secret, until it is closed. One thread accepts
    connections, and each connection has a thread. rate: bytes a second for all together. Raises TransferError."""

    def __init__(self, optimizer: StageOptimizer, host: str, rate: float | None) -> None:
        self._optimizer, self._rate = optimizer, rate
        self._rate_lock = threading.Lock()
        self._free_at = time.monotonic()
        with optimizer.lock:
            moving = optimizer.moving_names()
            self._columns = columns(optimizer.state(), moving) if optimizer.shards is None else []
        self._pieces = [p for c in self._columns for p in pieces_of(c.name, c.elements)]
        if optimizer.shards is not None:
            self._pieces = segment_pieces(optimizer.shards)
        numbering = json.dumps([[p.column, p.end - p.start] for p in self._pieces])
        self._numbering = hashlib.sha256(numbering.encode()).hexdigest()
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, 0), family=family)
        except OSError as error:
            # This is no reason to end a healthy worker: the next agreement names another one.
            raise TransferError(f"no state can be given at {host}: {error}") from None
        self._offers = 0
        self._open: set[socket.socket] = set()
        self._opening = threading.Lock()
        self._closed = threading.Event()
        self._live = LiveTensors(optimizer)
        self.address = (host, int(self._listening.getsockname()[1]))
        self._accepting = threading.Thread(target=self._accept, name="state-server", daemon=True)
        self._accepting.start()

    def send_description(
        self, groups: Groups, to: Worker, at_once: int, span: Span | None = None, **about: str
    ) -> None:
        """Sends the description over the generation's groups, while the newcomer waits for it and everything is
        settled.

        at_once: up to so many bytes, the whole state is sent with it. span: only these layers. about: what else the
        newcomer is told. Raises TransferError.
        """
        with self._optimizer.lock:
            state = self._optimizer.state()
            numbers, number = {}, 0
            for column in self._columns:
                numbers[column.name] = number
                number += len(pieces_of(column.name, column.elements))
            if span is not None:
                state = of_layers(state, span)
            large = columns(state, self._optimizer.moving_names(span))
            size = sum(t.nbytes for t in state.tensors.values())
            if size <= at_once:
                large = []
            shards = self._optimizer.shards
            if shards is not None:
                # Parameters come as after every step, then what is not trained. The optimizer's state comes in
                # segments.
                large = []
            apart = {name for column in large for name in column.tensors}
            if shards is not None:
                names = {*shards.parameter_names, *large_untrained(self._optimizer)}
                apart = {f"model.{name}" for name in names} & state.tensors.keys()
            specs = {n: [dtype_name(state.tensors[n].dtype), list(state.tensors[n].shape)] for n in apart}
            description = {
                "offer": self._offer(),
                "columns": [[c.name, c.elements, numbers[c.name]] for c in large],
                "tensors": specs,
                "bytes": size,
                "coefficient": self._optimizer.version[1],
                "moving": self._optimizer.moving_names(span),
                **about,
            }
            small = StageState(
                {"hand_over": description, "state": dict(state.document)},
                {n: t for n, t in state.tensors.items() if n not in apart},
            )
            packed = pack(small)
        send_packed(groups, to, packed, tags.STATE)

    def _offer(self) -> dict[str, Any]:
        self._offers += 1  # a peer that gets an offer keeps a connection until the generation ends
        return {"address": list(self.address), "secret": self._secret.hex(), "numbering": self._numbering}

    def send_offer(self, groups: Groups, to: Worker) -> None:
        """Tells a newcomer that it may ask for pieces here, too, when another peer describes them. Raises
        TransferError.
        """
        _send_offer(groups, to, self._offer())

    def close(self) -> None:
        """Ends the server. Each connection is closed by the thread that uses it, since the next file that is opened may
        get its number."""
        self._closed.set()
        _shut_down(self._listening)
        self._accepting.join()
        self._listening.close()
        with self._opening:
            for connection in self._open:
                _shut_down(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # such as too many open files for a moment: peers in the queue have no time-out
                if self._closed.wait(RECHECK_SECONDS):
                    return
                continue
            if len(self._open) >= max(MAX_CONNECTIONS, self._offers):
                connection.close()
                continue
            with self._opening:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="state-to-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, EOFError, KeyError, struct.error, StateError):
                _at_once(connection)
                connection.settimeout(HANDSHAKE_SECONDS)
                if not hmac.compare_digest(_exactly(connection, _SECRET_BYTES), self._secret):
                    return
                connection.settimeout(None)
                self._answer(connection)
        finally:
            with self._opening:
                self._open.discard(connection)
            _shut_down(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        while True:
            (number,) = _REQUEST.unpack(_exactly(connection, _REQUEST.size))
            if not 0 <= number < len(self._pieces):
                return
            header, parts = self.piece(number)
            size = sum(part.nbytes for part in parts)
            connection.sendall(_REPLY.pack(len(header), size) + header)
            for part in parts:
                connection.sendall(memory(part))
            if self._rate is not None:
                with self._rate_lock:
                    self._free_at = max(self._free_at, time.monotonic() - 1.0) + size / self._rate
                    pause = self._free_at - time.monotonic()
                time.sleep(max(0.0, pause))

    def piece(self, number: int) -> tuple[bytes, list[Tensor]]:
        """Returns a piece as it is now: its header, which says of which version it is, and its tensors. These are the
        only copy that is made, since the next step must not wait until they are sent."""
        piece, document = self._pieces[number], None
        with self._optimizer.lock:
            if self._optimizer.shards is None:
                version, live = self._optimizer.version, self._live.now()
                names = _of_column(live, piece.column)
                parts = [_apart(live[n].view(-1)[piece.start : piece.end]) for n in names]
            else:
                version, state = self._optimizer.version, self._optimizer.segment_state(number)
                names, document = list(state.tensors), state.document
                parts = list(map(_apart, state.tensors.values()))
        header = {
            "piece": number,
            "version": version,
            "tensors": [[n, dtype_name(p.dtype), list(p.shape)] for n, p in zip(names, parts, strict=True)],
            "document": document,
            "sha256": sha256(parts),
        }
        return json.dumps(header).encode(), parts


def _of_column(tensors: Mapping[str, Tensor], column: str) -> list[str]:
    """Returns the names of a column's tensors, as `columns` does. The optimizer's may have come since then."""
    own = tensors[f"model.{column}"]
    kept = [n for n, t in tensors.items() if n.startswith(f"optimizer.{column}.") and t.shape == own.shape]
    return [f"model.{column}", *kept]


def send_packed(groups: Groups, to: Worker, packed: tuple[bytes, Sequence[Tensor]], tag: int) -> None:
    """Sends a packed state over the generation's groups, one message after the other. Raises TransferError."""
    header, messages = packed
    size = torch.tensor([len(header)], dtype=torch.int64)
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for pending in [groups.send(to, tensor, tag) for tensor in (size, text, *messages) if tensor.numel()]:
        pending.wait()


def receive_packed(groups: Groups, source: Worker, tag: int) -> tuple[bytes, list[Tensor]]:
    """Receives what `send_packed` of the source sends. Raises TransferError; StateError if it can't be unpacked."""
    size = int(groups.receive(source, torch.zeros(1, dtype=torch.int64), tag).wait())
    if not 0 < size <= MAX_HEADER_BYTES:
        raise StateError(f"it claims a header of {size} bytes")
    text = groups.receive(source, torch.empty(size, dtype=torch.uint8), tag).wait()
    header = bytes(memory(text))
    messages = messages_for(header)
    return header, [groups.receive(source, m, tag).wait() if m.numel() else m for m in messages]


def send_no_offer(groups: Groups, to: Worker) -> None:
    """Tells a newcomer that this holder can't give anything, so that it asks the others only. Raises TransferError."""
    _send_offer(groups, to, {})


def _send_offer(groups: Groups, to: Worker, offer: Mapping[str, Any]) -> None:
    text = json.dumps(offer).encode().ljust(_OFFER_BYTES)
    groups.send(to, torch.frombuffer(bytearray(text), dtype=torch.uint8), tags.STATE).wait()


def receive_offer(groups: Groups, source: Worker) -> Holder | None:
    """Receives what `StateServer.send_offer` of the source sends; None: it offers nothing. Raises TransferError."""
    offer = groups.receive(source, torch.empty(_OFFER_BYTES, dtype=torch.uint8), tags.STATE).wait()
    try:
        return _holder(source, read_json(bytes(memory(offer))))
    except (StateError, KeyError, TypeError, ValueError):
        return None


# -- the side that needs the state ----------------------------------------------------------------


@dataclass
class _HolderQueue:
    """A holder that is asked for pieces. asked: for which ones and since when, in the order of the answers. came: how
    many pieces have come from it. gives: the numbers of the pieces that it has; None: all."""

    holder: Holder
    gives: frozenset[int] | None = None
    connection: socket.socket | None = None
    asked: dict[int, float] = field(default_factory=dict)
    came: int = 0


class StateReceiver:
    """What a newcomer still needs of its stage's state, and the threads that ask its peers for it, one for each peer.

    say: called from these threads with what people should know. They and the training thread share the optimizer's
    lock.
    """

    def __init__(self, optimizer: StageOptimizer, say: Callable[[str], None]) -> None:
        self._optimizer, self._say = optimizer, say
        self._pieces: list[ColumnPiece] = []
        self._numbers: list[int] = []
        """The number that each piece has at the peers that are asked."""
        self._wanted: deque[int] = deque()
        """Missing pieces for which no peer is asked; it is filled again when it is empty."""
        self._sources: list[_HolderQueue] = []
        self._arrived: dict[int, Version] = {}
        self._written = 0
        """For how many pieces, from the first, `write_once` has written to memory."""
        self._changed = threading.Condition(optimizer.lock)
        self._live = LiveTensors(optimizer)
        self._seen = optimizer.version
        self._session = 0
        self._said = 0.0
        self.begun = False
        """Whether this worker holds anything of the stage's state."""
        self._unusable = 0

    @property
    def missing(self) -> int:
        """The number of pieces that are not in place. Before the first description, when `begun` is False, it is 0."""
        with self._optimizer.lock:
            self._drop_undone()
            return len(self._pieces) - len(self._arrived)

    @property
    def complete(self) -> bool:
        return self.begun and not self.missing

    @property
    def provisional(self) -> int:
        """How many pieces an agreement may take back: those that came after one of the last two steps, which it may
        undo or correct."""
        with self._optimizer.lock:
            return sum(taken >= self._optimizer.committed - 1 for taken, _ in self._arrived.values())

    @property
    def blocking(self) -> bool:
        """Whether all others must wait while pieces are missing, since the optimizer does not step each element by
        itself."""
        return bool(self.missing) and not self._optimizer.steps_apart

    def holds_everything(self) -> None:
        """Notes that this worker has all of its state: the initial one, or a checkpoint's."""
        self.begun, self._pieces, self._arrived = True, [], {}

    def forget(self) -> None:
        """Drops what has arrived: all is to be taken again."""
        with self._optimizer.lock:
            self.begun, self._pieces, self._arrived = False, [], {}

    def receive_description(
        self, groups: Groups, sources: Sequence[Worker]
    ) -> tuple[Mapping[str, Any], tuple[Holder, ...]]:
        """Receives what `StateServer.send_description` of the first source sends, and the offers of the other sources.
        Loads the description's state if nothing is held yet.

        Returns the description of the rest, and the holders to ask for it. Raises TransferError; StateTransferError,
        with nothing changed, if the description can't be used; StateTransferFailed if that has happened too often.
        """
        source, *others = sources
        try:
            header, messages = receive_packed(groups, source, tags.STATE)
            offers = [(worker, receive_offer(groups, worker)) for worker in others]
            state = unpack(header, messages)
            description: Mapping[str, Any] = state.document["hand_over"]
            first = _holder(source, description["offer"])
            if not self.begun:
                self._load(state, description)
        except (StateError, KeyError, TypeError, ValueError) as error:
            self._unusable += 1
            why = f"the state from {source} can't be used: {error}"
            if self._unusable >= STATE_ATTEMPTS:
                raise StateTransferFailed(f"{why}; that was attempt {self._unusable}") from None
            raise StateTransferError(why) from None
        self._unusable = 0
        holders = [first]
        for worker, offer in offers:
            if offer is None:
                self._say(f"nothing of its state from {worker}, which offers none")
            else:
                holders.append(offer)
        # A holder whose optimizer lays out its tensors in another way would give another piece under the same number.
        return description, tuple(h for h in holders if h.numbering == first.numbering)

    def _load(self, state: StageState, description: Mapping[str, Any]) -> None:
        # All other workers wait for this one now, so nothing large may be written.
        empty = {
            name: torch.empty([int(n) for n in shape], dtype=DTYPES[dtype], device="meta")
            for name, (dtype, shape) in description["tensors"].items()
        }
        pieces = [p for name, elements, _ in description["columns"] for p in pieces_of(str(name), int(elements))]
        coefficient = description["coefficient"]
        last = ValidationResult(None if coefficient is None else float(coefficient))
        sharded = self._optimizer.shards is not None
        come = sum(p.end - p.start for p in pieces)
        if not sharded and sum(prod(t.shape) for n, t in empty.items() if n.startswith("model.")) != come:
            raise StateError("the pieces are not those of the tensors")
        with self._optimizer.lock:
            self._optimizer.load_state(StageState(state.document["state"], {**state.tensors, **empty}))
            self._optimizer.validation = last
            self._pieces, self._arrived, self.begun = pieces, {}, True
            self._written = 0

    def agreed(self) -> None:
        """Notes that this worker has done what an agreement asked for. A roll-back may have replaced tensors."""
        self.stop()
        with self._optimizer.lock:
            self._drop_undone()
            self._live = LiveTensors(self._optimizer)

    def begin(self, description: Mapping[str, Any], holders: Sequence[Holder]) -> None:
        """Starts to ask the holders for what is missing, until `stop`."""
        self.stop()
        firsts = {str(name): int(number) for name, _, number in description["columns"]}
        with self._optimizer.lock:
            session, self._said = self._session, time.monotonic()
            self._sources = [_HolderQueue(holder) for holder in holders] if self._pieces else []
            self._numbers = [firsts[piece.column] + piece.start // PIECE_ELEMENTS for piece in self._pieces]
        self._ask(session, int(description["bytes"]))

    def _ask(self, session: int, size: int) -> None:
        """Starts a thread for each source. size: of the whole state, in bytes."""
        whole = f"{', '.join(str(s.holder.worker) for s in self._sources)} ({size / 2**20:,.0f} MiB)"
        for source in self._sources:
            name = f"state-from-{source.holder.worker}"
            threading.Thread(target=self._run, args=(session, source, whole), name=name, daemon=True).start()

    def write_once(self, superseded: Callable[[], bool]) -> None:
        """Writes zeros to the memory of the optimizer's state where nothing has arrived yet. The system provides memory
        when it is first written to; if that were in the first step, all peers would wait for it. (A device's memory is
        there from the start.) For some gigabytes this takes a second. It stops if the generation is `superseded`, and
        goes on in the next one."""
        if self._optimizer.gradients.device.type != "cpu":
            return
        while self._written < len(self._pieces) and not superseded():
            piece = self._pieces[self._written]
            with self._optimizer.lock:
                if self._written not in self._arrived:
                    live = self._live.now()
                    for name in _of_column(live, piece.column)[1:]:
                        live[name].view(-1)[piece.start : piece.end].zero_()
            self._written += 1

    def stop(self) -> None:
        """Stops taking pieces from the present sources. What is in place stays."""
        with self._optimizer.lock:
            self._session += 1
            self._wanted.clear()
            sources, self._sources = self._sources, []
            for source in sources:
                if source.connection is not None:
                    _shut_down(source.connection)  # its thread closes it
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Waits until everything is in place, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self.missing, seconds)

    # -- in the threads --------------------------------------------------------------------------

    def _run(self, session: int, source: _HolderQueue, whole: str) -> None:
        pause, longest = RECONNECT_SECONDS
        began, tries, holder = time.monotonic(), 0, source.holder
        while self._session == session:
            before = source.came
            try:
                with socket.create_connection(holder.address, HANDSHAKE_SECONDS) as connection:
                    with self._optimizer.lock:
                        if self._session != session:
                            return
                        source.connection = connection
                    try:
                        connection.settimeout(None)
                        _at_once(connection)
                        connection.sendall(holder.secret)
                        self._fetch(connection, session, source, whole, began)
                    finally:
                        with self._optimizer.lock:
                            source.connection = None
                return
            except (OSError, EOFError, StateError, ValueError, KeyError, struct.error) as error:
                reason = str(error) or type(error).__name__
            with self._changed:
                if self._session != session:
                    return
                self._wanted.extendleft(source.asked)  # other peers may give them
                source.asked.clear()
                self._changed.notify_all()
            if not self.missing:
                time.sleep(RECHECK_SECONDS)
                continue
            tries += 1
            # If the peer has died, the next generation says so; until then it need not be asked so often.
            pause = RECONNECT_SECONDS[0] if source.came > before else min(2 * pause, longest)
            self._say(f"its state from {holder.worker} broke off ({reason}); try {tries + 1} follows in {pause:.1f} s")
            time.sleep(pause)

    def _fetch(self, connection: socket.socket, session: int, source: _HolderQueue, whole: str, began: float) -> None:
        """Asks for pieces until the session is over, even when all have come: a step that is corrected may take some
        back. Raises OSError and others."""
        while self._session == session:
            for number in self._choose(session, source):
                connection.sendall(_REQUEST.pack(self._numbers[number]))
            with self._changed:
                if not source.asked:
                    if self._session == session:
                        self._changed.wait(RECHECK_SECONDS)
                    continue
                number = next(iter(source.asked))
            in_place = self._take(connection, session, number)
            with self._optimizer.lock:
                if self._session != session:
                    return
                source.came += 1
                del source.asked[number]
                if not in_place:
                    self._wanted.append(number)
                due = time.monotonic() - self._said >= PROGRESS_SECONDS
                if due:
                    self._said = time.monotonic()
                done = len(self._arrived) / max(1, len(self._pieces))
            if due:
                self._say(f"has {done:.0%} of its state from {whole} after {time.monotonic() - began:.0f} s")

    def _choose(self, session: int, source: _HolderQueue) -> list[int]:
        """Chooses what to ask the source for now: first pieces that no peer was asked for, then those that other peers
        are slow to give."""
        chosen: list[int] = []
        with self._optimizer.lock:
            if self._session != session or len(source.asked) >= ASKED_AHEAD or not self.missing:
                return chosen
            now = time.monotonic()
            if not self._wanted:
                last = sorted((at, n) for other in self._sources for n, at in other.asked.items())
                asked = {n: at for at, n in last}
                slow = [n for n, at in asked.items() if now - at >= ASK_ANOTHER_SECONDS]
                self._wanted.extend(n for n in range(len(self._pieces)) if n not in self._arrived and n not in asked)
                self._wanted.extend(slow)
            passed = []
            while self._wanted and len(source.asked) < ASKED_AHEAD:
                number = self._wanted.popleft()
                if number in self._arrived or number in source.asked:
                    continue
                if source.gives is not None and self._numbers[number] not in source.gives:
                    passed.append(number)
                    continue
                source.asked[number] = now
                chosen.append(number)
            self._wanted.extendleft(reversed(passed))
        return chosen

    def _take(self, connection: socket.socket, session: int, number: int) -> bool:
        """Receives the next piece, and puts it in place unless it is of another step than the values here, or the
        session is over. Returns whether the piece is in place."""
        header_size, payload_size = _REPLY.unpack(_exactly(connection, _REPLY.size))
        if header_size > _MAX_REPLY_HEADER or payload_size > self._most_bytes(number):
            raise StateError(f"piece {number} claims {payload_size} bytes")
        header = read_json(_exactly(connection, header_size))
        if header["piece"] != self._numbers[number]:
            raise StateError(f"got piece {header['piece']}, expected {self._numbers[number]}")
        specs = [([int(n) for n in shape], DTYPES[dtype]) for _, dtype, shape in header["tensors"]]
        if any(n < 0 for shape, _ in specs for n in shape) or payload_size != sum(
            prod(shape) * dtype.itemsize for shape, dtype in specs
        ):
            raise StateError(f"piece {number}: {payload_size} bytes are not those of its tensors")
        parts = [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
        for part in parts:
            _fill(connection, memory(part))
        if sha256(parts) != header["sha256"]:
            raise StateError(f"piece {number}: the checksum does not match")
        with self._changed:
            self._drop_undone()
            if number in self._arrived:
                return True  # another peer has given it meanwhile
            version = self._optimizer.version
            if tuple(header["version"]) != version or self._session != session:
                return False
            names = [n for n, _, _ in header["tensors"]]
            self._put(number, header["document"], dict(zip(names, parts, strict=True)))
            self._arrived[number] = version
            if len(self._arrived) == len(self._pieces):
                self._changed.notify_all()
            return True

    def _most_bytes(self, number: int) -> int:
        """Returns the most bytes that a piece may have. An optimizer keeps a few values per element, and a segment that
        can't be cut has many elements."""
        piece = self._pieces[number]
        return 64 * 16 * max(PIECE_ELEMENTS, piece.end - piece.start)

    def _put(self, number: int, document: Any, parts: Mapping[str, Tensor]) -> None:
        """Puts a piece in place, with the lock held. Raises StateError."""
        piece = self._pieces[number]
        live = self._live.now()
        names = _of_column(live, piece.column)
        if list(parts) != names or any(part.numel() != piece.end - piece.start for part in parts.values()):
            raise StateError(f"{piece.column}: got {list(parts)}, expected {names}")
        with torch.no_grad():
            for name, part in parts.items():
                live[name].view(-1)[piece.start : piece.end].copy_(part)

    def _drop_undone(self) -> None:
        """Counts pieces as missing again that were put in place after a step which has been undone or corrected since:
        that has taken them back."""
        at = self._optimizer.version
        if at != self._seen:
            self._seen = at
            self._arrived = {n: v for n, v in self._arrived.items() if v[0] < at[0] or v == at}


class SegmentReceiver(StateReceiver):
    """What a worker still needs of a sharded optimizer's state: the segments that it is to own.

    There is one object for each generation, and StateReceiver's methods for descriptions are not used with it. Segments
    that have come after a step which is undone or corrected are given up again by the optimizer (Shards.late).
    """

    def __init__(self, optimizer: StageOptimizer, say: Callable[[str], None], wanted: Sequence[int]) -> None:
        """wanted: numbers of segments."""
        super().__init__(optimizer, say)
        assert optimizer.shards is not None
        pieces = segment_pieces(optimizer.shards)
        self._pieces, self._numbers, self.begun = [pieces[n] for n in wanted], list(wanted), True

    def begin_filling(self, sources: Sequence[tuple[Holder, Collection[int]]]) -> None:
        """Asks each holder for the wanted segments that it has. sources: holders, and the numbers of their segments."""
        with self._optimizer.lock:
            session = self._session
            self._said = time.monotonic()
            self._sources = [_HolderQueue(holder, frozenset(gives)) for holder, gives in sources]
        self._ask(session, sum(p.end - p.start for p in self._pieces) * 8)

    def _put(self, number: int, document: Any, parts: Mapping[str, Tensor]) -> None:
        device = self._optimizer.gradients.device
        kept = decode(document["kept"], parts, device, own=True)
        if not isinstance(kept, dict):
            raise StateError(f"{self._pieces[number].column}: the optimizer's state is no dictionary")
        self._optimizer.hold(self._numbers[number], kept)


def _holder(worker: Worker, offer: Mapping[str, Any]) -> Holder:
    """Reads an offer. Raises KeyError, TypeError, ValueError."""
    host, port = offer["address"]
    return Holder(worker, (str(host), int(port)), bytes.fromhex(offer["secret"]), str(offer["numbering"]))


def _at_once(connection: socket.socket) -> None:
    """Has TCP send at once. Otherwise requests and ends of pieces wait for an acknowledgement, 40 ms each, in which a
    step may be taken."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Receives so many bytes. Raises EOFError when the other end closes before."""
    out = bytearray(size)
    _fill(connection, memoryview(out))
    return bytes(out)


def _fill(connection: socket.socket, into: memoryview) -> None:
    """Receives into the whole of `into`. Raises EOFError when the other end closes before."""
    while into:
        got = connection.recv_into(into)
        if not got:
            raise EOFError("the connection was closed")
        into = into[got:]


def _apart(live: Tensor) -> Tensor:
    """Returns a contiguous copy on the CPU."""
    return torch.empty(live.shape, dtype=live.dtype).copy_(live.detach())


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
