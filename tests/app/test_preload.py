"""What the first page needs is read in ahead: when a page is asked for, or after a while."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

import openrecycle.app.ui
from openrecycle.app.server import Preload, warm_up

CHOICE_TIMEOUT = 60.0


@pytest.mark.parametrize("asked", [True, False])
def test_it_begins_with_the_first_page_that_is_asked_for_or_after_a_while(asked: bool) -> None:
    worked = threading.Event()
    warming = Preload(worked.set, quiet=10 * CHOICE_TIMEOUT if asked else 0.01)
    warming.start()
    if asked:
        assert not worked.is_set()
        warming.page_asked_for("schedule")
    assert worked.wait(CHOICE_TIMEOUT)


def test_what_one_page_needs_is_prepared_whenever_it_is_asked_for() -> None:
    prepared = threading.Semaphore(0)
    warming = Preload(lambda: None, {"simulate": prepared.release})
    for page in ("simulate", "", "simulate"):
        warming.page_asked_for(page)
    assert prepared.acquire(timeout=CHOICE_TIMEOUT) and prepared.acquire(timeout=CHOICE_TIMEOUT)
    assert not prepared.acquire(blocking=False)


def test_what_goes_wrong_is_logged_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise OSError("no such thing")

    warming = Preload(fails, quiet=0.0)
    warming.start()
    warming.thread.join(CHOICE_TIMEOUT)
    assert not warming.thread.is_alive() and "no such thing" in "".join(capsys.readouterr())


def test_all_that_the_pages_import_is_there_afterwards() -> None:
    folder = Path(openrecycle.app.ui.__file__).parent
    parts = {
        ".".join(("openrecycle.app.ui", *path.relative_to(folder).with_suffix("").parts))
        for path in folder.rglob("*.py")
    }
    warm_up()
    assert {name.removesuffix(".__init__") for name in parts} - {"openrecycle.app.ui.main"} <= set(sys.modules)
