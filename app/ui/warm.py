"""What the first page to be opened would otherwise wait for: the pages' modules, and what Plotly reads for a figure."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

from openrecycle.planner.jobs.job import Job, Problem
from openrecycle.planner.plans.baseline import one_forward_one_backward
from openrecycle.planner.plans.drawing import Drawing

_HERE = Path(__file__).parent
# Streamlit has no table and no picture without them.
_OTHERS = ("pandas", "pyarrow", "PIL.PngImagePlugin")


def warm_up(pages: frozenset[str]) -> None:
    """Takes about half a second of processor time. pages: the names of the files that are pages, which are run and not
    imported."""
    for name in _OTHERS:
        import_module(name)
    for found in pkgutil.walk_packages([str(_HERE)], "openrecycle.app.ui."):
        if found.name.removeprefix("openrecycle.app.ui.") not in pages:
            import_module(found.name)
    _draw()


def _draw() -> None:
    from openrecycle.app.ui.charts.schedule import gantt
    from openrecycle.app.ui.theme import LIGHT

    schedule = one_forward_one_backward(Problem(Job.uniform(2, 2, 2)))
    gantt(Drawing.of(schedule), LIGHT).to_json()
