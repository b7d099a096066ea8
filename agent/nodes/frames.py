"""A TLS connection between two launchers of a job, with JSON messages that only the other side can have sent or read.

Both sides show a certificate in TLS 1.3. Each side's private key is derived from the job's token (scrypt). So both
know, before they connect, the only certificate that the other side may show, and no certificate authority is needed.
Nothing is unpickled. Without a token (on loopback) the same happens with an empty one, which proves nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import select
import socket
import ssl
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from openrecycle.agent.messages import channel
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.plans.plan import read_json

MAX_MESSAGE_BYTES = 1 << 26
_PROTOCOL = "openrecycle-nodes/7"
"""Agreed on in the handshake (ALPN). Another version of the messages has another number."""
_HEADER = struct.Struct(">I")
_PART_BYTES = 1 << 18
# The most bytes that TLS may send beside messages. A handshake is 2 kB.
_NO_MESSAGE_BYTES = 1 << 20
HANDSHAKE_SECONDS = 10.0
"""How long a whole handshake may take, in however many parts it comes."""
LEAD_TIMEOUT_SECONDS, NODE_TIMEOUT_SECONDS = 30, 150
"""How long the leader and a node wait for a sign of the other host."""

Side = Literal["lead", "node"]
_OTHER: dict[Side, Side] = {"lead": "node", "node": "lead"}


class NotTrusted(Exception):
    """The other side could not show that it knows the token, or a message was not from it or not valid."""


class _Posted(NamedTuple):
    """Messages that wait to be sent; see Frames.post."""

    messages: Iterable[dict[str, Any]]
    unsendable: Callable[[], object] | None = None


class Frames:
    """Sends and receives messages over TLS. Any thread may `send` and `post`, and one may `receive`. `send` and
    `receive` raise OSError when the connection is gone.

    TLS works on memory here, beside the socket. A connection of OpenSSL must not be read and written at the same time,
    and a thread that waits in it to receive would keep the others from sending.
    """

    def __init__(self, connection: socket.socket, token: str, side: Side) -> None:
        self._socket, self._side = connection, side
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context(token, side).wrap_bio(self._incoming, self._outgoing, server_side=side == "lead")
        self._using, self._sending, self._waiting = threading.Lock(), threading.Lock(), threading.Lock()
        self._outbox: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._come = bytearray()
        self._broken, self._ended = "", False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def waiting(self) -> bool:
        """Whether a message, or the end, was already taken from the socket, so that the socket does not become readable
        for it."""
        whole = len(self._come) >= _HEADER.size and len(self._come) - _HEADER.size >= _HEADER.unpack_from(self._come)[0]
        return bool(whole or self._broken or self._ended)

    def shake_hands(self, until: float) -> None:
        """Does the TLS handshake. until: monotonic seconds by which it must be done. Raises NotTrusted and OSError."""
        taken = 0
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                part = _some(self._socket, until)
                taken += len(part)
                if taken > _NO_MESSAGE_BYTES:
                    raise NotTrusted("the other side sends too much for a handshake") from None
                self._incoming.write(part)
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    self._socket.sendall(self._outgoing.read())  # sends the alert, which tells the other side
                raise NotTrusted(_why(error, self._side)) from None
        self._socket.sendall(self._outgoing.read())
        if self._tls.selected_alpn_protocol() != _PROTOCOL:
            raise NotTrusted(f"the other side {_MEANINGS['NO_APPLICATION_PROTOCOL']}")
        self._open()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises ValueError for one of more than MAX_MESSAGE_BYTES, and TypeError if it is no JSON."""
        text = json.dumps(message).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(text):,} bytes, at most {MAX_MESSAGE_BYTES:,} can be sent")
        self.write(_HEADER.pack(len(text)) + text)

    def write(self, data: bytes) -> None:
        """Encrypts and sends bytes as they are: a message with its size before it, or a part of one."""
        with self._sending:
            for begin in range(0, len(data), _PART_BYTES):
                with self._using:
                    self._tls.write(memoryview(data)[begin : begin + _PART_BYTES])
                    sealed = self._outgoing.read()
                self._socket.sendall(sealed)

    def open_outbox(self, name: str) -> None:
        """Starts the thread that sends what is posted. name: of that thread."""
        channel.follow(self._outbox.get, self._send_all, self._hang_up, name=name)

    def post(self, message: dict[str, Any], unsendable: Callable[[], object] | None = None) -> None:
        """Sends a message after those that were posted before. Returns at once, since a thread sends: a side that
        stands still, and reads nothing, holds nobody up. If the connection is gone, `receive` says so. unsendable:
        called in the thread that sends if the message can't be sent as it is; None: the connection ends then."""
        self._outbox.put(_Posted((message,), unsendable))

    def post_all(self, messages: Iterable[dict[str, Any]]) -> None:
        """Posts several messages. Each is taken from `messages` when it is its turn."""
        self._outbox.put(_Posted(messages))

    def receive(self, until: float | None = None, *, most: int | None = None) -> dict[str, Any]:
        """Waits for the next message. Raises NotTrusted if it is too long, no JSON object, or not from the other side,
        and OSError if it comes too slowly.

        until: monotonic seconds by which all of it must have come; None: it may take any time, since a side that stands
        still within a message is as healthy as one that does between two. most: the most bytes; None:
        MAX_MESSAGE_BYTES.
        """
        self._fill(_HEADER.size, until)
        (size,) = _HEADER.unpack_from(self._come)
        most = MAX_MESSAGE_BYTES if most is None else most
        if size > most:
            raise NotTrusted(f"a message of {size:,} bytes was announced, at most {most:,} are taken")
        self._fill(_HEADER.size + size, until)
        text = bytes(self._come[_HEADER.size : _HEADER.size + size])
        del self._come[: _HEADER.size + size]
        try:
            message = read_json(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise NotTrusted("a message is not a JSON object")
        return message

    def take(self) -> dict[str, Any] | None:
        """Returns a message like `receive`, but without waiting; None: no whole message is there. Call it again when
        more has come."""
        try:
            return self.receive(time.monotonic())
        except TimeoutError:
            return None

    def close(self) -> None:
        """Closes the connection. It wakes threads in `receive` and `send`, and waits until they have left: the next
        file that is opened may get this socket's number, and such a thread would then wait for that file or close
        it."""
        self._outbox.put(None)
        self._hang_up()
        with self._sending, self._waiting, self._using:
            self._socket.close()

    def _send_all(self, posted: _Posted) -> None:
        for message in posted.messages:
            try:
                self.send(message)
            except OSError:
                raise
            except Exception:  # raised before any of it was sent
                if posted.unsendable is None:
                    raise
                traceback.print_exc()
                posted.unsendable()

    def _hang_up(self) -> None:
        with self._using, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _fill(self, size: int, until: float | None) -> None:
        """Receives until so many bytes of messages are there."""
        taken = 0
        while len(self._come) < size:
            if self._broken:
                raise NotTrusted(self._broken)
            if self._ended:
                raise ConnectionResetError("the other side has closed the connection")
            with self._waiting:
                part = _some(self._socket, until)
            # TLS adds little to a message. The time limit does not apply to what has come already: a process that was
            # suspended finds it all there, but late.
            taken += len(part)
            if taken > 2 * size + _NO_MESSAGE_BYTES:
                raise NotTrusted("the other side sends what is no message")
            with self._using:
                self._incoming.write(part)
                self._open()

    def _open(self) -> None:
        """Decrypts what is there. What came before TLS broke still counts."""
        try:
            while part := self._tls.read(_PART_BYTES):
                self._come += part
            self._ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._broken = _why(error, self._side)


def greet(connection: socket.socket, token: str, side: Side, until: float | None = None) -> Frames:
    """Does the handshake with another launcher. until: monotonic seconds by which it must be done; None: in
    HANDSHAKE_SECONDS.

    A node learns only from the first message whether the leader accepts its certificate. Raises NotTrusted, or OSError
    if the other side leaves, or says too little in that time.
    """
    connection.settimeout(HANDSHAKE_SECONDS)  # for sending, of which there is little
    frames = Frames(connection, token, side)
    frames.shake_hands(time.monotonic() + HANDSHAKE_SECONDS if until is None else until)
    connection.settimeout(None)
    _notice_loss(connection, side)
    return frames


def _notice_loss(connection: socket.socket, side: Side) -> None:
    """Sets time-outs so that the connection breaks if the other host is gone without a word. A host that is suspended,
    for no longer than workers may be silent, finds the connection again. A launcher that stands still breaks nothing,
    since its host answers for it, until the buffers of what it does not read are full. A node, whose workers go on
    speaking, must wait for that as long as workers wait for each other.
    """
    timeout = LEAD_TIMEOUT_SECONDS if side == "lead" else NODE_TIMEOUT_SECONDS
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", 1000 * timeout)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def prepare(token: str) -> None:
    """Makes what connections of both sides need, ahead of time: when a node's leader is gone, there may be no room for
    it. Raises InputError if there is no room now."""
    try:
        for side in _OTHER:
            _context(token, side)
    except OSError as error:
        expected = f"a folder with room for temporary files ({error.strerror})"
        raise InputError("TMPDIR", os.environ.get("TMPDIR"), expected) from None


@cache
def _context(token: str, side: Side) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side == "lead" else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key identifies the other side, on whichever host it runs
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([_PROTOCOL])
    if side == "lead":
        context.num_tickets = 0  # sessions are not resumed, and a node's socket then becomes readable only for messages
    own, _ = _identities(token)[side]
    _, other = _identities(token)[_OTHER[side]]
    context.load_verify_locations(cadata=other)
    with tempfile.TemporaryDirectory() as folder:  # with mode 0700; ssl reads a key only from a file
        file = Path(folder, "identity.pem")
        file.write_bytes(own)
        context.load_cert_chain(file)
    return context


@cache
def _identities(token: str) -> dict[Side, tuple[bytes, bytes]]:
    """Returns for each side its key and certificate (PEM), and only the certificate (DER).

    Both depend on the token alone, as an Ed25519 key of given bytes and its signatures do (RFC 8032). scrypt takes 0.1
    s and 32 MiB for each token that an attacker tries on a certificate.
    """
    secret = hashlib.scrypt(token.encode(), salt=b"openrecycle nodes", n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32)
    return {side: _identity(secret, side) for side in _OTHER}


def _identity(secret: bytes, side: Side) -> tuple[bytes, bytes]:
    key = Ed25519PrivateKey.from_private_bytes(HKDFExpand(hashes.SHA256(), 32, side.encode()).derive(secret))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"openrecycle {side}")])
    subject = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime(1970, 1, 1, tzinfo=UTC))  # clocks of nodes may be wrong, and a token does not expire
        .not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(subject, critical=False)
        .add_extension(issuer, critical=False)
        .sign(key, None)
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    own = private + certificate.public_bytes(serialization.Encoding.PEM)
    return own, certificate.public_bytes(serialization.Encoding.DER)


