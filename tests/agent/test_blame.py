"""Whose link it is when transfers break though nobody died: a pure decision, and what a job without a console makes
of it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from openrecycle.agent.coordination.blame import (
    MEMORY,
    PROBATION,
    UNNAMED,
    BlameDecision,
    Break,
    Complaint,
    Links,
    attribute,
    judge,
)
from openrecycle.agent.coordination.launcher import Deploy, Failure, Halt, LauncherWarning
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.coordination.membership import CHECKPOINT, PlanReady
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from tests.agent import coordinator_run
from tests.golden import golden

ALL = [str(w) for w in Job(3, 3, 2).workers()]


def said(*pairs: str) -> list[Complaint]:
    """`W0_0>W0_1`: the first complains of the second."""
    return [Complaint(*pair.split(">")) for pair in pairs]


def again(links: Links, *pairs: str, times: int = 1, committed: int = 0, holders: Iterable[str] = ALL) -> BlameDecision:
    for _ in range(times):
        ruling = judge(links, said(*pairs), committed=committed, holders=list(holders))
        links = ruling.links
    return ruling


@pytest.mark.parametrize(
    ("complaints", "pair"),
    [
        (["W0_0>W0_1", "W0_1>W0_0"], ("W0_0", "W0_1")),
        # Whoever waits for a worker that waits, or finds the connection closed by one that gave up.
        (["W0_2>W0_1", "W1_2>W0_2", "W0_1>W0_0", "W0_0>W0_1"], ("W0_0", "W0_1")),
        (["W0_2>W0_1", "W0_1>W0_0"], ("W0_0", "W0_1")),
        (["W1_1>W0_1", "W0_2>"], ("W0_1", "W1_1")),
        (["W0_0>", "W1_1>W1_1"], None),
        # Round a circle: somebody has to be first.
        (["W0_0>W0_1", "W0_1>W0_2", "W0_2>W0_0"], ("W0_0", "W0_1")),
    ],
)
def test_complaints_are_followed_to_where_they_end(complaints: list[str], pair: tuple[str, str] | None) -> None:
    assert attribute(said(*complaints))[0] == pair
    assert attribute(reversed(said(*complaints)))[0] == pair


def test_a_pair_that_breaks_a_third_time_loses_an_end() -> None:
    once, twice, thrice = (again(Links(), "W0_0>W1_1", "W1_1>W0_0", times=n) for n in (1, 2, 3))
    for ruling in (once, twice):
        assert not ruling.out and not ruling.halt and "W0_0 and W1_1" in ruling.text
    assert thrice.out == "W1_1" and not thrice.links.barred, "of equals, the one whose name comes last"
    assert thrice.links.in_a_row == 0


def test_the_end_that_more_peers_complain_of_goes() -> None:
    links = again(Links(), "W1_1>W0_0", times=2).links
    links = again(links, "W2_1>W0_0", times=1, committed=1).links
    assert again(links, "W1_1>W0_0", "W0_0>W1_1", committed=2).out == "W0_0"


def test_the_last_holder_of_a_stage_stays() -> None:
    """Then the other end goes; where both are the last of theirs nobody does, and the job ends with their names."""
    few = ["W0_0", "W0_1", "W1_1", "W0_2"]
    assert again(Links(), "W1_1>W0_0", "W0_1>W0_0", times=3, holders=few).out in ("W0_1", "W1_1")
    last = ["W0_0", "W0_1", "W0_2"]
    rulings = [again(Links(), "W0_1>W0_0", times=n, holders=last) for n in range(1, 6)]
    assert [bool(r.halt) for r in rulings] == [False] * 4 + [True] and not any(r.out for r in rulings)
    assert "W0_0 and W0_1 (5 times)" in rulings[-1].halt


def test_committed_iterations_are_progress() -> None:
    """They end the row; and in time what broke is forgotten."""
    links = Links()
    for committed in range(0, 2000, MEMORY):
        ruling = again(links, "W0_0>W1_1", committed=committed)
        assert not ruling.out and not ruling.halt
        links = ruling.links
    assert len(links.breaks) == 1 and links.in_a_row == 1


def test_one_that_came_back_goes_for_good() -> None:
    links = again(Links(), "W0_0>W1_1", times=3, committed=7).links
    ruling = again(links, "W2_0>W1_1", committed=8)
    assert ruling.out == "W1_1" and ruling.links.barred == ("W1_1",)
    assert not again(links, "W2_0>W1_1", committed=7 + PROBATION).out


def test_what_nobody_can_name_ends_too() -> None:
    rulings = [again(Links(), "W0_0>", times=n) for n in (UNNAMED - 1, UNNAMED)]
    assert [bool(r.halt) for r in rulings] == [False, True] and "W0_0" in rulings[1].halt


def test_one_that_has_not_taken_up_the_generation_is_no_links_fault() -> None:
    """However often the others give up on it: whether it hangs, or is only slow, is for others to judge."""
    links = Links()
    for _ in range(100):
        ruling = judge(links, said("W0_0>"), committed=0, holders=ALL, late=["W2_2"])
        assert not ruling.out and not ruling.halt and "W2_2" in ruling.text
        links = ruling.links
    assert links == Links()


names = st.sampled_from(ALL)


@given(
    st.lists(
        st.tuples(
            st.lists(st.builds(Complaint, names, names | st.just("")), min_size=1, max_size=6), st.integers(0, 2)
        ),
        max_size=60,
    )
)
def test_it_never_goes_on_for_ever_and_never_takes_a_stage(history: list[tuple[list[Complaint], int]]) -> None:
    """Whatever is said: some generations without a committed iteration, and it ends; what is remembered can be
    stored."""
    links, living, committed, fruitless, stored = Links(), set(ALL), 0, 0, TypeAdapter(Links)
    for complaints, progress in history:
        fruitless = 0 if progress else fruitless + 1
        committed += progress
        ruling = judge(links, complaints, committed=committed, holders=living)
        links = stored.validate_json(stored.dump_json(ruling.links))
        assert links == ruling.links
        if ruling.halt:
            return
        if ruling.out:
            assert ruling.out in ruling.text
            living -= {ruling.out}
        assert {Worker.parse(name).stage for name in living} == {0, 1, 2}
    assert fruitless < 200


# -- a job without a console ----------------------------------------------------------------------


class Run:
    """A job of 3 x 2 whose links break."""

    def __init__(self, **about: Any) -> None:
        catalog = Catalog(Job(3, 2, 2), Technique.STAGGERED, MemoryLimit("uniform"))
        self.coordination = LocalCoordination(catalog, **about)
        self.generation, self.now = 0, 0.0
        self.living: tuple[str, ...] = ()
        self.remarks: list[str] = []
        self.refused: list[Worker | None] = []
        self.processes: dict[str, str] = {}
        for worker in Job(3, 2, 2).workers():
            self.begin(str(worker), str(worker))
        self.halt = self.take()

    def begin(self, name: str, process: str, made_of: int = 0) -> None:
        """made_of: how many of its two ranks run in the place of spare ones."""
        self.processes[name] = process
        spare = [("dead", rank) for rank in range(made_of)]
        self.coordination.ready(Worker.parse(name), process, pids=(1, 2), made_of=spare)

    def take(self) -> str:
        self.now += 10.0
        for event in self.coordination.poll(self.now):
            if isinstance(event, Halt):
                return event.reason
            if isinstance(event, LauncherWarning):
                self.remarks.append(event.text)
                self.refused.append(event.refused)
            if isinstance(event, Deploy):
                self.generation, self.living = event.deployment.generation, event.deployment.living
                self.processes |= event.deployment.incarnations
                for name in self.living:
                    self.coordination.acknowledged("adopted", Worker.parse(name), self.processes[name], self.generation)
                    self.coordination.acknowledged("formed", Worker.parse(name), self.processes[name], self.generation)
        return self.coordination.stands

    def broken(self, *pairs: str) -> str:
        for pair in pairs:
            reporter, _, peer = pair.partition(">")
            process = self.processes[reporter]
            self.coordination.failed(
                Failure(
                    "transfer", Worker.parse(reporter), process, self.generation, "timed out", peer=peer, now=self.now
                )
            )
        return self.take()


def test_a_job_without_a_console_takes_an_end_out_and_then_for_good() -> None:
    run = Run()
    for generation in (2, 3):
        assert not run.broken("W0_0>W1_1", "W1_1>W0_0") and run.generation == generation and len(run.living) == 6
        assert "W0_0 and W1_1" in run.remarks[-1]
    run.broken("W0_0>W1_1", "W1_1>W0_0")
    assert "W1_1" not in run.living and len(run.living) == 5 and golden("w1-1-is-taken-out") in run.remarks[-1]

    run.coordination.failed(Failure("exit", Worker(1, 1), "W1_1", detail="fenced"))
    run.begin("W1_1", "new")
    run.take()
    assert "W1_1" in run.living, "it may re-join"
    run.broken("W1_1>W2_0")
    assert "W1_1" not in run.living and "for good" in run.remarks[-1]
    run.coordination.failed(Failure("exit", Worker(1, 1), "new", detail="fenced"))
    run.begin("W1_1", "newer")
    run.take()
    assert run.refused[-1] == Worker(1, 1) and "W1_1" not in run.living


def test_a_job_without_a_console_ends_where_nobody_can_be_spared() -> None:
    run = Run()
    for name in ("W1_0", "W2_0", "W1_1", "W2_1"):
        run.coordination.failed(Failure("exit", Worker.parse(name), name, detail="died"))
        run.take()
    said = [run.broken("W0_1>W0_0") for _ in range(5)]
    assert not any(said[:4]) and "W0_0 and W0_1 (5 times)" in said[4]


def for_good(run: Run, name: str = "W1_1") -> None:
    """It is taken out, comes back, and is taken out for good."""
    for _ in range(3):
        run.broken(f"W0_0>{name}")
    run.begin(name, "again")
    run.take()
    assert name in run.living
    run.broken(f"W0_0>{name}")
    assert name not in run.living


def test_spare_ranks_may_take_a_place_whose_worker_is_out_for_good() -> None:
    """They run where others ran, whose links had not broken, and begin with a clean record."""
    run = Run()
    for_good(run)
    run.begin("W1_1", "of spares", made_of=2)
    run.take()
    assert "W1_1" in run.living and not any(run.refused)
    for _ in range(2):
        run.broken("W1_1>W2_0")
        assert "W1_1" in run.living, "its link has broken no more often than this"
    run.broken("W1_1>W2_0")
    assert len(run.living) == 5, "a link that breaks again and again costs an end, whoever it is"


def test_one_that_runs_in_part_where_nobody_is_known_to_be_well_may_not() -> None:
    run = Run()
    for_good(run)
    run.begin("W1_1", "of one spare", made_of=1)
    run.take()
    assert run.refused[-1] == Worker(1, 1)


def test_what_is_remembered_goes_with_the_process_that_moves() -> None:
    """And whoever comes to its place, or moves to that of one that is out for good, answers for neither."""
    links = again(Links(), "W0_0>W1_1", times=3).links
    links = replace(links, barred=("W2_2",), breaks=(Break(0, ("W0_0", "W2_1"), (("W0_0", "W2_1"),)),))
    assert links.taken_out == {"W1_1": 0}
    moved = links.moved({"W2_2": "W1_1", "W1_1": "W0_0"})
    assert moved.taken_out == {"W2_2": 0} and not moved.barred
    assert moved.breaks == (Break(0, ("W1_1", "W2_1"), (("W1_1", "W2_1"),)),)
    assert links.moved({"W1_0": "W1_2"}) == links
    swapped = links.moved({"W2_2": "W1_1", "W1_1": "W2_2"})
    assert (swapped.taken_out, swapped.barred) == ({"W2_2": 0}, ("W1_1",))


def test_whoever_comes_to_a_place_does_not_answer_for_what_was_said_of_it_when_another_link_broke() -> None:
    said = (("W0_0", "W2_1"), ("W1_0", "W1_1"))
    links = Links(breaks=(Break(0, ("W0_0", "W2_1"), said),))
    (moved,) = links.moved({"W2_2": "W1_1"}).breaks
    assert moved == Break(0, ("W0_0", "W2_1"), (("W0_0", "W2_1"), ("W1_0", "W2_2")))
    (left,) = links.without({"W1_1"}).breaks
    assert left == Break(0, ("W0_0", "W2_1"), (("W0_0", "W2_1"),))


def test_what_is_remembered_of_one_that_is_about_to_move_stays_when_its_place_is_taken() -> None:
    """Its successor there comes before the generation has opened with which it moves."""
    run = coordinator_run.Run(3, 2, checkpoints=True).start()
    for name in ("W0_1", "W1_1"):
        run.exit(name)
        run.resume()
    run.state = replace(run.state, links=Links(taken_out={"W2_0": 5, "W1_0": 7}))
    run.plans = False
    run.exit("W2_1")
    assert run.state.pending is not None and run.state.pending.moves == (("W2_0", "W0_1"),)
    run.back("W0_1")
    assert run.member("W2_0").incarnation == "W0_1-again1"
    run.send(PlanReady(run.state.pending.failed, "of the others", "made"))
    assert run.opened[-1].incarnations["W0_1"] == "W2_0-1"
    assert run.state.links.taken_out == {"W0_1": 5, "W1_0": 7}


def test_one_that_has_moved_to_such_a_place_may_be_replaced_there() -> None:
    def at_once(find: Any) -> Future[Any]:
        (found := Future[Any]()).set_result(find())
        return found

    run = Run(back_to=CHECKPOINT, checkpoint=lambda: "a checkpoint", beside=at_once)
    for_good(run, "W0_1")
    for name in ("W1_1", "W2_1"):
        run.coordination.failed(Failure("exit", Worker.parse(name), run.processes[name], detail="died"))
        run.take()
    assert run.processes["W0_1"] == "W2_0", "the place of the stage that has nobody left"
    run.coordination.failed(Failure("exit", Worker(0, 1), "W2_0", detail="died"))
    run.take()
    run.begin("W0_1", "replacement")
    run.take()
    assert not any(run.refused) and run.processes["W0_1"] == "replacement"
