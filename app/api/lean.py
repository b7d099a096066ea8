"""Endpoints of what comes thousands of times a second, as plain ASGI: a heartbeat, an acknowledgement, and the
long-poll for the next deployment. What is not as usual goes to FastAPI, which has them all, and says what is wrong.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Awaitable, Callable
from functools import partial

import orjson
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from openrecycle.agent.protocol import Acknowledgement, Deployment, Heartbeat
from openrecycle.app.api import problems
from openrecycle.app.api.intake import Intake
from openrecycle.app.api.lane import PASS, Headers
from openrecycle.app.api.replay import replayed
from openrecycle.app.console import Console
from openrecycle.app.errors import ConsoleError

_JSON = (b"content-type", b"application/json")
_QUERY = re.compile(rb"after=(\d{1,15})(?:&wait=(\d{1,2}(?:\.\d{1,6})?))?")
_GZIP = re.compile(rb"\bgzip\b(?! *; *q *= *0(?:\.0*)?(?:,|$))", re.IGNORECASE)
LONGEST_WAIT = 60.0

Taken = Callable[[str, Scope, bytes], Awaitable[bytes | None]]
# Worth compressing once for all who ask: a deployment of 8,192 workers is 100 kB, and they all ask at once.
LARGE_BYTES = 2048


class Gzipped(bytes):
    """An answer that is compressed."""


class Lean:
    """take: the answer's JSON, None for an empty 204; raises ConsoleError or ValidationError. other: answers what
    is not as usual; the body goes to it anew. at_once: `take` where that waits for nothing, as an ordinary function."""

    def __init__(self, take: Taken, other: ASGIApp, at_once: Callable[[str, bytes], bytes] | None = None) -> None:
        self._take, self._other, self._at_once = take, other, at_once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        odd = scope["method"] == "HEAD" or (scope["method"] == "POST" and scope["query_string"])
        if odd or any(name == b"idempotency-key" for name, _ in scope["headers"]):
            await self._other(scope, receive, send)
            return
        job_id = scope["path_params"]["job_id"]
        status = await self._answer(job_id, scope, receive, send, (), self._other)
        if status in (200, 204) and PASS in scope:
            scope[PASS].answer = partial(self._answer, job_id)
            scope[PASS].at_once = self._at_once and partial(self._at_once, job_id)

    async def _answer(
        self, job_id: str, scope: Scope, receive: Receive, send: Send, headers: Headers, other: ASGIApp
    ) -> int:
        """The status; 0 where `other` has answered."""
        body = b""
        if scope["method"] == "POST":
            message = await receive()
            body = message.get("body", b"")
            while message.get("more_body", False):
                message = await receive()
                body += message.get("body", b"")
        try:
            answer = await self._take(job_id, scope, body)
        except ConsoleError as error:
            again = {"Retry-After": "1"} if error.status == 503 else None
            refused = problems.problem(error.status, error.code, error.detail, again)
            refused.raw_headers += headers
            await refused(scope, receive, send)
            return error.status
        except (ValidationError, Unusual):
            await other(scope, replayed(body, receive), send)
            return 0
        status = 200 if answer else 204
        about = [_JSON, (b"content-length", b"%d" % len(answer)), *headers] if answer else [*headers]
        if isinstance(answer, Gzipped):
            about += ((b"content-encoding", b"gzip"), (b"vary", b"accept-encoding"))
        await send({"type": "http.response.start", "status": status, "headers": about})
        await send({"type": "http.response.body", "body": answer or b""})
        return status


class Unusual(Exception):
    """Right or wrong, but nothing that agents send."""


class AgentEndpoints:
    """Of one console. intake: what FastAPI's routes use, too."""

    def __init__(self, console: Console, intake: Intake) -> None:
        self._console, self._intake = console, intake
        # By job: thousands of workers ask for the same.
        self._rendered: dict[str, tuple[Deployment, bytes, bytes]] = {}

    async def heartbeat(self, job_id: str, scope: Scope, body: bytes) -> bytes:
        return self.heartbeat_at_once(job_id, body)

    def heartbeat_at_once(self, job_id: str, body: bytes) -> bytes:
        """Touches no database and waits for nothing."""
        beat = Heartbeat.model_validate_json(body)
        # A field that is there twice, or a text with a colon in it: whoever looks closer says which.
        if body.count(b":") != len(beat.model_fields_set) + len(beat.op_milliseconds):
            raise Unusual
        generation = self._console.heartbeat(job_id, beat)
        wanted = self._console.measuring.wanted(job_id)
        return (
            b'{"generation":%d}' % generation
            if wanted is None
            else b'{"generation":%d,"measure":%d}' % (generation, wanted)
        )

    async def acknowledge(self, job_id: str, scope: Scope, body: bytes) -> bytes:
        message = Acknowledgement.model_validate_json(body)
        if body.count(b":") != len(message.model_fields_set):
            raise Unusual
        reason = await self._intake.take(*self._console.acknowledgement(job_id, message))
        return orjson.dumps({"reason": reason})

    async def deployment(self, job_id: str, scope: Scope, body: bytes) -> bytes | None:
        asked = _QUERY.fullmatch(scope["query_string"])
        if asked is None or float(asked[2] or 0) > LONGEST_WAIT:
            raise Unusual
        small = any(name == b"accept-encoding" and _GZIP.search(value) for name, value in scope["headers"])
        return await self.next_deployment(job_id, int(asked[1]), float(asked[2] or 0), small=small)

    async def next_deployment(self, job_id: str, after: int, wait: float, *, small: bool = False) -> bytes | None:
        """The newest deployment with a generation above `after`, as soon as there is one; None: none in `wait` seconds,
        or in less where many wait.
        small: compressed, where that is worth it.

        Raises ConsoleError.
        """
        topic = self._console.job(job_id).generation_topic
        found = await topic.wait_for(lambda: self._console.deployment(job_id, after), wait)
        if found is None:
            return None
        rendered = self._rendered.get(job_id)
        if rendered is None or rendered[0] is not found:
            plain = found.model_dump_json().encode()
            packed = plain if len(plain) < LARGE_BYTES else Gzipped(gzip.compress(plain, 6, mtime=0))
            rendered = self._rendered[job_id] = found, plain, packed
        _, plain, packed = rendered
        return packed if small else plain
