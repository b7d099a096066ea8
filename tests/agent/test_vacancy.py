"""Where a worker that is started anew finds its place, after others have moved."""

from __future__ import annotations

from typing import cast

import pytest

from openrecycle.agent.launcher import restarts
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
    assert _move(pool, first, second) == ({second: first, first: second}, [])
    assert pool.running[second] is moves and pool.running[first] is starts
    assert (moves.worker, starts.worker) == (second, first)
    assert pool.place({moves.incarnation: second}, 3) == ({}, []), "said twice, it has moved"
    assert pool.running[second] is moves and pool.running[first] is starts
    assert pool.vacancy(second, CELLS) not in (first, second, None)


def test_a_member_without_a_place_is_named() -> None:
    pool = pool_of("W0_0", "W0_1")
    moves, stays = pool.running.values()
    source, to = moves.worker, stays.worker
    assert _move(pool, source, to) == ({to: source}, [stays])
    assert list(pool.running.values()) == [moves]


def test_processes_that_move_in_a_row_or_a_circle_all_find_their_places() -> None:
    pool = pool_of("W0_0", "W0_1", "W1_0", "W1_1")
    a, b, c, starts = pool.running.values()
    starts.member = False
    places = {a.incarnation: b.worker, b.incarnation: starts.worker}
    was, first, last = a.worker, b.worker, starts.worker
    assert pool.place(places, 2) == ({first: was, last: first, was: last}, [])
    assert {str(w): e for w, e in pool.running.items()} == {"W0_1": a, "W1_0": c, "W1_1": b, "W0_0": starts}
    assert starts.worker == was and starts.came_from is None
    assert pool.place({a.incarnation: last, b.incarnation: first}, 3) == ({last: first, first: last}, [])
    assert (str(a.worker), str(b.worker), a.came_from, b.came_from) == ("W1_1", "W0_1", b.worker, a.worker)
    assert pool.vacancy(first, CELLS) not in {*pool.running}, "each of the two came from where the other is"


@pytest.mark.parametrize("order", [("W0_0", "W1_0"), ("W1_0", "W0_0")])
def test_what_waits_for_a_place_that_was_taken_waits_for_an_empty_one(order: tuple[str, str]) -> None:
    """Two processes move: one to where a newcomer is being started, the other to where one is to be started later."""
    pool = pool_of(*order, "W0_1")
    pool.running[Worker.parse("W0_1")].member = False
    to = {"W0_0-1": Worker.parse("W0_1"), "W1_0-1": Worker.parse("W1_1")}
    came, _ = pool.place(to, 2)
    _waits_for_an_empty_place(pool, "W1_1", came)


def test_a_newcomer_that_is_given_the_place_for_which_another_waits_leaves_it_its_own() -> None:
    pool = pool_of("W0_0", "W0_1")
    pool.running[Worker.parse("W0_1")].member = False
    came, _ = pool.place({"W0_1-1": Worker.parse("W1_1")}, 2)
    _waits_for_an_empty_place(pool, "W1_1", came)


def _waits_for_an_empty_place(pool: ProcessPool, place: str, came: dict[Worker, Worker]) -> None:
    waiting = restarts.DueRestart(place, number=1, due=9.0, node=0, incarnation="gone", committed=0)
    state = restarts.moved(restarts.Restarts((waiting,)), {str(to): str(source) for to, source in came.items()})
    found = restarts.due(state, 9.0, lambda node: True, lambda worker: Worker.parse(worker) not in pool.running)
    assert len(found.start) == 1


def _move(pool: ProcessPool, source: Worker, to: Worker) -> tuple[dict[Worker, Worker], list[WorkerProcess]]:
    return pool.place({pool.running[source].incarnation: to}, 2)
