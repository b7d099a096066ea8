"""Tells Streamlit's page where its server is, so that it need not find out by failing, and what it will draw with.

Opened at /schedule, it asks for /schedule/_stcore/health before /_stcore/health, and each miss is an
error in the browser's console. It takes `window.__streamlit.BACKEND_BASE_URL` instead where that is set.

It asks for the code of each kind of element when the first one has come, and then for what that code needs. Named in
the head, all of it is read and compiled beside the rest, Plotly's 5 MB as well, and is there by then. Running that
takes most of a second, and where the page had not been painted before, it would be white for so long. So another module
stands before it, which waits for that. Where the first chart comes when somebody asks for it, that code is run as soon
as the page stands.

Sent with a page's first run, the console's style sheet would come after some of what it is for, which would be moved
by it. It is at the end of the page instead, behind Streamlit's own, which it overrides; so is the script that shows a
page from the top down.

And it notes for the browser's developer tools when each run of a page began and ended, which the browser keeps as
long as the page is open: 170 MB in a week of one run a second. Once a minute they are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The address of each page but the first (app/ui/main.py).
PAGES = ("schedule", "planner", "compare", "catalog", "simulate", "help")

# What a page's elements are drawn with, in the order in which they come: the beginnings of the names of Streamlit's
# files. What those import is found in them.
VEGA, PLOTLY, TABLE = ("ArrowVegaLiteChart.", "embed.", "vega-interpreter."), "PlotlyChart.", "DataFrame."
WAIT = "Spinner."
ELEMENTS = {
    "": ("Html.", "Button.", "ButtonGroup.", "Checkbox.", "TextInput.", *VEGA),
    "schedule": ("Html.", "Selectbox.", "ButtonGroup.", "Slider.", "BidiComponent.", PLOTLY, "PageLink.", TABLE, WAIT),
    "planner": ("Html.", "Button.", "Selectbox.", "NumberInput.", "Checkbox.", TABLE, PLOTLY),
    "compare": ("Html.", "Multiselect.", "Selectbox.", "ButtonGroup.", PLOTLY, TABLE, WAIT),
    "catalog": ("Html.", "Selectbox.", "NumberInput.", "Button.", PLOTLY, TABLE),
    "simulate": ("Html.", "Selectbox.", "NumberInput.", "Multiselect.", "Progress.", PLOTLY, TABLE),
    "help": ("Html.", "ButtonGroup."),
}
# Its charts come once something has been planned.
LATER = {"planner": PLOTLY}
# The name of what stands before Plotly's module, beside that.
WAITS = "chart_waits.js"

_HEAD = (
    "<head><script>window.__streamlit={BACKEND_BASE_URL:location.origin+"
    f'location.pathname.replace(/\\/({"|".join(PAGES)})\\/?$/,"/")}};'
    "setInterval(()=>{performance.clearMarks();performance.clearMeasures()},6e4)</script>"
).encode()
_ASSETS = Path(__file__).parents[1] / "ui" / "assets"
_STYLE = (
    f"<style>{(_ASSETS / 'console.css').read_text(encoding='utf-8')}</style>"
    f"<script>{(_ASSETS / 'order.js').read_text(encoding='utf-8')}</script>"
).encode()
_RUN = (
    """<script type="module">const stands='[data-test-script-state="notRunning"] h1',"""
    'run=()=>import("./static/js/{}").catch(()=>{{}}),'
    "ahead=()=>setTimeout(document.querySelector(stands)?()=>(window.requestIdleCallback??setTimeout)(run):ahead,50);"
    "ahead()</script>"
)
# Before all that loads a module. It holds for whoever asks for that module but for what stands before it.
_BEFORE = (
    '<script type="importmap">{{"imports":{{"./static/js/{0}":"./static/js/{1}"}},'
    '"scopes":{{"./static/js/{1}":{{"./static/js/{0}":"./static/js/{0}"}}}}}}</script>'
)
_EXPORTS = re.compile(r"export\s*\{([^{}]*)\};?\s*$")
_MAX_PAGE = 1 << 20
# The imports are at the beginning of a file.
_IMPORTS = 8192
_IMPORT = re.compile(r'(?:from|import)\s*"\./([\w.-]+\.js)"')
_CONDITIONS = (b"accept-encoding", b"if-none-match", b"if-modified-since", b"range")


class PageBase:
    """Around Streamlit's application: puts script, style and links into its HTML page, and nothing else.

    static: the folder that Streamlit's page is in; None: nothing is asked for ahead. on_page: called when a page is
    asked for, from the event loop, with its name in the address.
    """

    def __init__(
        self, app: ASGIApp, static: Path | None = None, on_page: Callable[[str], None] = lambda page: None
    ) -> None:
        self.app = app
        self._on_page = on_page
        chart = next((static / "static" / "js").glob(f"{PLOTLY}*.js"), None) if static else None
        self._waits = _waits(chart) if chart else None
        self._map = _BEFORE.format(chart.name, WAITS).encode() if chart and self._waits else b""
        self._ahead = _links(static, WAITS if self._waits else "") if static else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] == "GET"
        if asks and self._waits and scope["path"].endswith(f"/static/js/{WAITS}"):
            await Response(self._waits, 200, {"Cache-Control": "no-cache"}, "text/javascript")(scope, receive, send)
            return
        if not asks or not _asks_for_page(scope):
            await self.app(scope, receive, send)
            return
        name = scope["path"].rstrip("/").rpartition("/")[2]
        self._on_page(name)
        # Whole, plain, and not from the browser's cache, which may hold it without that.
        plain = [(name, value) for name, value in scope["headers"] if name not in _CONDITIONS]
        held: Message | None = None
        body = bytearray()

        async def with_head(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and _is_page(message):
                held = message
            elif held is None:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if message.get("more_body"):
                    return
                page = bytes(body).replace(b"<head>", _HEAD + self._map, 1).replace(b"</body>", _STYLE + b"</body>", 1)
                if ahead := self._ahead.get(name):
                    page = page.replace(b"</head>", ahead + b"</head>", 1)
                headers = MutableHeaders(scope=held)
                headers["content-length"] = str(len(page))
                del headers["etag"], headers["last-modified"]
                await send(held)
                await send({"type": "http.response.body", "body": page})

        await self.app({**scope, "headers": plain}, receive, with_head)


def _links(static: Path, waits: str) -> dict[str, bytes]:
    """For each page the links to what it needs beyond what Streamlit's own page names. waits: what stands before
    Plotly's module, if anything does."""
    folder = static / "static" / "js"
    names = sorted(path.name for path in folder.glob("*.js"))
    try:
        own = set(re.findall(r"static/js/([\w.-]+\.js)", (static / "index.html").read_text()))
    except OSError:
        own = set()

    @cache
    def imports(name: str) -> tuple[str, ...]:
        with (folder / name).open(encoding="utf-8", errors="replace") as file:
            return tuple(found for found in _IMPORT.findall(file.read(_IMPORTS)) if (folder / found).is_file())

    def needed(wanted: tuple[str, ...]) -> Iterator[str]:
        seen, queue = set(own), [name for begin in wanted for name in names if name.startswith(begin)]
        while queue:
            name = queue.pop(0)
            if name not in seen:
                seen.add(name)
                yield name
                queue = [*imports(name), *queue]

    def before(wanted: tuple[str, ...]) -> list[str]:
        return [waits] if waits and PLOTLY in wanted else []

    link = '<link rel="modulepreload" crossorigin fetchpriority="low" href="./static/js/{}">'
    run = {page: _RUN.format(name) for page, begin in LATER.items() for name in names if name.startswith(begin)}
    return {
        page: ("".join(map(link.format, [*before(wanted), *needed(wanted)])) + run.get(page, "")).encode()
        for page, wanted in ELEMENTS.items()
    }


def _waits(module: Path) -> bytes | None:
    """What stands before `module`, and gives what that gives; None where it can't be told what that is."""
    found = _EXPORTS.search(module.read_text(encoding="utf-8", errors="replace")[-_IMPORTS:])
    if found is None:
        return None
    names = [each.split(" as ")[-1].strip() for each in found[1].split(",")]
    gives = "".join(
        "export default whole.default;" if name == "default" else f"export const {name} = whole.{name};"
        for name in names
    )
    first = (_ASSETS / WAITS).read_text(encoding="utf-8")
    return f'{first}const whole = await import("./{module.name}");{gives}\n'.encode()


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
