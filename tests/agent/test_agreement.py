"""On which iteration survivors go on: a pure decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.workers.recovery import (
    MAX_HOLDERS,
    NoAgreementError,
    agree,
    check_alike,
    environment,
    newest_partition,
)
from openrecycle.planner.jobs.job import Worker
from tests.golden import golden


def test_nobody_had_stepped() -> None:
    agreement = agree({Worker(0, 0): 7, Worker(0, 1): 7})
    assert agreement.iteration == 7 and not agreement.roll_back


def test_those_ahead_roll_back() -> None:
    agreement = agree({Worker(0, 0): 8, Worker(1, 0): 7, Worker(0, 1): 7, Worker(1, 1): 8})
    assert agreement.iteration == 7
    assert agreement.roll_back == {Worker(0, 0), Worker(1, 1)}
    assert "2 of 4" in agreement.reason


def test_layers_that_some_have_taken_into_use_are_taken_by_all() -> None:
    """Whatever plan the generation is for."""
    assert newest_partition([(0, 3, 3), (0, 3, 3)]) == (3, 3)
    assert newest_partition([(2, 4, 2), (0, 3, 3), (0, 3, 3)]) == (4, 2)
    assert newest_partition([(2, 4, 2), (0, 4, 2)]) == (4, 2), "one came when they had them"
    assert newest_partition([(5, 3, 3), (2, 4, 2)]) == (3, 3)
    for wrong in ([(2, 4, 2), (2, 2, 4)], [(5, 1, 5), (2, 4, 2), (0, 3, 3)]):
        with pytest.raises(NoAgreementError):
            newest_partition(wrong)


def test_newcomers_take_state_from_all_living_peers_in_turn() -> None:
    counts = {Worker(p, 0): 5 if p < 2 else None for p in range(4)}
    agreement = agree(counts)
    assert agreement.state_from == {
        Worker(2, 0): (Worker(0, 0), Worker(1, 0)),
        Worker(3, 0): (Worker(1, 0), Worker(0, 0)),
    }


def test_of_many_holders_a_newcomer_asks_as_many_as_fill_its_link() -> None:
    """And the next newcomer others."""
    agreement = agree({Worker(p, 0): 5 if p < 40 else None for p in range(42)}, attempt=39)
    one, other = (agreement.state_from[Worker(p, 0)] for p in (40, 41))
    assert one[0] == Worker(39, 0) and other[0] == Worker(0, 0)
    assert len(one) == len(set(one)) == MAX_HOLDERS


def test_only_those_that_hold_the_state_agreed_on_are_asked() -> None:
    counts = {Worker(0, 0): 5, Worker(1, 0): 5, Worker(2, 0): 6, Worker(3, 0): None, Worker(4, 0): 5}
    agreement = agree(counts, incomplete={Worker(4, 0)})
    assert set(agreement.state_from[Worker(3, 0)]) == {Worker(0, 0), Worker(1, 0), Worker(2, 0)}


def test_no_peer_with_state() -> None:
    with pytest.raises(NoAgreementError, match=golden("no-living-peer-of-stage-1")):
        agree({Worker(0, 0): 5, Worker(0, 1): None})
    with pytest.raises(NoAgreementError, match=golden("no-living-worker")):
        agree({Worker(0, 0): None})


def test_counts_of_different_runs() -> None:
    with pytest.raises(NoAgreementError, match=golden("cant-be-of-one-run")):
        agree({Worker(0, 0): 5, Worker(0, 1): 7})


def test_who_fell_behind_takes_the_state_of_a_peer() -> None:
    """The others go on where the slowest stage can; nobody loses more than its last step."""
    agreement = agree({Worker(0, 0): 10, Worker(1, 0): 10, Worker(0, 1): 9, Worker(1, 1): 8})
    assert agreement.iteration == 9 and agreement.roll_back == {Worker(0, 0), Worker(1, 0)}
    assert agreement.state_from == {Worker(1, 1): (Worker(0, 1),)} and agreement.anew == {Worker(1, 1)}


def test_who_has_part_of_its_state_goes_on_with_it_while_it_keeps_step() -> None:
    counts = {Worker(0, 0): 5, Worker(1, 0): 5, Worker(2, 0): 6}
    agreement = agree(counts, incomplete={Worker(2, 0)})
    assert agreement.iteration == 5 and agreement.roll_back == {Worker(2, 0)} and not agreement.anew
    assert Worker(2, 0) in agreement.state_from
    left_behind = agree(counts | {Worker(2, 0): 3}, incomplete={Worker(2, 0)})
    assert left_behind.anew == {Worker(2, 0)} and left_behind.iteration == 5
    with pytest.raises(NoAgreementError, match=golden("no-living-peer-of-stage")):
        agree({Worker(2, 0): 5, Worker(0, 1): 5}, incomplete={Worker(2, 0)})


@given(
    base=st.integers(0, 1000),
    ahead=st.dictionaries(st.builds(Worker, st.integers(0, 5), st.integers(0, 5)), st.booleans(), min_size=1),
)
def test_everybody_ends_on_the_same_iteration(base: int, ahead: dict[Worker, bool]) -> None:
    counts = {w: base + a for w, a in ahead.items()}
    agreement = agree(counts)
    assert {counts[w] - (w in agreement.roll_back) for w in counts} == {agreement.iteration}
    assert agreement.iteration == min(counts.values())


def test_the_next_attempt_asks_another_peer_first() -> None:
    counts = {Worker(0, 0): 5, Worker(1, 0): 5, Worker(2, 0): None}
    assert {agree(counts, attempt=n).state_from[Worker(2, 0)][0] for n in (7, 8)} == {Worker(0, 0), Worker(1, 0)}


def test_workers_that_compute_differently_are_told_so() -> None:
    one, other = environment("2.13.0+cpu", 1), environment("2.13.0", 1)
    assert check_alike({Worker(0, 0): one, Worker(0, 1): other}) == {}
    with pytest.raises(NoAgreementError, match="W0_1 computes with 4 threads and W0_0 with 1"):
        check_alike({Worker(0, 0): one, Worker(0, 1): environment("2.13.0", 4)})
    with pytest.raises(NoAgreementError, match=r"W0_1 has torch 2\.12\.1 and W0_0 has 2\.13\.0"):
        check_alike({Worker(0, 0): one, Worker(0, 1): environment("2.12.1", 1)})
    with pytest.raises(NoAgreementError, match=r"W0_1 and W0_0 .*\(setting 4\)"):
        rows = {Worker(0, 0): one, Worker(0, 1): environment("2.13.0", 1, 0, 4)}
        check_alike(rows, differing=lambda mine, other: [f"setting {mine - other}"])


def test_a_newcomer_that_computes_differently_is_the_one_that_goes() -> None:
    """Whatever its place: that of the first worker, too."""
    like, unlike = environment("2.13.0", 1), environment("2.13.0", 1, 7)
    first, second, third = Worker(0, 0), Worker(1, 0), Worker(0, 1)
    for joins in (first, second, third):
        known = {first, second, third} - {joins}
        rows = {w: like if w in known else unlike for w in (first, second, third)}
        assert list(check_alike(rows, known)) == [joins]
        with pytest.raises(NoAgreementError):
            check_alike(rows | {min(known): unlike}, known)
    assert check_alike({first: like, second: like, third: like}, {first}) == {}


def test_all_that_are_in_the_job_are_compared_though_all_are_new() -> None:
    rows = {Worker(0, 0): environment("2.13.0", 1), Worker(0, 1): environment("2.13.0", 2)}
    with pytest.raises(NoAgreementError):
        check_alike(rows, ())
