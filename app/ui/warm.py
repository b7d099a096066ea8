"""What the first page to be opened would otherwise wait for: the pages' modules, and what Plotly reads for a figure.

That takes half a second of processor time. It begins when the console has told its address, or, where workers are
heard meanwhile, when a page is first asked for or the console has been up for a while. No Streamlit is imported before.
"""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import structlog

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
