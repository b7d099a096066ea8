"""Large plans are not looked through by each collection, and are let go of all the same."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from openrecycle.app.runtime import patches
from openrecycle.app.runtime.patches import Round


def settle(ops: int) -> None:
    """A plan of so many ops has been read."""
    with patches.building(ops):
        pass


class Thing:
    """Something that a weak reference can point at."""


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that was there before a test, and afterwards: else each round looks through what tests have imported, for
    half a second."""
    monkeypatch.setattr(patches, "WHOLE_SECONDS", 0.0)
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


def test_around_large_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a row: each round over everything takes half a second here."""
    plain, kept = Thing(), Thing()
    kept.own = kept  # type: ignore[attr-defined]
    seen = weakref.ref(plain), weakref.ref(kept)
    settle(patches.LARGE_OPS)
    assert not is_kept_out(kept), "only large ones are worth it"
    settle(patches.LARGE_OPS + 1)
    assert is_kept_out(kept)

    # What was kept out is still freed.
    del plain, kept
    assert seen[0]() is None, "by its reference count"
    gc.collect()
    assert seen[1]() is not None, "a cycle is not looked at"
    settle(patches.LARGE_OPS + 1)
    assert seen[1]() is None, "until the next round"

    # Rounds are rare.
    monkeypatch.setattr(patches, "WHOLE_SECONDS", 1e9)
    late = Thing()
    late.own = late  # type: ignore[attr-defined]
    seen_late = weakref.ref(late)
    settle(patches.LARGE_OPS + 1)
    del late
    settle(patches.LARGE_OPS + 1)
    assert seen_late() is not None

    # Nothing is collected while one is built.
    with patches.building(patches.LARGE_OPS):
        assert gc.isenabled()
    with patches.building(patches.LARGE_OPS + 1):
        with patches.building(patches.LARGE_OPS + 1):
            assert not gc.isenabled()
        assert not gc.isenabled(), "until the last one is done"
        before, built = gc.get_freeze_count(), [Thing() for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before + len(built) / 2, "of what was there other threads let some go"
    with pytest.raises(ValueError, match="damaged"), patches.building(patches.LARGE_OPS + 1):
        raise ValueError("damaged")
    assert gc.isenabled()


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "WHOLE_SECONDS", 900.0)


@pytest.mark.usefixtures("usual")
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


@pytest.mark.usefixtures("usual")
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


def test_a_short_round_frees_what_is_new_and_a_whole_one_the_rest_but_while_a_large_plan_is_built() -> None:
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
    with patches.building(patches.LARGE_OPS + 1):
        assert seen_old() is None, "a round went before"
        another = cycle()
        assert patches.make_round(whole=True) > 0
        assert another() is not None
    patches.make_round(whole=True)
    assert another() is None


@pytest.mark.usefixtures("usual")
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
        with patches.building(patches.LARGE_OPS + 1):
            pass
        assert not gc.isenabled()
    finally:
        keeping.close()
    assert gc.isenabled()


def test_no_run_of_a_page_ends_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit would begin one after each refresh of each viewer's page."""
    from streamlit import config

    from openrecycle.app.runtime.settings import Settings
    from openrecycle.app.server import _streamlit

    monkeypatch.setattr(config, "_main_script_path", config._main_script_path)
    assert config.get_option("runner.postScriptGC"), "Streamlit's own way"
    try:
        _streamlit(Settings())
        assert not config.get_option("runner.postScriptGC")
    finally:
        config.get_config_options(force_reparse=True)
    assert config.get_option("runner.postScriptGC")
