"""All that changes how Python and Streamlit work in a console, beyond what they offer as options. One file, so that a
new release of theirs is checked in one place: `python -m tests.benchmarks.bench_patches` prints what each gives, and
what gives nothing any more goes. What is changed elsewhere is listed below.

Measured on two cores with Python 3.11 and Streamlit 1.67; under load is with 2,048 workers and one viewer of Live:

- Threads are switched sooner. Under load a batch of heartbeats is answered within 13 ms (p99), else 29 ms.
  Not needed where the event loop has a processor's lock to itself (free-threaded Python).
- As many open files as the system allows: each worker's launcher has a connection or two.
- What multiprocessing spawns does not import `__main__`. Else it runs the page that Streamlit has put there, and fails.
  Not needed once Streamlit leaves `__main__` alone: tests/app/test_children.py says so.
- Rounds of garbage collection are made rarely. Under load 13 ms (p99) and 0.41 cores, else 133 ms and 0.50.
  (`runner.postScriptGC`, an option of Streamlit's, is off for the same: 107 ms with it.)
- Streamlit's page is told in its head where its server is and what it will draw with. A schedule is seen 1.6 s after
  its page is opened for the first time, else 2.8 s; without the address the browser notes an error for each page.
  tests/app/test_frontend.py fails where Streamlit's page or its files are not what this expects; then nothing is added.
- Streamlit's files are sent in one piece. To open a page for the first time takes the console 0.19 s of processor time,
  else 0.29 s; where other programs keep both cores busy (load 22 to 53), its picture is seen after 2.8 s, else 5.4 s.

What else changes the platform, or uses private names of it, where, and for which version. Most of it is there to be
right, not to be fast: then "Else" says what would be wrong. tests/app/test_import_walls.py refuses what is not listed.

openrecycle.fork_server     Python 3.11 (multiprocessing's fork server: `os.fork`, `gc.disable`, `gc.freeze`,
                            `sys._getframe`)
    Gives: no garbage collection while the server imports, and what it has imported is frozen: 0.3 s of processor time
    and 150 MB for each worker. A fork that fails does not end the server.
    Not needed once tests/agent/test_fork_server.py passes without it.
openrecycle.forking         Python 3.11 (multiprocessing's fork server: `_forkserver`, `_forkserver_pid`,
                            `_forkserver_authkey`)
    Gives: of two threads that wait for a process both see its exit status; a forked process uses the server it is from.
    Else the second is told 255, and a forked process starts a server of its own.
    Not needed once tests/app/test_children.py (all who wait see it end) and test_fork_server.py pass without it.
openrecycle.scratch         Python 3.11 (`_config` of the current process: where multiprocessing puts its sockets)
    Gives: what a killed process leaves is removed by the next one. Else it stays, and fills the disk.
    Not needed once multiprocessing takes a folder in public; tests/agent/test_fork_server.py fails where it changes.
openrecycle.cli             Python 3.11 (`gc.set_threshold` for every command; `gc.freeze` when it ends)
    Gives: torch is imported in five sixths of the time; a command that has imported it ends after 0.15 s of processor
    time, else 0.65 s.
    Not needed once `python -m tests.benchmarks.bench_start` is as fast without the first, and Python makes no
    collection when it ends.
planner.output              Typer 0.29 (the base of its errors by name; how an option reads a number)
    Gives: a wrong command line is one sentence, and a number is digits. Else it is a box of several lines or a
    traceback, and 1_000 and digits of other scripts are numbers.
    Not needed once Typer exports that base, and refuses such numbers: tests/app/test_command_lines.py is to pass.
agent.messages.client       Python 3.11 (`sys.stdout` and `sys.stderr`, while code of users is called)
agent.workers.worker        Python 3.11 (`sys.stdout` and `sys.stderr`, as long as the worker runs)
    Gives: printing raises nothing where output is closed or full, and a console gets what workers print. Else the
    user's code fails where it prints, and its micro-batch is blamed.
    Not needed once Python has a stream that drops what it can't write; tests/agent/test_log_tail.py.
agent.workers.worker        glibc (`mallopt`)
    Gives: freed memory is kept for the next step. Else it is taken page by page, a fifth of an iteration.
    Not needed once an iteration of `python -m tests.benchmarks.bench_sums` is as fast without it.
agent.transport.communicator  Linux (`resource.setrlimit`)
    Gives: the store of a generation has as many open files as the system allows. Else some hundred workers, which have
    several connections each, can't form where a process may have 1,024.
    Not needed where systems allow more without being asked.
app.runtime.processes       Linux (`resource.setrlimit`, in child processes that read what people send)
    Gives: a document that would take too much memory is refused. Else the system ends some process of its choice.
    Not needed once parsers have such a limit: tests/app/test_children.py.
app.server                  Streamlit 1.67 (`config._main_script_path`)
    Gives: app/.streamlit/config.toml is read, before st.App is made, which would look beside app/ui/main.py for it.
    Else pages have Streamlit's colours.
    Not needed once tests/app/test_frontend.py (pages have the console's theme) passes without it.
app.server                  Streamlit 1.67 (reads the cookie of its login, `_get_signed_cookie_with_chunks`, and makes
                            the token that starts one)
    Gives: the guard knows who asks before a page's WebSocket is open. Else it could refuse nobody.
    Not needed once Streamlit has public functions for both; tests/app/test_oidc.py fails where the private ones change.
app/ui/assets/history.js    Streamlit 1.67 (`history.pushState` of the browser)
    Gives: one entry of the browser's history for what a person does. Else *Back* must be pressed up to four times, and
    comes to a page with another page's address.
    Not needed once Streamlit can change an address without a new entry: tests/browser/test_order.py.
app.api.connection          uvicorn 0.54 (a subclass of its protocol over httptools, given by its option `http`, and of
                            that of WebSockets; `_unset_keepalive_if_required`)
    Gives: limits on connections, heads, time, and answers that nobody reads. Else a stranger can take them all.
    Not needed once uvicorn has options for them: tests/app/test_connection.py and test_connection_limit.py say which.
app.plans.files             Python 3.11 (`gc.disable`, in the process that reads one uploaded plan and ends)
    Gives: a plan of 7 MB is read in 1.0 s of processor time, else 1.5 s.
    Not needed once a round of garbage collection passes over what older rounds have seen.
app.observing.history       Python 3.11 (`zipfile._EndRecData`)
    Gives: how large a zip file's directory is, found as ZipFile finds it, before it reads it. Else each megabyte of it
    takes ZipFile 10 MB of memory and 0.2 s of processor time, without a limit.
    Not needed once ZipFile has a limit for that; tests/app/test_history.py fails where the private function changes.
agent.monitoring.liveness   Python 3.11 (`sys._current_frames`, documented, yet of CPython alone)
    Gives: of a worker that hangs it is said where each of its threads is. Else nobody could say why it hangs.
    Not needed once Python has it for all interpreters; tests/agent/test_hanging.py fails where it changes.
agent.jobs.trainer          Python 3.11 (`_inheriting` of a process that multiprocessing starts)
    Gives: a script that begins to train when a worker imports it is refused in one sentence. Else each worker would
    begin a job of its own.
    Not needed once multiprocessing says in public that a process is importing its parent's script;
    tests/agent/test_resilient_trainer.py fails where it changes.
agent.models.hugging_face   transformers 5 (`_from_config`, `_init_weights`, `_can_record_outputs`)
    Gives: a model is cut without memory for it, its buffers have their values, and its routers are found. There is no
    other way to any of them.
    Not needed once transformers has public names for them; tests/agent/test_from_transformers.py fails where they
    change.

The private names of torch are in agent.models.compat.
"""

