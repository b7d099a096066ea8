"""Answers the heartbeats of thousands of workers where they come in, before anything is made of them.

To find out what a request is costs three times what a heartbeat does itself: parser, task, scope, events. A heartbeat
is the same bytes as the one before it but for its body; so when the Lane has let one through, the next that begins
with the same bytes, over a connection from the same address, is answered from here with what the Lane has learned of
it. Whatever is not exactly one such request, or not as usual, goes the ordinary way.
"""

from __future__ import annotations

import asyncio
import re
import time

from pydantic import ValidationError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.api.crowd import PATIENCE, Crowd
from app.api.lane import RAW, Lane, Raw
from app.errors import ConsoleError

_LENGTH = b"\r\nContent-Length: "
_END = b"\r\n\r\n"
_DIGITS = 5
# What asks for more than an answer.
_OTHER = re.compile(rb"\r\n(?:connection *:(?! *keep-alive\r)|expect|upgrade|transfer-encoding)", re.IGNORECASE)


class ExpressProtocol(HttpToolsProtocol):
    """One connection. lane, crowd: set by `express`."""

    lane: Lane
    crowd: Crowd
    _refused = False
    _in_message = False  # has the parser had a part of a request?
    _raw: Raw | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.crowd.admits(len(self.connections)):
            return
        self._refused = True
        if self.crowd.hopeless(len(self.connections)):
            transport.close()
        else:
            self.loop.call_later(PATIENCE, transport.close)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            if not self.transport.is_closing():
                self.transport.write(self.crowd.answer)
                self.transport.close()
            return
        if not self._in_message and data.startswith(b"POST /api/") and (parts := _whole(data)):
            head, rest, body = parts
            raw = (head, rest, self.scheme, self.client and self.client[0])
            if self._answered(raw, body):
                return
            self._raw = raw if b" HTTP/1.1\r\n" in head and not _OTHER.search(head + rest) else None
        super().data_received(data)
        self._raw = None

    def _answered(self, raw: Raw, body: bytes) -> bool:
        known = self.lane.express.get(raw)
        if known is None or known.at_once is None or self.flow.write_paused:
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        if not all(still() for still in known.still):
            return False
        began = time.perf_counter()
        try:
            answer = known.at_once(body)
        except (ConsoleError, ValidationError):
            return False  # nothing has come of it: said once more, it is refused with all due words
        head = [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d" % len(answer)]
        head += [b"%b: %b" % header for header in (*known.headers, *self.server_state.default_headers)]
        self.transport.write(b"\r\n".join(head) + _END + answer)
        if known.meter is not None:
            known.meter(200, time.perf_counter() - began)
        self._unset_keepalive_if_required()
        self.on_response_complete()
        return True

    def on_message_begin(self) -> None:
        self._in_message = True
        super().on_message_begin()
        if self._raw is not None:
            self.scope[RAW] = self._raw  # type: ignore[literal-required]

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()


def express(lane: Lane) -> type[ExpressProtocol]:
    """The protocol of an application with this lane, for uvicorn's `http`; after app.process.prepare."""
    return type("Express", (ExpressProtocol,), {"lane": lane, "crowd": Crowd.of_process()})


def _whole(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """A request's head up to the value of its Content-Length, what follows of the head, and the body; None: it is not
    exactly one request."""
    at = data.find(_LENGTH)
    end = data.find(_END)
    if at < 0 or end < at:
        return None
    at += len(_LENGTH)
    over = data.find(b"\r", at, at + _DIGITS + 1)
    value = data[at:over]
    if over < 0 or not value.isdigit() or len(data) != end + len(_END) + int(value):
        return None
    return data[:at], data[over:end], data[end + len(_END) :]
