"""What workers are forked from: its imports are there for all of them, and Python's collector leaves them alone."""

from __future__ import annotations

import gc
import multiprocessing
from multiprocessing.connection import Connection

import pytest

from tests.agent.launches import warm

pytestmark = pytest.mark.processes


def _say(to: Connection) -> None:
    before = len(gc.get_objects())
    gc.collect()
    to.send((gc.isenabled(), gc.get_freeze_count(), before))


def test_a_round_of_the_collector_looks_through_what_a_worker_has_made_alone() -> None:
    warm()
    mine, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("forkserver").Process(target=_say, args=(theirs,), daemon=True)
    worker.start()
    assert mine.poll(60)
    enabled, imported, own = mine.recv()
    worker.join(60)
    assert enabled and imported > 100_000 and own < imported / 10