from __future__ import annotations

import contextlib
import gc
import mimetypes
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrecycle.agent.messages.protocol import resident_bytes

if TYPE_CHECKING:  # child processes, which import this, have no use for a web framework
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# -- Python: threads and files --------------------------------------------------------------------

# How long a thread that computes (a page's script, a large view) keeps the others waiting: the event loop
# waits so long twice or more per request. Python's own 5 ms would be most of a heartbeat's latency.
SWITCH_SECONDS = 0.0003


def tune_process() -> None:
    """Sets limits for the whole process; called once, before anything is served."""
    sys.setswitchinterval(SWITCH_SECONDS)
    # A worker has a connection or two, and many systems allow a process 1,024 files unless it asks for more.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it says
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- Python: multiprocessing ----------------------------------------------------------------------

_PAGES = str(Path(__file__).resolve().parents[1] / "ui")
_original = spawn.get_preparation_data


@wraps(_original)
def _without_pages(name: str) -> dict[str, Any]:
    data = dict(_original(name))
    data.pop("init_main_from_name", None)
    data.pop("init_main_from_path", None)
    data["sys_path"] = [path for path in data["sys_path"] if path != _PAGES]
    return data


def begin_without_pages() -> None:
    """Keeps Streamlit's pages out of all processes that this one spawns from now on. A second call does nothing.

    multiprocessing has a spawned child import its parent's `__main__`, in case the work was defined there, and gives it
    the parent's import path. The console's work is never defined there. But Streamlit puts the page that runs at that
    moment in the place of `__main__`, and the page's folder first in the path. The child would run the whole page, and
    find pages where it looks for packages (app/ui/planner.py).
    """
    spawn.get_preparation_data = _without_pages


