"""One TLS connection between two launchers of a job: JSON messages that only the other could have sent or read.

TLS 1.3 on both sides with a certificate: each side's private key is derived from the job's token (scrypt), so that
both know, before they connect, the one certificate that the other may show, and nobody needs an authority. Nothing
is unpickled. Without a token (on loopback) the same happens with an empty one, which proves nothing.
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
"""Agreed on in the handshake (ALPN); another version of the messages has another number."""
_HEADER = struct.Struct(">I")
_PART_BYTES = 1 << 18
# Of what TLS says beside messages. A handshake is 2 kB.
_NO_MESSAGE_BYTES = 1 << 20
HANDSHAKE_SECONDS = 10.0
"""For all of a handshake, however it comes."""
_FRAME_SECONDS = 60.0
"""For all of a message, from its first byte."""
LEAD_TIMEOUT_SECONDS, NODE_TIMEOUT_SECONDS = 30, 150
"""Without a sign of the other host."""

Side = Literal["lead", "node"]
_OTHER: dict[Side, Side] = {"lead": "node", "node": "lead"}


class NotTrusted(Exception):
    """The other side could not show that it knows the token, or a message was not its own."""


class _Posted(NamedTuple):
    """See Frames.post."""

    messages: Iterable[dict[str, Any]]
    unsendable: Callable[[], object] | None = None


class Frames:
    """`send` and `post` from any thread, `receive` from one. `send` and `receive` raise OSError when the connection is
    gone.

    TLS works on memory here, beside the socket: one connection of OpenSSL must not be read and written at the same
    time, and a thread that waits in it for what comes would keep the others from sending.
    """

    def __init__(self, connection: socket.socket, token: str, side: Side) -> None:
        self._socket, self._side = connection, side
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context(token, side).wrap_bio(self._incoming, self._outgoing, server_side=side == "lead")
        self._using, self._sending, self._waiting = threading.Lock(), threading.Lock(), threading.Lock()
        self._outbox: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._come = bytearray()
        self._begun_at: float | None = None
        """When some of a message had come, for `take`."""
        self._broken, self._ended = "", False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def waiting(self) -> bool:
        """Whether a message has been taken from the socket already, or the end, which its readability does not show."""
        whole = len(self._come) >= _HEADER.size and len(self._come) - _HEADER.size >= _HEADER.unpack_from(self._come)[0]
        return bool(whole or self._broken or self._ended)

    def shake_hands(self, until: float) -> None:
        """until: monotonic seconds by which it must be done. Raises NotTrusted and OSError."""
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
                    self._socket.sendall(self._outgoing.read())  # the alert, which tells the other side
                raise NotTrusted(_why(error, self._side)) from None
        self._socket.sendall(self._outgoing.read())
        if self._tls.selected_alpn_protocol() != _PROTOCOL:
            raise NotTrusted(f"the other side {_MEANINGS['NO_APPLICATION_PROTOCOL']}")
        self._open()

    def send(self, message: dict[str, Any]) -> None:
        """Raises ValueError for one of more than MAX_MESSAGE_BYTES, and TypeError for what is no JSON."""
        text = json.dumps(message).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(text):,} bytes, at most {MAX_MESSAGE_BYTES:,} can be sent")
        self.write(_HEADER.pack(len(text)) + text)

    def write(self, data: bytes) -> None:
        """As it is, encrypted: a message with its size before it, or a part of one."""
        with self._sending:
            for begin in range(0, len(data), _PART_BYTES):
                with self._using:
                    self._tls.write(memoryview(data)[begin : begin + _PART_BYTES])
                    sealed = self._outgoing.read()
                self._socket.sendall(sealed)

    def open_outbox(self, name: str) -> None:
        """For `post`. name: of the thread that sends."""
        channel.follow(self._outbox.get, self._send_all, self._hang_up, name=name)

    def post(self, message: dict[str, Any], unsendable: Callable[[], object] | None = None) -> None:
        """As `send`, after what was posted before, and returns at once: a side that stands still, and reads nothing,
        holds nobody up. Where the connection is gone, `receive` says so. unsendable: called, in the thread that sends,
        if it can't be sent as it is; None: then the connection ends."""
        self._outbox.put(_Posted((message,), unsendable))

    def post_all(self, messages: Iterable[dict[str, Any]]) -> None:
        """As `post` of each. Taken from there when it is their turn."""
        self._outbox.put(_Posted(messages))

    def receive(self, until: float | None = None, *, most: int | None = None) -> dict[str, Any]:
        """until: monotonic seconds by which all of it must have come; None: it may begin whenever it does. most: bytes;
        None: MAX_MESSAGE_BYTES.

        Raises NotTrusted for a message that is too long, no JSON object, or not the other side's, and OSError for one
        that comes too slowly.
        """
        if not self._come:
            self._fill(1, until)
        until = time.monotonic() + _FRAME_SECONDS if until is None else until
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
        """As `receive`, without waiting; None: no message is there as a whole. To be asked again and again."""
        now = time.monotonic()
        try:
            message = self.receive(now)
        except TimeoutError:
            if not self._come:
                return None
            self._begun_at = now if self._begun_at is None else self._begun_at
            if now - self._begun_at > _FRAME_SECONDS:
                raise
            return None
        self._begun_at = None
        return message

    def close(self) -> None:
        """Also wakes threads that wait in `receive` and in `send`, and waits until they have left: what is opened next
        gets the number of this socket, and whoever had read the number would wait for that one, for good, or end it."""
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
            except Exception:  # before anything of it was sent
                if posted.unsendable is None:
                    raise
                traceback.print_exc()
                posted.unsendable()

    def _hang_up(self) -> None:
        with self._using, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _fill(self, size: int, until: float | None) -> None:
        """Takes what comes, until so many bytes of messages are there."""
        taken = 0
        while len(self._come) < size:
            if self._broken:
                raise NotTrusted(self._broken)
            if self._ended:
                raise ConnectionResetError("the other side has closed the connection")
            with self._waiting:
                part = _some(self._socket, until)
            # TLS adds little to a message. That it comes in time is not asked of what has come already: whoever has
            # been suspended finds it all there, and late.
            taken += len(part)
            if taken > 2 * size + _NO_MESSAGE_BYTES:
                raise NotTrusted("the other side sends what is no message")
            with self._using:
                self._incoming.write(part)
                self._open()
            until = time.monotonic() + _FRAME_SECONDS if until is None else until

    def _open(self) -> None:
        """Decrypts what is there; what has come before a break still counts."""
        try:
            while part := self._tls.read(_PART_BYTES):
                self._come += part
            self._ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._broken = _why(error, self._side)


