"""A POST with an Idempotency-Key is done once: a client that sends it again gets the answer of the first.

Keys and answers are in the database, so that this also works across a restart of the console, which is when requests
are sent again. Some paths keep no keys here: POST /jobs keeps its key with the job, as long as that exists; heartbeats
may come twice; an imported history never replaces another job; a plan or a filling of a catalog that is being made is
in the memory of one process, so the answer of that process would name what a later one does not have (equal requests
share one anyway); and the answer of POST /tokens is a secret, which is stored nowhere.
"""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.agent.messages.protocol import API
from openrecycle.app.runtime.errors import ConsoleError, storing
from openrecycle.app.runtime.problems import AGAIN, answered
from openrecycle.app.runtime.runner import in_thread
from openrecycle.app.security.access import ACTOR, CALLER, from_header
from openrecycle.app.security.guard import replayed
from openrecycle.db.access import KEPT_SECONDS, Earlier, IdempotentRequests

HEADER = "Idempotency-Key"
MOST_CHARACTERS = 255
# Seconds after which a request that was never answered may be done again, unless this console is still doing it. If
# its console ended between the effect and the answer, which are transactions of their own, it is done twice.
STALE = 120.0
# No request with an effect has a larger answer.
MOST_BYTES = 1 << 20
_WITHOUT_KEYS = "/jobs", "/tokens", "/solves", "/catalogs"


def keeps_keys(path: str) -> bool:
    """Says whether POST requests to a path have their keys kept here. path: of a request or as in the OpenAPI document,
    below /api/v1."""
    return path not in _WITHOUT_KEYS and not path.endswith("/heartbeats")


class Idempotency:
    """ASGI middleware around FastAPI that handles Idempotency-Key."""

    def __init__(self, app: ASGIApp, requests: IdempotentRequests) -> None:
        self.app, self.requests = app, requests
        self._doing = set[str]()
        """The keys of the requests that this console is doing, however long they take."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(HEADER) if scope["type"] == "http" and scope["method"] == "POST" else None
        if given is None or not keeps_keys(scope["path"].removeprefix(API)):
            await self.app(scope, receive, send)
            return
        if not (1 <= len(given) <= MOST_CHARACTERS and given.isascii() and given.isprintable()):
            said = f"got {given[:80]!r}, expected 1 to {MOST_CHARACTERS} printable ASCII characters"
            await answered(ConsoleError(422, "invalid", said, field=HEADER))(scope, receive, send)
            return
        body = await Request(scope, receive).body()  # bounded by the guard before
        headers = Headers(scope=scope)
        caller = headers.get(CALLER)
        asks = from_header(caller).key if caller else ""  # not the name, which two tokens may share
        key = _digest(scope["path"], asks, headers.get(ACTOR, ""), given)
        try:
            stale = KEPT_SECONDS if key in self._doing else STALE
            earlier = await in_thread(self._begin, key, scope, body, stale)
        except ConsoleError as error:
            await answered(error, AGAIN)(scope, receive, send)
            return
        if earlier is not None:
            await _replay(earlier, given)(scope, receive, send)
            return
        self._doing.add(key)
        try:
            await self._first(scope, body, receive, send, key)
        finally:
            self._doing.discard(key)

    def _begin(self, key: str, scope: Scope, body: bytes, stale: float) -> Earlier | None:
        request = _digest(scope["query_string"], body)  # may be megabytes, so this runs outside of the event loop
        with storing():
            earlier = self.requests.begin(key, request, stale=stale)
        if earlier is not None and earlier.request != request:
            raise ConsoleError(
                409, "idempotency_conflict", "it was used for another request to this path", field=HEADER
            )
        return earlier

    async def _first(self, scope: Scope, body: bytes, receive: Receive, send: Send, key: str) -> None:
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        kept = False
        try:
            await self.app(scope, replayed(body, receive), keep)
            answer = b"".join(m.get("body", b"") for m in messages if m["type"] == "http.response.body")
            status = messages[0]["status"]
            if status < 500 and status != 429 and len(answer) <= MOST_BYTES:
                headers = Headers(raw=messages[0]["headers"])
                media, location = headers.get("content-type", ""), headers.get("location", "")
                with storing():
                    await in_thread(self.requests.answered, key, status, media, location, answer)
                kept = True
        except ConsoleError:
            pass  # the request was done, but its answer can't be kept; if it comes again, it is done again
        finally:
            if not kept:
                await in_thread(self._forget, key)
            for message in messages:  # also if a handler failed: its error is answered first, and raised after that
                await send(message)

    def _forget(self, key: str) -> None:
        try:
            with storing():
                self.requests.forget(key)
        except ConsoleError:
            pass  # it becomes stale


def _replay(earlier: Earlier, key: str) -> Response:
    if earlier.status == 0:
        said = f"the request with {key!r} is being done; ask again for its answer"
        return answered(ConsoleError(409, "in_progress", said, field=HEADER), AGAIN)
    headers = {"Idempotent-Replayed": "true"}
    for name, value in (("Content-Type", earlier.media_type), ("Location", earlier.location)):
        if value:
            headers[name] = value
    return Response(earlier.body, earlier.status, headers)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
