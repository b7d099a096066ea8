"""The one request that comes thousands of times a second: a plain ASGI application, with no more around it
than the guards."""

from __future__ import annotations

from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from agent.protocol import Heartbeat
from app.api import problems
from app.console import Console
from app.errors import ConsoleError

_JSON = (b"content-type", b"application/json")


class HeartbeatEndpoint:
    """POST .../jobs/{job_id}/heartbeats. Touches no database and waits for nothing but the body."""

    def __init__(self, console: Console) -> None:
        self.console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job_id = scope["path_params"]["job_id"]
        message = await receive()
        body = message.get("body", b"")
        while message.get("more_body", False):
            message = await receive()
            body += message.get("body", b"")
        try:
            epoch = self.console.heartbeat(job_id, Heartbeat.model_validate_json(body))
        except ValidationError as error:
            refused = problems.validation_problem(error.errors(include_url=False))  # type: ignore[arg-type]
            await refused(scope, receive, send)
            return
        except ConsoleError as error:
            await problems.problem(error.status, error.code, error.detail)(scope, receive, send)
            return
        wanted = self.console.measuring.wanted(job_id)
        answer = b'{"epoch":%d}' % epoch if wanted is None else b'{"epoch":%d,"measure":%d}' % (epoch, wanted)
        length = (b"content-length", b"%d" % len(answer))
        await send({"type": "http.response.start", "status": 200, "headers": [_JSON, length]})
        await send({"type": "http.response.body", "body": answer})
