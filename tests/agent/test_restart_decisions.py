"""Which workers are started again by themselves, and when: a pure decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from openrecycle.agent.launcher import restarts
from openrecycle.agent.launcher.restarts import (
    LONGEST_SECONDS,
    RECOVERED_SECONDS,
    DueRestart,
    Gone,
    RestartPolicy,
    Restarts,
)
from openrecycle.agent.messages.protocol import Restart
from tests.conftest import examples
from tests.golden import golden

POLICY = RestartPolicy(3, 10.0)


@dataclass
class Job:
    """One whose places are where they are, on one node each; processes are called by their place and number. unheard:
    the places where one was started that has said nothing yet."""

    policy: RestartPolicy = POLICY
    now: float = 1000.0
    committed: int = 0
    state: Restarts = field(default_factory=Restarts)
    nodes: set[int] = field(default_factory=lambda: {0, 1})
    running: dict[str, str] = field(default_factory=lambda: {"W0_0": "W0_0.0", "W1_0": "W1_0.0"})
    unheard: set[str] = field(default_factory=set)
    begun: int = 0
    tries: list[int] = field(default_factory=list)

    def ends(self, worker: str, *, asked: bool = False, node: int = 0) -> Restart | None:
        incarnation = self.running.pop(worker)
        spoke = worker not in self.unheard
        self.unheard.discard(worker)
        gone = Gone(worker, incarnation, node, self.committed, asked, spoke)
        self.state, said = restarts.ended(self.state, gone, self.policy, self.now, self.nodes.__contains__)
        return said

    def starts(self, worker: str) -> str:
        self.begun += 1
        self.running[worker] = incarnation = f"{worker}.{self.begun}"
        return incarnation

    def moves(self, source: str, to: str) -> None:
        """Whoever is in the way, and has said nothing yet, makes room."""
        came = {to: source}
        running = {to: self.running.pop(source)}
        if to in self.running:
            running[source], came[source] = self.running.pop(to), to
            self.unheard.remove(to), self.unheard.add(source)
        self.running |= running
        self.state = restarts.moved(self.state, came)

    def empty(self, worker: str) -> bool | None:
        return None if worker in self.unheard else worker not in self.running

    def goes_on(self, seconds: float, *, starts: Callable[[DueRestart], bool] = lambda one: True) -> list[str]:
        """Returns which places are filled then."""
        self.now += seconds
        found = restarts.due(self.state, self.now, self.nodes.__contains__, self.empty)
        self.state = found.restarts
        for one in found.start:
            if starts(one):
                self.state = restarts.started(self.state, one, self.starts(one.worker))
                self.tries.append(one.number)
            else:
                self.state, _ = restarts.not_started(self.state, one, self.policy, self.now)
        return [one.worker for one in found.start]

    def trains(self, worker: str, seconds: float, iterations: int = 1) -> None:
        self.state = restarts.trains(self.state, self.running[worker], self.now)
        self.now += seconds
        self.committed += iterations


def test_by_default_nobody_is_started() -> None:
    job = Job(RestartPolicy(0, 10.0))
    assert job.ends("W1_0") is None and job.goes_on(1e6) == []


def test_one_that_keeps_ending_is_started_ever_later_and_then_no_more() -> None:
    job = Job()
    for number, delay in enumerate((10.0, 20.0, 40.0), start=1):
        said = job.ends("W1_0")
        assert said == Restart(number=number, most=3, seconds=delay)
        assert job.goes_on(delay - 0.5) == [] and job.goes_on(0.5) == ["W1_0"]
        job.trains("W1_0", RECOVERED_SECONDS - 60)
    last = job.ends("W1_0")
    assert last is not None and last.number > last.most
    assert job.goes_on(1e6) == [] and job.state == Restarts()


@pytest.mark.parametrize(("number", "seconds"), [(1, 10.0), (6, 320.0), (7, LONGEST_SECONDS), (5000, LONGEST_SECONDS)])
def test_delays(number: int, seconds: float) -> None:
    assert RestartPolicy(10_000, 10.0).delay(number) == seconds
    assert RestartPolicy(10_000, 0.0).delay(number) == 0.0


def test_after_an_hour_of_training_the_count_begins_anew() -> None:
    job = Job()
    job.ends("W1_0"), job.goes_on(10), job.ends("W1_0"), job.goes_on(20)
    assert job.tries == [1, 2]
    job.trains("W1_0", RECOVERED_SECONDS)
    assert job.ends("W1_0") == Restart(number=1, most=3, seconds=10.0)


def test_an_hour_in_which_it_does_not_train_does_not_count() -> None:
    """It may wait for a frozen plan."""
    job = Job()
    job.ends("W1_0"), job.goes_on(10)
    job.now += 2 * RECOVERED_SECONDS
    job.committed += 100
    assert job.ends("W1_0") == Restart(number=2, most=3, seconds=20.0)


def test_a_job_that_comes_to_the_same_deadly_sample_again_is_no_recovery() -> None:
    """Each time all go back to a checkpoint, and train for hours until they are there again."""
    job = Job(committed=500)
    for number in (1, 2, 3):
        said = job.ends("W1_0")
        assert said is not None and said.number == number
        job.goes_on(600)
        job.trains("W1_0", 5 * RECOVERED_SECONDS, iterations=0)
    said = job.ends("W1_0")
    assert said is not None and said.number > said.most and job.goes_on(1e6) == []


def test_whom_a_person_starts_begins_a_new_count() -> None:
    job = Job(RestartPolicy(1, 10.0))
    job.ends("W1_0"), job.goes_on(10), job.ends("W1_0")
    assert job.goes_on(1e6) == [], "its only try"
    job.starts("W1_0")
    assert job.ends("W1_0") == Restart(number=1, most=1, seconds=10.0)


def test_a_place_that_somebody_has_filled_meanwhile_is_left_alone() -> None:
    job = Job()
    job.ends("W1_0")
    job.starts("W1_0")
    assert job.goes_on(10) == [] and job.state.waiting == ()


@pytest.mark.parametrize("early", [False, True], ids=["due by then", "not due yet"])
def test_a_place_that_nobody_comes_to_fill_is_left_to_whom_it_waited_for(early: bool) -> None:
    """A worker of spare ranks was to begin there, on a node that could not start it."""
    job = Job()
    job.ends("W1_0", node=1)
    job.starts("W1_0"), job.unheard.add("W1_0")
    assert job.goes_on(9 if early else 11) == []
    assert job.ends("W1_0", node=0) is None, "nothing new"
    assert job.goes_on(1) == ["W1_0"] and job.tries == [1] and not job.state.waiting
    job.ends("W1_0", node=1)
    job.starts("W1_0"), job.unheard.add("W1_0")
    assert job.goes_on(1) == [] and job.state.waiting
    job.unheard.clear()
    assert job.goes_on(1) == [] and not job.state.waiting, "it has come"


def test_who_waits_for_a_place_goes_on_waiting_for_who_makes_room_there() -> None:
    """A worker of spare ranks was begun where a whole stage had ended, and one of another stage is moved there."""
    job = Job()
    job.ends("W1_0", node=1)
    job.starts("W1_0"), job.unheard.add("W1_0")
    job.moves("W0_0", "W1_0")
    assert job.goes_on(10) == [] and job.running["W1_0"] == "W0_0.0"
    assert job.ends("W0_0", node=0) is None
    assert job.goes_on(0) == ["W0_0"] and job.tries == [1]
    job.ends("W0_0"), job.starts("W0_0"), job.unheard.add("W0_0")
    came = {"W1_0": "W0_1", "W0_1": "W0_0", "W0_0": "W1_0"}
    assert [one.worker for one in restarts.moved(job.state, came).waiting] == ["W0_1"]


def test_one_that_is_moved_as_it_comes_leaves_one_place_for_those_who_wait() -> None:
    """One waits for the place that it leaves, and one for that which it takes."""
    job = Job()
    job.ends("W1_0"), job.ends("W0_0")
    job.starts("W1_0"), job.unheard.add("W1_0")
    job.unheard.clear()
    job.moves("W1_0", "W0_0")
    assert job.goes_on(10) == ["W1_0"] and not job.state.waiting


def test_where_the_awaited_ones_node_is_gone_its_place_is_filled_on_that_of_the_newest() -> None:
    """That has only died before it said something, and the other node may never be back."""
    job = Job()
    job.ends("W1_0", node=1)
    job.starts("W1_0"), job.unheard.add("W1_0")
    job.nodes.discard(1)
    said = job.ends("W1_0", node=0)
    assert said is not None and said.node is None and job.goes_on(10) == ["W1_0"]
    job.ends("W1_0", node=1)
    job.starts("W1_0"), job.unheard.add("W1_0")
    job.nodes.clear()
    assert job.ends("W1_0", node=0) is None, "that one's node is gone, too"


def test_one_that_was_asked_to_leave_is_not_started() -> None:
    job = Job()
    assert job.ends("W1_0", asked=True) is None and job.goes_on(1e6) == []


def test_where_another_worker_has_moved_in_it_finds_the_place_that_is_empty() -> None:
    job = Job()
    job.running["W0_1"] = "W0_1.0"
    job.ends("W1_0")
    job.moves("W0_1", "W1_0")
    assert job.goes_on(10) == ["W0_1"]
    # The process that has moved keeps no count of the other's: it is the first time that it ends.
    assert job.ends("W1_0") == Restart(number=1, most=3, seconds=10.0)
    # The one that was started keeps its own, at whatever place.
    job.moves("W0_1", "W1_0")
    assert job.ends("W1_0") == Restart(number=2, most=3, seconds=20.0)


def test_of_two_empty_places_each_is_filled_once() -> None:
    """The one that had moved in ends, too, before the first could be started."""
    job = Job()
    job.running["W0_1"] = "W0_1.0"
    job.ends("W1_0")
    job.moves("W0_1", "W1_0")
    job.ends("W1_0")
    assert sorted(job.goes_on(10)) == ["W0_1", "W1_0"] and job.state.waiting == ()


def test_one_that_moves_twice_leaves_no_place_empty() -> None:
    """Each time into one for which somebody waits."""
    job = Job(running={f"W{p}_{s}": f"W{p}_{s}.0" for p in range(3) for s in range(2)})
    job.ends("W0_1")
    job.moves("W1_0", "W0_1")
    job.ends("W2_1")
    job.moves("W0_1", "W2_1")
    assert sorted(job.goes_on(10)) == ["W0_1", "W1_0"] and job.state.waiting == ()


def test_a_place_that_a_person_has_emptied_stays_so() -> None:
    """Another one had moved there, and whoever is waited for has the place that it left."""
    job = Job()
    job.running["W0_1"] = "W0_1.0"
    job.ends("W1_0")
    job.moves("W0_1", "W1_0")
    job.ends("W1_0", asked=True)
    assert job.goes_on(10) == ["W0_1"] and job.goes_on(1e6) == []


def test_one_that_ended_before_it_could_leave_is_not_started() -> None:
    """That it was asked to is known only afterwards."""
    job = Job()
    job.ends("W1_0"), job.ends("W0_0")
    job.state = restarts.without(job.state, ("W1_0",))
    assert job.goes_on(1e6) == ["W0_0"]


def test_a_job_that_was_asked_to_end_has_started_whom_it_can_not_do_without() -> None:
    """Those that come first; of a lost node only where there are no others."""
    job = Job(nodes={0}, running={f"W{p}_0": f"W{p}_0.0" for p in range(3)})
    job.ends("W2_0", node=1)
    job.now += 1
    job.ends("W1_0")
    job.now += 1
    job.ends("W0_0")

    def needed(lacking: int) -> list[str]:
        return [one.worker for one in restarts.needed(job.state, lacking, job.empty)]

    assert needed(0) == [] and needed(1) == ["W1_0"] and needed(2) == ["W1_0", "W0_0"]
    assert needed(3) == needed(9) == ["W1_0", "W0_0", "W2_0"]
    job.starts("W1_0"), job.unheard.add("W1_0")
    assert needed(1) == ["W0_0"], "whether one comes there may be known only after minutes"


def test_workers_of_a_lost_node_wait_for_it_and_that_is_no_try() -> None:
    job = Job(nodes={0})
    said = job.ends("W1_0", node=1)
    assert said is not None and said.node == 1 and said.number == 1
    assert "node 1" in said.words
    assert job.goes_on(1e6) == [] and len(job.state.waiting) == 1
    job.nodes.add(1)
    assert job.goes_on(1) == ["W1_0"] and job.tries == [1]


def test_that_a_node_is_lost_meanwhile_is_said_once() -> None:
    job = Job()
    said = job.ends("W1_0", node=1)
    assert said is not None and said.node is None
    job.nodes.discard(1)

    def held(after: float) -> list[Restart]:
        job.now += after
        found = restarts.due(job.state, job.now, job.nodes.__contains__, job.empty)
        job.state = found.restarts
        return [restarts.told(one, job.policy, job.now) for one in found.held]

    assert held(5) == [] and [one.node for one in held(5)] == [1] and held(100) == []


def test_a_failed_start_is_a_try() -> None:
    job = Job()
    job.ends("W1_0")
    assert job.goes_on(10, starts=lambda one: False) == ["W1_0"]
    assert [(one.number, one.due) for one in job.state.waiting] == [(2, job.now + 20)]
    job.goes_on(20, starts=lambda one: False), job.goes_on(40, starts=lambda one: False)
    assert job.goes_on(1e6) == [] and job.state.waiting == ()


def test_another_launcher_goes_on_with_the_same_counts_and_times() -> None:
    job = Job()
    job.ends("W1_0"), job.goes_on(10), job.trains("W1_0", 5), job.ends("W0_0")
    form = TypeAdapter(Restarts)
    told = form.validate_json(form.dump_json(job.state))
    assert told == job.state
    # By a clock that is 700 s behind.
    there = replace(job, state=told.earlier(700.0), now=job.now - 700.0, running=dict(job.running))
    assert there.goes_on(9.5) == [] and there.goes_on(0.5) == ["W0_0"]
    there.now += RECOVERED_SECONDS - 20
    there.committed += 10
    assert there.ends("W1_0") == Restart(number=2, most=3, seconds=20.0), "10 s are missing"
    here = replace(job, now=job.now + RECOVERED_SECONDS - 5, committed=job.committed + 10)
    assert here.ends("W1_0") == Restart(number=1, most=3, seconds=10.0)


@pytest.mark.parametrize(
    ("restart", "words"),
    [
        (Restart(number=2, most=3, seconds=20.0), golden("started-again-in-20-s")),
        (Restart(number=2, most=3, seconds=13.2), golden("started-again-in-20-s")),
        (Restart(number=2, most=3, seconds=0.3), golden("started-again-in-1-s")),
        (Restart(number=2, most=3, seconds=600.0), golden("started-again-in-10-min")),
        (Restart(number=2, most=3), golden("about-to-be-started-again")),
        (Restart(number=2, most=3, node=4), golden("started-again-as-soon-as")),
        (Restart(number=4, most=3), golden("not-started-again-by-itself")),
        (Restart(number=2, most=1), golden("not-started-again-by-itself-1")),
    ],
)
def test_words(restart: Restart, words: str) -> None:
    assert restart.words == words


ACTS = st.one_of(
    st.tuples(st.just("ends"), st.booleans()),
    st.tuples(st.just("goes on"), st.sampled_from([0.3, 9.0, 25.0, 700.0])),
    st.tuples(st.just("trains"), st.sampled_from([5.0, 1800.0, RECOVERED_SECONDS])),
    st.tuples(st.just("can't start"), st.sampled_from([10.0, 700.0])),
    st.tuples(st.just("node"), st.booleans()),
)


@examples(200)
@given(st.integers(1, 4), st.lists(ACTS, max_size=60))
def test_never_more_than_so_many_in_a_row(most: int, acts: list[tuple[str, object]]) -> None:
    """Whatever happens; and each as late as it has to be."""
    job = Job(RestartPolicy(most, 10.0), running={"W1_0": "W1_0.0"})
    tries, ended_at, trained = 0, 0.0, 0.0
    for act, value in acts:
        here = "W1_0" in job.running
        if act == "ends" and here:
            if trained >= RECOVERED_SECONDS:
                tries = 0
            said, ended_at, trained = job.ends("W1_0", node=1), job.now, 0.0
            assert said is not None and said.number == tries + 1
        elif act == "trains" and here:
            assert isinstance(value, float)
            job.trains("W1_0", value)
            trained += value
        elif act == "goes on" and isinstance(value, float) and not here:
            filled = job.goes_on(value)
            if filled:
                tries += 1
                assert filled == ["W1_0"] and 1 in job.nodes and tries <= most
                assert job.now >= ended_at + min(10.0 * 2 ** (tries - 1), LONGEST_SECONDS)
        elif act == "can't start" and isinstance(value, float) and not here:
            if job.goes_on(value, starts=lambda one: False):
                tries, ended_at = tries + 1, job.now
        elif act == "node":
            (job.nodes.add if value else job.nodes.discard)(1)
        assert len(job.state.waiting) <= 1 and tries <= most
    if not job.running:
        job.nodes.add(1)
        job.goes_on(1e6)
        assert ("W1_0" in job.running) == (tries < most), "while there are tries left it comes back"


PLACES = [f"W{p}_{s}" for p in range(3) for s in range(2)]
ENDS, MOVES, GOES_ON = "ends", "moves", "goes on"


@examples(200)
@given(
    st.lists(
        st.tuples(st.sampled_from([ENDS, MOVES, GOES_ON]), st.sampled_from(PLACES), st.sampled_from(PLACES)),
        max_size=40,
    )
)
def test_whoever_ends_and_moves_each_empty_place_is_waited_for_once(acts: list[tuple[str, str, str]]) -> None:
    job = Job(RestartPolicy(1000, 3.0), running={place: f"{place}.0" for place in PLACES})
    for act, worker, to in acts:
        here = worker in job.running
        if act == ENDS and here and len(job.running) > 1:
            job.ends(worker)
        elif act == MOVES and here and to not in job.running:
            job.moves(worker, to)
        elif act == GOES_ON:
            job.goes_on(1)
        assert sorted(one.worker for one in job.state.waiting) == [p for p in PLACES if p not in job.running]
    job.goes_on(1e6)
    assert sorted(job.running) == PLACES
