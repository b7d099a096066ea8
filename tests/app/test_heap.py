"""Large plans are not looked through by each collection, and are let go of all the same."""

from __future__ import annotations

import gc
import weakref

import pytest

from app import heap


class Thing:
    """Something that a weak reference can point at."""


@pytest.fixture(autouse=True)
def thawed() -> None:
    gc.unfreeze()
    gc.collect()


def test_only_large_plans_are_worth_it() -> None:
    heap.settle(heap.LARGE_OPS)
    assert gc.get_freeze_count() == 0
    heap.settle(heap.LARGE_OPS + 1)
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_what_was_kept_out_is_still_freed() -> None:
    plain, cycle = Thing(), Thing()
    cycle.own = cycle  # type: ignore[attr-defined]
    seen = weakref.ref(plain), weakref.ref(cycle)
    heap.settle(heap.LARGE_OPS + 1)
    del plain, cycle
    assert seen[0]() is None, "by its reference count"
    gc.collect()
    assert seen[1]() is not None, "a cycle is not looked at"
    heap.settle(heap.LARGE_OPS + 1)
    assert seen[1]() is None, "until the next time"
    gc.unfreeze()
