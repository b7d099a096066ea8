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
        self.incarnation, self.member = f"{worker}-1", True


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
            _move(pool, *map(Worker.parse, move))
    if wanted == "W1_0" and place == "W1_1":
        pool.running.pop(Worker.parse("W1_1"), None)
    found = pool.vacancy(Worker.parse(wanted), CELLS)
    assert found == (None if place is None else Worker.parse(place))


def test_a_process_that_is_being_started_makes_room_for_one_that_moves_in() -> None:
    pool = pool_of("W0_0", "W0_1", "W1_0")
    first, second = Worker.parse("W0_0"), Worker.parse("W0_1")
    moves, starts = pool.running[first], pool.running[second]
    starts.member = False
    assert _move(pool, first, second) == ([moves], [])
    assert pool.running[second] is moves and pool.running[first] is starts
    assert (moves.worker, starts.worker) == (second, first)
    assert pool.place({moves.incarnation: second}, 3) == ([], []), "said twice, it has moved"
    assert pool.running[second] is moves and pool.running[first] is starts
    assert pool.vacancy(second, CELLS) not in (first, second, None)


def test_a_member_without_a_place_is_named() -> None:
    pool = pool_of("W0_0", "W0_1")
    moves, stays = pool.running.values()
    assert _move(pool, moves.worker, stays.worker) == ([moves], [stays])
    assert list(pool.running.values()) == [moves]


def test_processes_that_move_in_a_row_or_a_circle_all_find_their_places() -> None:
    pool = pool_of("W0_0", "W0_1", "W1_0", "W1_1")
    a, b, c, starts = pool.running.values()
    starts.member = False
    places = {a.incarnation: b.worker, b.incarnation: starts.worker}
    was = a.worker
    assert pool.place(places, 2) == ([a, b], [])
    assert {str(w): e for w, e in pool.running.items()} == {"W0_1": a, "W1_0": c, "W1_1": b, "W0_0": starts}
    assert starts.worker == was and starts.came_from is None
    assert pool.place({a.incarnation: b.worker, b.incarnation: a.worker}, 3) == ([a, b], [])
    assert (str(a.worker), str(b.worker), a.came_from, b.came_from) == ("W1_1", "W0_1", b.worker, a.worker)


def _move(pool: ProcessPool, source: Worker, to: Worker) -> tuple[list[WorkerProcess], list[WorkerProcess]]:
    return pool.place({pool.running[source].incarnation: to}, 2)
