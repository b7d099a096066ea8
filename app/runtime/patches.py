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

What else changes the platform, or uses private names of it, where, and for which version:

openrecycle.fork_server     Python 3.11 (multiprocessing's fork server)
    Gives: no garbage collection while the server imports, and what it has imported is frozen: 0.3 s of processor time
    and 150 MB for each worker. A fork that fails does not end the server.
    Not needed once tests/agent/test_fork_server.py passes without it.
openrecycle.forking         Python 3.11 (multiprocessing's fork server)
    Gives: of two threads that wait for a process both see its exit status; a forked process uses the server it is from.
    It is right or wrong, not faster: there is no figure.
    Not needed once tests/app/test_children.py (all who wait see it end) and test_fork_server.py pass without it.
openrecycle.cli             Python 3.11 (thresholds of garbage collection, for every command)
    Gives: torch is imported in five sixths of the time.
    Not needed once `python -m tests.benchmarks.bench_start` is as fast without it.
planner.output              Typer 0.29 (the base of its errors by name; how an option reads a number)
    Gives: a wrong command line is one sentence, and a number is digits: not 1_000, nor digits of other scripts. No
    figure: it is what people read.
    Not needed once Typer exports that base, and refuses such numbers: tests/app/test_command_lines.py is to pass.
app.server                  Streamlit 1.67 (`config._main_script_path`)
    Gives: app/.streamlit/config.toml is read, before st.App is made, which would look beside app/ui/main.py for it.
    No figure: without it pages have Streamlit's colours.
    Not needed once tests/app/test_frontend.py (pages have the console's theme) passes without it.
app.server                  Streamlit 1.67 (reads the cookie of its login, makes the token that starts one)
    Gives: the guard knows who asks before a page's WebSocket is open. No figure: else it could refuse nobody.
    Not needed once Streamlit has public functions for both; tests/app/test_oidc.py fails where the private ones change.
app.api.connection          uvicorn 0.54 (a subclass of its protocol over httptools, given by its option `http`)
    Gives: limits on connections, heads, time, and answers that nobody reads. No figure: those limits are the gain.
    Not needed once uvicorn has options for them: tests/app/test_connection.py and test_connection_limit.py say which.
app.plans.files             Python 3.11 (gc.disable, in the process that reads one uploaded plan and ends)
    Gives: a plan of 7 MB is read in 1.0 s of processor time, else 1.5 s.
    Not needed once a round of garbage collection passes over what older rounds have seen.
app.observing.history       Python 3.11 (`zipfile._EndRecData`)
    Gives: how large a zip file's directory is, found as ZipFile finds it, before it reads it. No figure: without it a
    directory of any size is taken into memory.
    Not needed once ZipFile has a limit for that; tests/app/test_history.py fails where the private function changes.
agent.monitoring.liveness   Python 3.11 (`sys._current_frames`, documented, yet of CPython alone)
    Gives: of a worker that hangs it is said where each of its threads is. No figure: it is asked for once per silence.
    Not needed once Python has it for all interpreters; tests/agent/test_hanging.py fails where it changes.
agent.jobs.trainer          Python 3.11 (`_inheriting` of a process that multiprocessing starts)
    Gives: a script that begins to train when a worker imports it is refused in one sentence. No figure: else each
    worker would begin a job of its own.
    Not needed once multiprocessing says in public that a process is importing its parent's script;
    tests/agent/test_resilient_trainer.py fails where it changes.
agent.models.hugging_face   transformers 5 (`_from_config`, `_init_weights`, `_can_record_outputs`)
    Gives: a model is cut without memory for it, its buffers have their values, and its routers are found. No figure:
    there is no other way to any of them.
    Not needed once transformers has public names for them; tests/agent/test_from_transformers.py fails where they
    change.

The private names of torch are in agent.models.compat.
"""

from __future__ import annotations

import contextlib
import gc
import mimetypes
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # child processes, which import this, have no use for a web framework
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# -- Python: threads and files --------------------------------------------------------------------

# How long a thread that computes (a page's script, a large view) keeps the others waiting: the event loop
# waits so long twice or more per request. Python's own 5 ms would be most of a heartbeat's latency.
SWITCH_SECONDS = 0.0003


def tune_process() -> None:
    """For the whole process; once, before anything is served."""
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
    """For all processes that this one spawns from now on. Does nothing the second time.

    multiprocessing has a spawned child import what `__main__` is in its parent, in case the work was
    defined there, and gives it the parent's import path. Ours is never defined there; but Streamlit puts
    the page that runs at that moment in the place of `__main__`, and its folder first in the path. The
    child would run the whole page, and find pages where it looks for packages (app/ui/planner.py).
    """
    spawn.get_preparation_data = _without_pages


# -- Python: garbage collection -------------------------------------------------------------------
#
# When memory is looked through for what refers to itself, and what is not looked at then.
#
# A console holds millions of objects: some hundred for each worker of a large job, half a million for a plan of 2,048.
# Python begins a round when there are so many more than before, and goes by all that is young, or by everything. But
# each heartbeat takes the place of another, so that with thousands of workers most of what lives is young, and rounds
# took half of the processor's time and up to 0.5 s each, in which no heartbeat is answered. So `GarbageCollection`
# makes the rounds of the console's process, rarely. (Streamlit's, after every run of a script, so also after each
# refresh of each viewer's page, are off: see app.server.)

# Fewer ops than this are looked through in a few milliseconds.
LARGE_OPS = 20_000
# Of the JSON of an op, about.
OP_BYTES = 80
# Between two rounds over everything; and over what is new since the last of either, which is kept out afterwards:
# what of it is in a cycle is found by the next whole one.
WHOLE_SECONDS, NEW_SECONDS = 900.0, 60.0
# No more of the time than this goes into either: looking through what a console of 8,192 workers holds takes a second.
SHARE = 0.001
# Sooner, where there are so many objects more than before, or so much more is held.
NEW_OBJECTS, NEW_BYTES = 200_000, 256 * 2**20
# A whole one as well, where memory has grown so much since the last one, but not within so many seconds of it: as long
# as a large job's workers register, all grows.
GROWTH, GROWN_BYTES, GROWN_SECONDS = 1.25, 64 * 2**20, 300.0
LOOK_SECONDS = 1.0

_lock = threading.Lock()
_building = 0
_kept = False  # are the rounds of this process made here?
_last_whole = -WHOLE_SECONDS


class GarbageCollection:
    """Makes the rounds of this process instead of Python, in a thread of its own, from `start` to `close`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_house, name="house-keeping", daemon=True)

    def start(self) -> None:
        global _kept
        with _lock:
            _kept = True
            gc.disable()
        self._thread.start()

    def close(self) -> None:
        global _kept
        self._stop.set()
        self._thread.join()
        with _lock:
            _kept = False
            gc.enable()

    def _keep_house(self) -> None:
        whole = new = timed(whole=False)  # what is kept out already is of the server that this was forked from, if any
        while not self._stop.wait(LOOK_SECONDS):
            more = gc.get_count()[0]
            which = due(time.monotonic(), new, whole, more, resident_bytes())
            if which is not None:
                new = timed(new.kept_out + more, whole=which)
                whole = new if which else whole


@dataclass(frozen=True)
class Round:
    """at: when it ended, of the monotonic clock, in seconds. took: seconds of a processor; on a busy machine a round
    lasts many times as long, which must not make the next one rare. held: bytes that the process held then. kept_out:
    about so many objects are left to the next whole one."""

    at: float
    took: float
    held: int
    kept_out: int = 0


def timed(kept_out: int = 0, *, whole: bool) -> Round:
    """Makes a round. kept_out: as Round has it, of one that is not whole."""
    began = time.thread_time()
    held = make_round(whole=whole)
    took = time.thread_time() - began
    # To count them takes as long as a part of the round.
    return Round(time.monotonic(), took, held, gc.get_freeze_count() if whole else kept_out)


def due(now: float, last: Round, last_whole: Round, more: int, resident: int) -> bool | None:
    """Is a round to be made now, and a whole one? None: no.

    last: of either kind. more: objects than at the last; resident: bytes that the process holds now.
    """
    since = now - last_whole.at
    grown = resident > GROWTH * last_whole.held + GROWN_BYTES
    if since >= (GROWN_SECONDS if grown else max(WHOLE_SECONDS, last_whole.took / SHARE)):
        return True
    much = more >= max(NEW_OBJECTS, last.kept_out / 4) or resident > GROWTH * last.held + NEW_BYTES
    return False if much or now - last.at >= max(NEW_SECONDS, last.took / SHARE) else None


def make_round(*, whole: bool) -> int:
    """Looks through all that is new, or through everything, and keeps it out from then on; returns the bytes that the
    process then holds. Does nothing while a large plan is built."""
    with _lock:
        if not _building:
            _look(whole=whole)
    return resident_bytes()


def _look(*, whole: bool) -> None:
    global _last_whole
    if whole:
        gc.unfreeze()
        _last_whole = time.monotonic()
    gc.collect()
    gc.freeze()


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@contextmanager
def building(ops: int) -> Iterator[None]:
    """Around the reading or making of a plan of so many ops: no round of garbage collection begins meanwhile, and what
    lives at the end is not looked through any more.

    What is let go of is freed as ever, by its reference count; what is in a cycle, by a round that a later call makes.
    """
    global _building
    if ops <= LARGE_OPS:
        yield
        return
    with _lock:
        _whole_if_due()
        _building += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            gc.freeze()
            _building -= 1
            if not (_building or _kept):
                gc.enable()


def _whole_if_due() -> None:
    if not (_kept or _building) and time.monotonic() - _last_whole >= WHOLE_SECONDS:
        _look(whole=True)


# -- Streamlit: its page --------------------------------------------------------------------------
#
# Tells Streamlit's page where its server is, so that it need not find out by failing, and what it will draw with.
#
# Opened at /schedule, it asks for /schedule/_stcore/health before /_stcore/health, and each miss is an
# error in the browser's console. It takes `window.__streamlit.BACKEND_BASE_URL` instead where that is set.
#
# It asks for the code of each kind of element when the first one has come, and then for what that code needs. Named in
# the head, all of it is read and compiled beside the rest, Plotly's 5 MB as well, and is there by then. Running that
# takes most of a second, and where the page had not been painted before, it would be white for so long. So another
# module stands before it, which waits for that. Where the first chart comes when somebody asks for it, that code is run
# as soon as the page stands.
#
# Sent with a page's first run, the console's style sheet would come after some of what it is for, which would be moved
# by it. It is at the end of the page instead, behind Streamlit's own, which it overrides; so are the scripts that show
# a page from the top down, and that keep the browser's history to what somebody did.
#
# And it notes for the browser's developer tools when each run of a page began and ended, which the browser keeps as
# long as the page is open: 170 MB in a week of one run a second. Once a minute they are dropped.

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
# What asks for something on a condition, or for a part of it.
_CONDITIONS = {b"if-none-match", b"if-modified-since", b"if-match", b"if-unmodified-since", b"if-range", b"range"}


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
        from starlette.datastructures import MutableHeaders
        from starlette.responses import Response

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
# Streamlit's own scripts, styles and fonts, each sent in one piece.
#
# A page asks for more than a hundred of them. Starlette hands each to other threads several times, and a large one
# once for each 64 KB, which takes its turns with everything else that the process does.

# Their names carry a hash of their content.
FOLDERS = ("js", "css", "media")
CACHE = b"public, immutable, max-age=31536000"
# More is read in another thread.
AT_ONCE = 256 << 10


class StaticFiles:
    """Around Streamlit's application, which answers all else. static: the folder that its page is in."""

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
