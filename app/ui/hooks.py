"""What the server gives Streamlit to call, takes of its login, and does before the first page is opened. Only
app/server.py imports it.

The pages' modules, and what Plotly reads for a figure, take half a second of processor time. It begins when the console
has told its address, or, where workers are heard meanwhile, when a page is first asked for or the console has been up
for a while. No Streamlit is imported before.
"""

from __future__ import annotations

import json
import pkgutil
import secrets
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import structlog

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.security.sign_in import LOGIN_STREAMLIT
from openrecycle.planner.jobs.job import Job, Problem
from openrecycle.planner.plans.baseline import one_forward_one_backward
from openrecycle.planner.plans.drawing import Drawing

log = structlog.get_logger()

# By then the workers of a job that goes on have found their way back to the console.
BUSY_SECONDS = 20.0
# With no job to look after it can wait as long as it takes to say that the console is there.
CALM_SECONDS = 0.2
_HERE = Path(__file__).parent
# Streamlit has no table and no picture without them.
_OTHERS = ("pandas", "pyarrow", "PIL.PngImagePlugin")


def warm_up() -> None:
    """Takes about half a second of processor time."""
    for name in _OTHERS:
        import_module(name)
    for found in pkgutil.walk_packages([str(_HERE)], "openrecycle.app.ui."):
        if found.name != "openrecycle.app.ui.main":  # which Streamlit runs
            import_module(found.name)
    _draw()


def _draw() -> None:
    from openrecycle.app.ui.charts.gantt import gantt
    from openrecycle.app.ui.theme import LIGHT

    schedule = one_forward_one_backward(Problem(Job.uniform(2, 2, 2)))
    gantt(Drawing.of(schedule), LIGHT).to_json()


class Preload:
    """One per process. work: what is to be done once. each: what is to be done whenever a page of that name is asked
    for; it does nothing where it is done already. quiet: seconds without a page after which it is done anyway."""

    def __init__(
        self,
        work: Callable[[], object],
        each: Mapping[str, Callable[[], object]] | None = None,
        *,
        quiet: float = BUSY_SECONDS,
    ) -> None:
        self._work, self._each, self._quiet = work, each or {}, quiet
        self._asked = threading.Event()
        self.thread = threading.Thread(target=self._run, name="preload", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def page_asked_for(self, page: str) -> None:
        """page: its name in the address; empty for the first one."""
        if page in self._each:
            threading.Thread(target=_tried, args=(self._each[page],), name="preload", daemon=True).start()
        self._asked.set()

    def _run(self) -> None:
        self._asked.wait(self._quiet)
        _tried(self._work)


def _tried(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        log.exception("the pages could not be prepared; the first one to be opened takes longer")


def page_failed(error: Exception) -> bool:
    """For st.App: of whatever a page, a part of one that is drawn anew by itself, or a callback let through.

    True: nothing else is shown of it, but a sentence, with all of it in the log.
    """
    import streamlit as st  # here: who wants the login alone does without

    if isinstance(error, ConsoleError):
        st.error(str(error))
        return True
    mark = secrets.token_hex(4)
    log.error("a page could not be drawn", mark=mark, exc_info=error)
    st.error(
        f"This part of the page could not be drawn: an error of the console, in its log under {mark}. "
        "No job is touched by it. Load the page again; if that does not help, restart the console. Training goes on "
        "meanwhile, unless a worker dies: then the others wait for the console. What jobs report is kept."
    )
    return True


class StreamlitLogin:
    """Streamlit's own login (st.login), for the guard in front of it; see app.security.sign_in.Login.

    Streamlit's pages can't ask who somebody is before their WebSocket is open, and through that all data would
    flow: so the guard sends people to Streamlit's login itself, and reads the cookie that it signs.
    """

    def claims(self, cookies: Mapping[str, str]) -> Mapping[str, Any]:
        from streamlit.web.server.starlette.starlette_server_config import USER_COOKIE_NAME
        from streamlit.web.server.starlette.starlette_websocket import _get_signed_cookie_with_chunks

        if USER_COOKIE_NAME not in cookies:
            return {}
        signed = _get_signed_cookie_with_chunks(dict(cookies), USER_COOKIE_NAME)
        claims = json.loads(signed) if signed else {}
        return claims if isinstance(claims, dict) and claims.get("is_logged_in") is True else {}

    def start(self, provider: str) -> str:
        from streamlit.auth_util import encode_provider_token

        return f"{LOGIN_STREAMLIT}?{urlencode({'provider': encode_provider_token(provider or 'default')})}"
