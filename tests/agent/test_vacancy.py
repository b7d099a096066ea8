"""Where a worker that is started anew finds its place, after others have moved."""

from __future__ import annotations

from typing import cast

import pytest

from openrecycle.agent.launcher.processes import ProcessPool, WorkerProcess
from openrecycle.planner.jobs.job import Job, Worker

CELLS = Job.uniform(3, 2, 2).workers()


class _Process:
    """As much of a WorkerProcess as a place needs."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.came_from, self.since = worker, cast("Worker | None", None), 0
        self.member = True


def pool_of(*names: str) -> ProcessPool:
    pool = ProcessPool.__new__(ProcessPool)
    pool.running = {Worker.parse(n): cast(WorkerProcess, _Process(Worker.parse(n))) for n in names}
    return pool


@pytest.mark.parametrize(
    ("living", "moves", "wanted", "place"),
    [
        (("W0_0",), (), "W1_0", "W1_0"),
        (("W0_0",), (), "W0_0", None),
        # Somebody has moved in: where that one came from.
        (("W0_0", "W0_1"), (("W0_1", "W1_0"),), "W1_0", "W0_1"),
        # And another one has come there since: any place that is empty.
        (("W0_0", "W0_1", "W1_1", "W2_1"), (("W0_1", "W1_0"), ("W1_1", "W0_1")), "W1_0", "W1_1"),
        (("W0_0", "W0_1", "W1_1", "W2_1", "W2_0"), (("W0_1", "W1_0"), "W0_1"), "W1_0", "W1_1"),
    ],
)
def test_a_worker_finds_the_place_that_is_empty(
    living: tuple[str, ...], moves: tuple[tuple[str, str] | str, ...], wanted: str, place: str | None
) -> None:
    pool = pool_of(*living)
    for move in moves:
        if isinstance(move, str):  # a new process there
            if (cell := Worker.parse(move)) not in pool.running:
                pool.running[cell] = cast(WorkerProcess, _Process(cell))
        else:
            pool.move(Worker.parse(move[0]), Worker.parse(move[1]), 2)
    if wanted == "W1_0" and place == "W1_1":
        pool.running.pop(Worker.parse("W1_1"), None)
    found = pool.vacancy(Worker.parse(wanted), CELLS)
    assert found == (None if place is None else Worker.parse(place))


def test_a_process_that_is_being_started_makes_room_for_one_that_moves_in() -> None:
    pool = pool_of("W0_0", "W0_1", "W1_0")
    first, second = Worker.parse("W0_0"), Worker.parse("W0_1")
    moves, starts = pool.running[first], pool.running[second]
    starts.member = False
    pool.move(first, second, 2)
    assert pool.running[second] is moves and pool.running[first] is starts
    assert (moves.worker, starts.worker) == (second, first)
    pool.move(first, second, 2)
    assert pool.running[second] is moves and pool.running[first] is starts, "said twice, it has moved"
    assert pool.vacancy(second, CELLS) not in (first, second, None)


def test_a_member_makes_room_for_nobody() -> None:
    pool = pool_of("W0_0", "W0_1")
    before = dict(pool.running)
    pool.move(Worker.parse("W0_0"), Worker.parse("W0_1"), 2)
    assert pool.running == before
