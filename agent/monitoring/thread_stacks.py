"""Where the threads of this process stand, for who has to find out why it does not do what it was told. No torch."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

FRAMES = 4
"""Innermost first, of each thread."""


def thread_stacks() -> str:
    """One sentence: `MainThread at group.py:62 wait < transfers.py:96 receive < ...; launcher-pipe at ...`.

    Of this process's Python threads but the one that asks; what a library does inside is not seen.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    frames = sys._current_frames()
    describe_exception = [
        f"{names.get(ident, 'a thread')} at {_place(frame)}" for ident, frame in frames.items() if ident != mine
    ]
    return "; ".join(sorted(describe_exception))


def describe_exception(error: BaseException) -> str:
    """An exception in a line, and where in the user's own code it came about: `, at model.py:12 in forward`."""
    libraries = tuple(
        str(Path(file).parent) for file in (getattr(sys.modules.get("torch"), "__file__", None), __file__) if file
    )
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)]
    place = f", at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}{place}"


def _place(frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < FRAMES:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places)