# -- Python: garbage collection -------------------------------------------------------------------
#
# When cyclic garbage is searched for, and which objects are left out of the search.
#
# A console holds millions of objects: some hundred for each worker of a large job. Python begins a round whenever the
# number of objects has grown by some amount, over the young objects or over all. But each heartbeat replaces another,
# so with thousands of workers most live objects are young: rounds took half of the processor's time and up to 0.5 s
# each, in which no heartbeat is answered. So `GarbageCollection` makes the rounds of the console's process, rarely.
# (Streamlit's rounds, after every run of a script, so also after each refresh of each viewer's page, are off: see
# app.server.)

# Seconds between two whole rounds, and between two rounds over the objects that are new since the last one of either
# kind. A round over new objects leaves them out from then on: cycles among them are found by the next whole round.
WHOLE_SECONDS, NEW_SECONDS = 900.0, 60.0
# Each kind takes at most this share of the time: a whole round in a console of 8,192 workers takes a second.
SHARE = 0.001
# A round over new objects comes sooner if there are this many more objects, or this many more bytes are held.
NEW_OBJECTS, NEW_BYTES = 200_000, 256 * 2**20
# A whole round comes sooner if memory has grown this much since the last one, but at least GROWN_SECONDS after it:
# memory keeps growing while a large job's workers register.
GROWTH, GROWN_BYTES, GROWN_SECONDS = 1.25, 64 * 2**20, 300.0
LOOK_SECONDS = 1.0


class GarbageCollection:
    """Makes the garbage collection rounds of this process in place of Python, in a thread, from `start` to `close`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_house, name="house-keeping", daemon=True)

    def start(self) -> None:
        gc.disable()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        gc.enable()

    def _keep_house(self) -> None:
        whole = new = timed(whole=False)  # not whole: objects of the server that this was forked from stay left out
        while not self._stop.wait(LOOK_SECONDS):
            more = gc.get_count()[0]
            which = due(time.monotonic(), new, whole, more, resident_bytes())
            if which is not None:
                new = timed(new.kept_out + more, whole=which)
                whole = new if which else whole


@dataclass(frozen=True)
class Round:
    """A round of garbage collection. at: when it ended, in monotonic seconds. took: seconds of processor time; on a
    busy machine a round lasts many times as long, which must not delay the next one. held: bytes that the process held
    then. kept_out: about how many objects are left out until the next whole round."""

    at: float
    took: float
    held: int
    kept_out: int = 0


def timed(kept_out: int = 0, *, whole: bool) -> Round:
    """Makes a round and measures it. kept_out: for a round that is not whole, the result's `kept_out`."""
    began = time.thread_time()
    held = make_round(whole=whole)
    took = time.thread_time() - began
    # Counting the objects takes as long as a part of the round, so it is done for whole ones only.
    return Round(time.monotonic(), took, held, gc.get_freeze_count() if whole else kept_out)