def _some(connection: socket.socket, until: float | None) -> bytes:
    """Waits for at least one byte. until: monotonic seconds by which it must come. (A time-out of the socket itself
    would start again with each byte, and apply to what other threads send.)"""
    if connection.fileno() < 0:
        raise ConnectionResetError("the connection is closed")
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    left = None if until is None else max(0.0, until - time.monotonic())
    if not poll.poll(None if left is None else 1000 * left):
        raise TimeoutError("the other side says too little in its time")
    part = connection.recv(_PART_BYTES)
    if not part:
        raise ConnectionResetError("the other side has closed the connection")
    return part


# What OpenSSL's reasons mean here, said of the other side.
_MEANINGS = {
    "CERTIFICATE_VERIFY_FAILED": "has another token",
    "TLSV1_ALERT_UNKNOWN_CA": "has another token",
    "TLSV1_ALERT_DECRYPT_ERROR": "has another token",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "shows no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "was shown no certificate",
    "NO_APPLICATION_PROTOCOL": "is none of a job, or one of another version",
    "HTTP_REQUEST": "does not speak TLS",
    "WRONG_VERSION_NUMBER": "does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "speaks no TLS 1.3",
}


def _why(error: ssl.SSLError, side: Side) -> str:
    reason = error.reason or str(error)
    meaning = _MEANINGS.get(reason, f"broke TLS ({reason.lower().replace('_', ' ')})")
    return f"{'the leader' if side == 'node' else 'a node'} {meaning}"
