"""Tells Streamlit's page where its server is, so that it need not find out by failing, and what it will draw with.

Opened at /schedule, it asks for /schedule/_stcore/health before /_stcore/health, and each miss is an
error in the browser's console. It takes `window.__streamlit.BACKEND_BASE_URL` instead where that is set.

It asks for the code that draws a chart, of which Plotly has 5 MB, when the first one has come. Named in the head,
that code is read and compiled beside the rest, and is there by then.

And it notes for the browser's developer tools when each run of a page began and ended, which the browser keeps as
long as the page is open: 170 MB in a week of one run a second. Once a minute they are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The address of each page but the first (app/ui/main.py).
PAGES = ("schedule", "planner", "compare", "catalog", "simulate", "help")

# What the first charts of a page are drawn with: the beginnings of the names of Streamlit's files.
VEGA, PLOTLY = ("ArrowVegaLiteChart.", "embed.", "vega-interpreter."), ("PlotlyChart.",)
CHARTS = {"": VEGA, "schedule": PLOTLY, "compare": PLOTLY, "catalog": PLOTLY, "simulate": PLOTLY}

_SCRIPT = (
    "<head><script>window.__streamlit={BACKEND_BASE_URL:location.origin+"
    f'location.pathname.replace(/\\/({"|".join(PAGES)})\\/?$/,"/")}};'
    "setInterval(()=>{performance.clearMarks();performance.clearMeasures()},6e4)</script>"
).encode()
_MAX_PAGE = 1 << 20
_CONDITIONS = (b"accept-encoding", b"if-none-match", b"if-modified-since", b"range")


class PageBase:
    """Around Streamlit's application: puts script and links into its HTML page, and nothing else.

    static: the folder that Streamlit's page is in; None: nothing is asked for ahead. on_page: called when a page is
    asked for, from the event loop, with its name in the address.
    """

    def __init__(
        self, app: ASGIApp, static: Path | None = None, on_page: Callable[[str], None] = lambda page: None
    ) -> None:
        self.app = app
        self._on_page = on_page
        self._ahead = {page: _links(static, wanted) for page, wanted in CHARTS.items()} if static else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or not _asks_for_page(scope):
            await self.app(scope, receive, send)
            return
        name = scope["path"].rstrip("/").rpartition("/")[2]
        self._on_page(name)
        # Whole, plain, and not from the browser's cache, which may hold it without the script.
        plain = [(name, value) for name, value in scope["headers"] if name not in _CONDITIONS]
        held: Message | None = None
        body = bytearray()

        async def with_script(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and _is_page(message):
                held = message
            elif held is None:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if message.get("more_body"):
                    return
                page = bytes(body).replace(b"<head>", _SCRIPT, 1)
                if ahead := self._ahead.get(name):
                    page = page.replace(b"</head>", ahead + b"</head>", 1)
                headers = MutableHeaders(scope=held)
                headers["content-length"] = str(len(page))
                del headers["etag"], headers["last-modified"]
                await send(held)
                await send({"type": "http.response.body", "body": page})

        await self.app({**scope, "headers": plain}, receive, with_script)


def _links(static: Path, wanted: tuple[str, ...]) -> bytes:
    found = (path.name for begin in wanted for path in (static / "static" / "js").glob(f"{begin}*.js"))
    link = '<link rel="modulepreload" crossorigin fetchpriority="low" href="./static/js/{}">'
    return "".join(map(link.format, found)).encode()


def _asks_for_page(scope: Scope) -> bool:
    return "text/html" in Headers(scope=scope).get("accept", "")


def _is_page(start: Message) -> bool:
    headers = Headers(scope=start)
    return (
        start["status"] == 200
        and headers.get("content-type", "").startswith("text/html")
        and "content-encoding" not in headers
        and int(headers.get("content-length", 0)) <= _MAX_PAGE
    )