def due(now: float, last: Round, last_whole: Round, more: int, resident: int) -> bool | None:
    """Says whether to make a round now: True, a whole one; False, one over new objects; None, none.

    last: the last round of either kind. more: how many objects there are more than then; resident: bytes that the
    process holds now.
    """
    since = now - last_whole.at
    grown = resident > GROWTH * last_whole.held + GROWN_BYTES
    if since >= (GROWN_SECONDS if grown else max(WHOLE_SECONDS, last_whole.took / SHARE)):
        return True
    much = more >= max(NEW_OBJECTS, last.kept_out / 4) or resident > GROWTH * last.held + NEW_BYTES
    return False if much or now - last.at >= max(NEW_SECONDS, last.took / SHARE) else None


def make_round(*, whole: bool) -> int:
    """Collects garbage among new objects, or among all, and leaves the live ones out from then on. Returns the bytes
    that the process then holds."""
    if whole:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    return resident_bytes()


# -- Streamlit: its page --------------------------------------------------------------------------
#
# Tells Streamlit's page where its server is, so that it need not find out by trying, and which code it will need.
#
# Opened at /schedule, the page asks for /schedule/_stcore/health before /_stcore/health, and each miss is an
# error in the browser's console. It takes `window.__streamlit.BACKEND_BASE_URL` instead if that is set.
#
# The page asks for the code of a kind of element when the first one has come, and then for the modules which that code
# imports. If the page's head names them all, they are read and compiled beside the rest, Plotly's 5 MB as well, and are
# there in time. But running Plotly takes most of a second, for which a page that has not been painted would stay white.
# So another module (chart_waits.js) stands in its place, which waits for the paint and then loads it. On pages where
# the first chart comes only when somebody asks for it, Plotly is run as soon as the page stands.
#
# If the console's style sheet came with a page's first run, it would come after some of the elements and move them. So
# it is at the end of the page, behind Streamlit's own, which it overrides. So are the scripts that show a page from the
# top down, and that keep out of the browser's history what nobody did.
#
# Streamlit notes for the browser's developer tools when each run of a page began and ended, and the browser keeps these
# notes as long as the page is open: 170 MB in a week of one run a second. They are dropped once a minute.

# The name of the page without one in its address, and those of the others (app/ui/main.py).
FIRST = "live"
PAGES = ("schedule", "planner", "compare", "catalog", "simulate", "help")

# The code that draws a page's elements, in the order in which they come: the beginnings of the names of Streamlit's
# files. Files that these import are found by reading them.
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
# Pages whose charts come later: here, once something has been planned.
LATER = {"planner": PLOTLY}
# The name of the module that stands in the place of Plotly's, and waits.
WAITS = "chart_waits.js"

_HEAD = (
    "<head><script>window.__streamlit={BACKEND_BASE_URL:location.origin+"
    f'location.pathname.replace(/\\/({"|".join(PAGES)})\\/?$/,"/")}};'
    "setInterval(()=>{performance.clearMarks();performance.clearMeasures()},6e4)</script>"
).encode()
_ASSETS = Path(__file__).parents[1] / "ui" / "assets"
_SCRIPTS = ("order.js", "history.js", "colours.js")
_STYLE = (
    f"<style>{(_ASSETS / 'console.css').read_text(encoding='utf-8')}</style>"
    + "".join(f"<script>{(_ASSETS / name).read_text(encoding='utf-8')}</script>" for name in _SCRIPTS)
).encode()
_RUN = (
    """<script type="module">const stands='[data-test-script-state="notRunning"] h1',"""
    'run=()=>import("./static/js/{}").catch(()=>{{}}),'
    "ahead=()=>setTimeout(document.querySelector(stands)?()=>(window.requestIdleCallback??setTimeout)(run):ahead,50);"
    "ahead()</script>"
)
# Comes before everything that loads a module. All imports of Plotly's module get the waiting one instead, except that
# of the waiting one itself.
_BEFORE = (
    '<script type="importmap">{{"imports":{{"./static/js/{0}":"./static/js/{1}"}},'
    '"scopes":{{"./static/js/{1}":{{"./static/js/{0}":"./static/js/{0}"}}}}}}</script>'
)
_EXPORTS = re.compile(r"export\s*\{([^{}]*)\};?\s*$")
_MAX_PAGE = 1 << 20
# The imports are at the beginning of a file.
_IMPORTS = 8192
_IMPORT = re.compile(r'(?:from|import)\s*"\./([\w.-]+\.js)"')
# The headers of requests for a file on a condition, or for a part of it.
_CONDITIONS = {b"if-none-match", b"if-modified-since", b"if-match", b"if-unmodified-since", b"if-range", b"range"}


