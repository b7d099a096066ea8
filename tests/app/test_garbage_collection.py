"""A console makes the rounds of garbage collection itself, rarely; what is kept out of them is let go of all the
same."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from openrecycle.app.runtime import patches
from openrecycle.app.runtime.patches import Round


class Thing:
    """Something that a weak reference can point at."""


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """All that was there before a test, and afterwards: else each round looks through what tests have imported, for
    half a second."""
    gc.freeze()
    yield
    gc.freeze()


def is_kept_out(thing: Thing) -> bool:
    return not any(one is thing for one in gc.get_objects())


def cycle() -> weakref.ref[Thing]:
    """Of one that nobody has any more."""
    thing = Thing()
    thing.own = thing  # type: ignore[attr-defined]
    return weakref.ref(thing)


def test_when_a_round_is_due() -> None:
    gib, begin, objects = 2**30, Round(0.0, 0.01, 2**30), patches.NEW_OBJECTS
    soon, late = patches.NEW_SECONDS - 1, patches.NEW_SECONDS

    def due(now: float, last: Round = begin, more: int = 10, resident: int = gib) -> bool | None:
        return patches.due(now, last, begin, more, resident)

    assert due(soon) is None
    assert due(late) is False, "over what is new"
    assert due(soon, more=objects) is False, "much is new"
    assert due(soon, replace(begin, kept_out=5 * objects), objects) is None, "not so much for so many"
    assert due(soon, resident=2 * gib) is False, "and large"
    assert due(soon, resident=gib + patches.NEW_BYTES) is None, "there is so much already"
    recent = Round(patches.WHOLE_SECONDS - 2, 0.1, 2 * gib)
    assert due(patches.WHOLE_SECONDS - 1, last=recent) is None
    assert due(patches.WHOLE_SECONDS, last=recent) is True, "over everything"
    recent = Round(patches.GROWN_SECONDS - 2, 0.1, 2 * gib)
    assert due(patches.GROWN_SECONDS - 1, last=recent, resident=2 * gib) is None
    assert due(patches.GROWN_SECONDS, last=recent, resident=2 * gib) is True, "something is kept out that is in cycles"


def test_rounds_take_a_thousandth_of_the_time() -> None:
    gib, took = 2**30, 2.0
    long = Round(0.0, took, gib)
    assert patches.due(1000 * took - 1, long, long, 10, gib) is None
    assert patches.due(1000 * took, long, long, 10, gib) is True
    short = Round(0.0, 0.1, gib)
    assert patches.due(1000 * short.took - 1, short, long, 10, gib) is None
    assert patches.due(1000 * short.took, short, long, 10, gib) is False
    assert patches.due(patches.GROWN_SECONDS, long, long, 10, 2 * gib) is True, "but for growth"


def test_what_a_round_waits_for_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = 0.3

    def make_round(*, whole: bool) -> int:
        time.sleep(waited)
        return 2**30

    monkeypatch.setattr(patches, "make_round", make_round)
    assert patches.timed(whole=True).took < waited / 2


def test_a_short_round_frees_what_is_new_and_a_whole_one_the_rest() -> None:
    """Told by cycles, not by the count of what is kept out: of that, other threads let things go meanwhile."""
    old = Thing()
    seen_old = weakref.ref(old)
    patches.make_round(whole=False)
    old.own = old  # type: ignore[attr-defined]
    del old
    new = cycle()
    patches.make_round(whole=False)
    assert new() is None
    assert seen_old() is not None, "kept out"
    assert patches.make_round(whole=True) > 0
    assert seen_old() is None


def test_the_console_makes_the_rounds_itself() -> None:
    of_before = cycle()
    gc.freeze()
    keeping, thing = patches.GarbageCollection(), Thing()
    assert not is_kept_out(thing)
    try:
        keeping.start()
        assert not gc.isenabled()
        end = time.monotonic() + 60
        while not is_kept_out(thing):
            assert time.monotonic() < end, "the first one is made at once"
            time.sleep(0.01)
        assert of_before() is not None, "what a server that it was forked from keeps out is no affair of the first"
    finally:
        keeping.close()
    assert gc.isenabled()


def test_no_run_of_a_page_ends_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit would begin one after each refresh of each viewer's page."""
    from streamlit import config

    from openrecycle.app.runtime.settings import Settings
    from openrecycle.app.server import streamlit_app

    monkeypatch.setattr(config, "_main_script_path", config._main_script_path)
    assert config.get_option("runner.postScriptGC"), "Streamlit's own way"
    try:
        streamlit_app(Settings())
        assert not config.get_option("runner.postScriptGC")
    finally:
        config.get_config_options(force_reparse=True)
    assert config.get_option("runner.postScriptGC")