def greet(connection: socket.socket, token: str, side: Side, until: float | None = None) -> Frames:
    """The handshake. until: monotonic seconds by which it must be done; None: in HANDSHAKE_SECONDS.

    A node learns only from the first message whether the lead takes its certificate.
    Raises NotTrusted, or OSError when the other side leaves, or says too little in that time."""
    connection.settimeout(HANDSHAKE_SECONDS)  # of what is sent, which is little
    frames = Frames(connection, token, side)
    frames.shake_hands(time.monotonic() + HANDSHAKE_SECONDS if until is None else until)
    connection.settimeout(None)
    _notice_loss(connection, side)
    return frames


def _notice_loss(connection: socket.socket, side: Side) -> None:
    """A host that is gone without a word breaks the connection; one that is suspended for as long as a silence is borne
    comes back to it. A launcher that stands still breaks nothing, as its host answers for it, until what it does not
    read has filled up: and a node, whose workers go on speaking, must bear that for as long as they bear each other.
    """
    timeout = LEAD_TIMEOUT_SECONDS if side == "lead" else NODE_TIMEOUT_SECONDS
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", 1000 * timeout)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def prepare(token: str) -> None:
    """For connections of both sides, from now on: what a node needs once its lead is gone it may not find room for
    then. Raises InputError where there is none now."""
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
    context.check_hostname = False  # whoever has the key is meant, wherever it runs
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([_PROTOCOL])
    if side == "lead":
        context.num_tickets = 0  # sessions are not resumed; and what becomes readable at a node is a message
    own, _ = _identities(token)[side]
    _, other = _identities(token)[_OTHER[side]]
    context.load_verify_locations(cadata=other)
    with tempfile.TemporaryDirectory() as folder:  # 0700; ssl reads a key from a file alone
        file = Path(folder, "identity.pem")
        file.write_bytes(own)
        context.load_cert_chain(file)
    return context


@cache
def _identities(token: str) -> dict[Side, tuple[bytes, bytes]]:
    """Of each side: its key and certificate (PEM), and the certificate alone (DER).

    Both are functions of the token alone: so are an Ed25519 key of given bytes, and its signatures (RFC 8032).
    scrypt takes 0.1 s and 32 MiB for each token that somebody wants to try on a certificate they have seen."""
    secret = hashlib.scrypt(token.encode(), salt=b"openrecycle nodes", n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32)
    return {side: _identity(secret, side) for side in _OTHER}


def _identity(secret: bytes, side: Side) -> tuple[bytes, bytes]:
    key = Ed25519PrivateKey.from_private_bytes(HKDFExpand(hashes.SHA256(), 32, side.encode()).derive(secret))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"openrecycle {side}")])
    subject = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime(1970, 1, 1, tzinfo=UTC))  # clocks of nodes may be wrong; the token has no end
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
    """At least a byte. until: monotonic seconds by which there must be any; a time-out of the socket itself would begin
    anew with each byte, and hold for what another thread sends."""
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


# What OpenSSL says, and what it means here, of the other side.
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