class PageBase:
    """ASGI middleware around Streamlit's application, which adds scripts, style and links to its HTML page.

    static: the folder of Streamlit's page; None: no code is loaded ahead. on_page: called in the event loop when a page
    is asked for, with its name in the address.
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
        from starlette.datastructures import MutableHeaders
        from starlette.responses import RedirectResponse, Response

        asks = scope["type"] == "http" and scope["method"] == "GET"
        if asks and self._waits and scope["path"].endswith(f"/static/js/{WAITS}"):
            await Response(self._waits, 200, {"Cache-Control": "no-cache"}, "text/javascript")(scope, receive, send)
            return
        if not asks or not _asks_for_page(scope):
            await self.app(scope, receive, send)
            return
        name = scope["path"].rstrip("/").rpartition("/")[2]
        if name == FIRST:
            query = scope["query_string"].decode("latin-1")
            whole = ("../" if scope["path"].endswith("/") else "./") + (f"?{query}" if query else "")
            await RedirectResponse(whole)(scope, receive, send)
            return
        self._on_page(name)
        # Streamlit is to send the page whole and uncompressed, even if the browser's cache has it (without the
        # additions).
        plain = [(name, value) for name, value in scope["headers"] if name not in {*_CONDITIONS, b"accept-encoding"}]
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
    """Returns, for each page, the links to the modules that it needs beyond those that Streamlit's page names. waits:
    the name of the module in the place of Plotly's; "": none."""
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
    """Returns the text of a module that waits, then loads `module` and exports the same names; None if these can't be
    found out."""
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
    from starlette.datastructures import Headers

    return "text/html" in Headers(scope=scope).get("accept", "")


def _is_page(start: Message) -> bool:
    from starlette.datastructures import Headers

    headers = Headers(scope=start)
    return (
        start["status"] == 200
        and headers.get("content-type", "").startswith("text/html")
        and "content-encoding" not in headers
        and int(headers.get("content-length", 0)) <= _MAX_PAGE
    )


# -- Streamlit: its files -------------------------------------------------------------------------
#
# Sends each of Streamlit's own scripts, styles and fonts in one piece.
#
# A page asks for more than a hundred of them. Starlette hands each to other threads several times, and a large one
# once for each 64 KB, and each time it waits for its turn among everything else that the process does.

# The names of files in these folders have a hash of their content, so browsers may keep them.
FOLDERS = ("js", "css", "media")
CACHE = b"public, immutable, max-age=31536000"
# Larger files are read in another thread.
AT_ONCE = 256 << 10


class StaticFiles:
    """ASGI middleware around Streamlit's application, which answers everything but files. static: the folder of its
    page."""

    def __init__(self, app: ASGIApp, static: Path) -> None:
        self.app = app
        self._files = {
            f"/static/{folder}/{path.name}": path
            for folder in FOLDERS
            for path in (static / "static" / folder).glob("*.*")
            if path.is_file()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from anyio import to_thread

        path = self._files.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "GET" else None
        if path is None or any(name in _CONDITIONS for name, _ in scope["headers"]):
            await self.app(scope, receive, send)
            return
        try:
            large = path.stat().st_size > AT_ONCE
            content = await to_thread.run_sync(path.read_bytes) if large else path.read_bytes()
        except OSError:  # another version was installed meanwhile
            await self.app(scope, receive, send)
            return
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        headers = [
            (b"content-type", kind.encode()),
            (b"content-length", str(len(content)).encode()),
            (b"cache-control", CACHE),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})
