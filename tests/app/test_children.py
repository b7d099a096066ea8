"""What a child process of the console begins with, while Streamlit runs a page in its parent."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest

from openrecycle.app.children import OneChild, begin_without_pages

PAGES = Path(__file__).resolve().parents[2] / "app" / "ui"


def tell(pipe: Connection) -> None:
    """The child: which packages it finds, and what it has run."""
    import openrecycle.planner.errors

    pipe.send((openrecycle.planner.errors.__file__, str(PAGES) in sys.path, "streamlit" in sys.modules))


def test_a_child_neither_runs_the_page_nor_looks_for_packages_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ModuleType("__main__")  # what Streamlit puts there, and leaves there
    page.__file__ = str(PAGES / "main.py")
    monkeypatch.setitem(sys.modules, "__main__", page)
    monkeypatch.syspath_prepend(str(PAGES))
    begin_without_pages()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=tell, args=(theirs,))
    child.start()
    theirs.close()
    try:
        assert ours.poll(60)
        found, in_path, streamlit = ours.recv()
    finally:
        child.join(30)
    assert Path(found).resolve() == PAGES.parents[1] / "planner" / "errors.py"
    assert not in_path and not streamlit


def hungry(question: bytes) -> bytes:
    """The child: takes as much memory as it is asked to."""
    try:
        return b"%d" % len(bytearray(int(question)))
    except MemoryError:
        return b"no more"


def test_a_child_takes_no_more_memory_than_it_may() -> None:
    child = OneChild(hungry, name="hungry", patience=120, most_bytes=256 << 20)
    assert child.ask(b"%d" % (64 << 20)) == b"%d" % (64 << 20)
    assert child.ask(b"%d" % (512 << 20)) == b"no more"
