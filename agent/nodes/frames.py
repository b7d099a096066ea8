"""One TCP connection between two launchers of a job: JSON messages that only the other could have sent.

Both sides prove that they know the job's token, without sending it; after that every message
carries an HMAC over its direction, its number and its text. Nothing is unpickled, and nothing is encrypted
but the token that workers report with. Without a token (on loopback) the same happens with an empty one,
which proves nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any, Literal

from openrecycle.planner.plan import read_json

MAX_MESSAGE_BYTES = 1 << 26
_MAGIC = b"openrecycle node 1\n"
_NONCE = _MAC = 32
_HEADER = struct.Struct(">I")
HANDSHAKE_SECONDS = 10.0
"""For all of a handshake, however it comes."""
_FRAME_SECONDS = 60.0
"""For all of a message, from its first byte."""
LEAD_PATIENCE_SECONDS, NODE_PATIENCE_SECONDS = 30, 150
"""Without a sign of the other host."""

Side = Literal["lead", "node"]
_OTHER: dict[Side, Side] = {"lead": "node", "node": "lead"}


class NotTrusted(Exception):
    """The other side could not show that it knows the token, or a message was not its own."""


class Frames:
    """`send` from any thread, `receive` from one. Both raise OSError when the connection is gone."""

    def __init__(self, connection: socket.socket, key: bytes, side: Side) -> None:
        self._socket, self._key, self._side = connection, key, side
        self._sending = threading.Lock()
        self._sent = self._received = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(text):,} bytes, at most {MAX_MESSAGE_BYTES:,} can be sent")
        with self._sending:
            mac = self._mac(self._side, self._sent, text)
            self._sent += 1
            self._socket.sendall(_HEADER.pack(len(text)) + mac + text)

    def receive(self, until: float | None = None) -> dict[str, Any]:
        """until: monotonic seconds by which all of it must have come; None: it may begin whenever it does.

        Raises NotTrusted for a message that is too long, is no JSON object or has a wrong HMAC, and OSError for
        one that comes too slowly.
        """
        first = _exactly(self._socket, 1, until)
        until = time.monotonic() + _FRAME_SECONDS if until is None else until
        (size,) = _HEADER.unpack(first + _exactly(self._socket, _HEADER.size - 1, until))
        if size > MAX_MESSAGE_BYTES:
            raise NotTrusted(f"a message of {size:,} bytes was announced, at most {MAX_MESSAGE_BYTES:,} are taken")
        mac = _exactly(self._socket, _MAC, until)
        text = _exactly(self._socket, size, until)
        if not hmac.compare_digest(mac, self._mac(_OTHER[self._side], self._received, text)):
            raise NotTrusted("a message has a wrong HMAC")
        self._received += 1
        try:
            message = read_json(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise NotTrusted("a message is not a JSON object")
        return message

    def close(self) -> None:
        """Also wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(self, side: Side, number: int, text: bytes) -> bytes:
        return _hmac(self._key, side.encode(), number.to_bytes(8, "big"), text)


def greet(connection: socket.socket, token: str, side: Side, until: float | None = None) -> Frames:
    """The handshake. until: monotonic seconds by which it must be done; None: in HANDSHAKE_SECONDS.

    Raises NotTrusted, or OSError when the other side leaves, or says too little in that time."""
    secret = token.encode()
    until = time.monotonic() + HANDSHAKE_SECONDS if until is None else until
    connection.settimeout(HANDSHAKE_SECONDS)  # of what is sent, which is little
    if side == "lead":
        ours = secrets.token_bytes(_NONCE)
        connection.sendall(_MAGIC + ours)
        theirs = _exactly(connection, _NONCE, until)
        nonces = ours + theirs
        if not hmac.compare_digest(_exactly(connection, _MAC, until), _hmac(secret, b"node", nonces)):
            raise NotTrusted("a node does not know the token of this job")
        connection.sendall(_hmac(secret, b"lead", nonces))
    else:
        if _exactly(connection, len(_MAGIC), until) != _MAGIC:
            raise NotTrusted("what answers is no lead of a job, or one of another version")
        theirs = _exactly(connection, _NONCE, until)
        ours = secrets.token_bytes(_NONCE)
        nonces = theirs + ours
        connection.sendall(ours + _hmac(secret, b"node", nonces))
        try:
            proof = _exactly(connection, _MAC, until)
        except OSError:
            raise NotTrusted("the lead has another token than this node") from None
        if not hmac.compare_digest(proof, _hmac(secret, b"lead", nonces)):
            raise NotTrusted("what answers does not know the token of this job")
    connection.settimeout(None)
    _notice_loss(connection, side)
    return Frames(connection, _hmac(secret, b"session", nonces), side)


def _notice_loss(connection: socket.socket, side: Side) -> None:
    """A host that is gone without a word breaks the connection; one that is suspended for as long as a silence is borne
    comes back to it. A launcher that stands still breaks nothing, as its host answers for it, until what it does not
    read has filled up: and a node, whose workers go on speaking, must bear that for as long as they bear each other.
    """
    patience = LEAD_PATIENCE_SECONDS if side == "lead" else NODE_PATIENCE_SECONDS
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", 1000 * patience)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytes:
    """until: monotonic seconds; a time-out of the socket itself would begin anew with each byte, and hold for what
    another thread sends."""
    data = bytearray()
    if connection.fileno() < 0:
        raise ConnectionResetError("the connection is closed")
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while len(data) < size:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not poll.poll(None if left is None else 1000 * left):
            raise TimeoutError("the other side says too little in its time")
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the other side has closed the connection")
        data += part
    return bytes(data)
