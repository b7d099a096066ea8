"""Has the console read in what its pages need, so that whoever opens the first one does not wait for it.

That takes a second of processor time. It begins when a page is first asked for, while the browser is still busy with
Streamlit's own code, or when the console has been up for a while; its address is told before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

log = structlog.get_logger()

# By then a job that was started along with the console trains.
QUIET_SECONDS = 20.0


class Warming:
    """One per process. work: what is to be done once."""

    def __init__(self, work: Callable[[], None], *, quiet: float = QUIET_SECONDS) -> None:
        self._work, self._quiet = work, quiet
        self._asked = threading.Event()
        self.thread = threading.Thread(target=self._run, name="warming", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def page_asked_for(self, page: str) -> None:
        """page: its name in the address; empty for the first one."""
        self._asked.set()

    def _run(self) -> None:
        self._asked.wait(self._quiet)
        try:
            self._work()
        except Exception:
            log.exception("the pages could not be prepared; the first one to be opened takes longer")
