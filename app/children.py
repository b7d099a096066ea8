"""Child processes of the console begin without what Streamlit leaves behind in their parent.

multiprocessing has a spawned child import what `__main__` is in its parent, in case the work was
defined there, and gives it the parent's import path. Ours is never defined there; but Streamlit puts
the page that runs at that moment in the place of `__main__`, and its folder first in the path. The
child would run the whole page, and find pages where it looks for packages (app/ui/planner.py).
"""

from __future__ import annotations

from functools import wraps
from multiprocessing import spawn
from pathlib import Path
from typing import Any

_PAGES = str(Path(__file__).resolve().parent / "ui")
_original = spawn.get_preparation_data


@wraps(_original)
def _without_pages(name: str) -> dict[str, Any]:
    data = dict(_original(name))
    data.pop("init_main_from_name", None)
    data.pop("init_main_from_path", None)
    data["sys_path"] = [path for path in data["sys_path"] if path != _PAGES]
    return data


def begin_without_pages() -> None:
    """For all processes that this one spawns from now on. Does nothing the second time."""
    spawn.get_preparation_data = _without_pages
