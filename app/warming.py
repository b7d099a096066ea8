"""Has the console read in what its pages need, so that whoever opens the first one does not wait for it.

That takes a second of processor time. It begins when a page is first asked for, while the browser is still busy with
Streamlit's own code, or when the console has been up for a while; its address is told before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import structlog

log = structlog.get_logger()

# By then a job that was started along with the console trains.
QUIET_SECONDS = 20.0


class Warming:
    """One per process. work: what is to be done once. each: what is to be done whenever a page of that name is asked
    for; it does nothing where it is done already."""

    def __init__(
        self,
        work: Callable[[], object],
        each: Mapping[str, Callable[[], object]] | None = None,
        *,
        quiet: float = QUIET_SECONDS,
    ) -> None:
        self._work, self._each, self._quiet = work, each or {}, quiet
        self._asked = threading.Event()
        self.thread = threading.Thread(target=self._run, name="warming", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def page_asked_for(self, page: str) -> None:
        """page: its name in the address; empty for the first one."""
        if page in self._each:
            threading.Thread(target=_tried, args=(self._each[page],), name="warming", daemon=True).start()
        self._asked.set()

    def _run(self) -> None:
        self._asked.wait(self._quiet)
        _tried(self._work)


def _tried(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        log.exception("the pages could not be prepared; the first one to be opened takes longer")
