"""Whose fault it is when an op raises, the data's or a worker's: a pure decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.launcher.bad_samples import (
    ATTEMPTS,
    STRIKES,
    BadSamples,
    FailedOp,
    Finding,
    assign,
    committed,
    raised,
)
from tests.golden import golden

PEERS = {f"W{p}_0": f"i{p}" for p in range(3)}


def report(worker: str, iteration: int = 5, micro_batch: int = 3, stage: int = 0, **living: str) -> FailedOp:
    incarnation = {**PEERS, **living}[worker]
    return FailedOp(worker, incarnation, stage, iteration, "F", micro_batch, "ValueError: bad", (12, 13))


def found(
    bad: BadSamples, said: FailedOp, peers: Mapping[str, str] = PEERS, *, skip: bool = True, limit: int = 9
) -> Finding:
    return raised(bad, said, peers, skip=skip, limit=limit)


def planned(micro_batch: int, stage: int) -> str:
    return f"W{micro_batch % 3}_{stage}"


def test_it_is_tried_again_on_another_worker_first() -> None:
    first = found(BadSamples(), report("W0_0"))
    assert not first.left_out and not first.halt
    assert golden("iteration-5-micro-batch-3-counted") in first.text
    bad, runs = assign(first.bad, planned, PEERS)
    assert runs == (("W0_0", ("W1_0",)), ("W1_0", ("W0_0",))) and bad.suspects[0].given == "i1"
    # Where the plan has somebody else run it by now, nobody needs to do anybody else's part.
    assert assign(first.bad, lambda micro_batch, stage: "W2_0", PEERS)[1] == ()


def test_of_a_process_that_is_gone_nothing_is_counted_any_more() -> None:
    bad = BadSamples(strikes={"gone": 2, "i2": 1})
    bad, _ = assign(found(bad, report("W0_0")).bad, planned, PEERS)
    bad, blamed = committed(bad, 6, PEERS)
    assert bad.strikes == {"i0": 1, "i2": 1} and [b.worker for b in blamed] == ["W0_0"]


def test_what_raises_on_two_workers_is_the_datas_fault() -> None:
    bad = found(BadSamples(), report("W0_0")).bad
    skipped = found(bad, report("W1_0"))
    assert skipped.left_out == (5, 3) and skipped.bad.left_out == ((5, 3),) and not skipped.bad.suspects
    assert "W0_0 and W1_0" in skipped.text
    halted = found(bad, report("W1_0"), skip=False)
    assert "samples 12, 13" in halted.halt and not halted.bad.left_out
    assert "W0_0 and W1_0" in halted.halt


@pytest.mark.parametrize("skip", [True, False])
def test_of_a_stream_that_is_over_nothing_is_left_out(skip: bool) -> None:
    over = [replace(report(worker), ends=True) for worker in ("W0_0", "W1_0")]
    first = found(BadSamples(), over[0], skip=skip)
    assert not first.halt and "tried again" in first.text
    last = found(first.bad, over[1], skip=skip)
    assert last.halt and not last.left_out and "on_bad_sample" not in last.halt


def test_alone_it_is_tried_twice() -> None:
    alone = {"W0_0": "i0"}
    first = found(BadSamples(), report("W0_0"), alone)
    assert not first.left_out and "tried again" in first.text
    assert assign(first.bad, planned, alone)[1] == ()
    assert found(first.bad, report("W0_0"), alone).left_out == (5, 3)


def test_the_limit_halts() -> None:
    bad = BadSamples()
    for n in range(2):
        bad = found(bad, report("W0_0", n), limit=2).bad
        bad = found(bad, report("W1_0", n), limit=2).bad
    bad = found(bad, report("W0_0", 7), limit=2).bad
    assert golden("2-micro-batches-were-left-out") in found(bad, report("W1_0", 7), limit=2).halt


def test_what_succeeds_elsewhere_was_its_workers_fault() -> None:
    bad = BadSamples()
    for n in range(STRIKES):
        bad = found(bad, report("W0_0", n)).bad
        bad, _ = assign(bad, planned, PEERS)
        assert committed(bad, n, PEERS)[1] == ()
        bad, (blamed,) = committed(bad, n + 1, PEERS)
        assert (blamed.worker, blamed.incarnation) == ("W0_0", "i0") and blamed.out == (n == STRIKES - 1)
        assert not bad.suspects
    # It is not taken out where it is the last.
    strikes = BadSamples(strikes={"i0": STRIKES})
    bad, _ = assign(found(strikes, report("W0_0")).bad, planned, PEERS)
    assert not committed(bad, 6, {"W0_0": "i0"})[1][0].out


def test_of_a_stage_at_fault_as_a_whole_one_stays_and_nobody_is_taken_out_twice() -> None:
    two, strikes = {"W0_0": "i0", "W1_0": "i1"}, BadSamples(strikes={"i0": STRIKES - 1, "i1": STRIKES - 1})
    bad = found(strikes, report("W0_0", micro_batch=0), two).bad
    bad = found(bad, report("W0_0", micro_batch=2), two).bad
    bad = found(bad, report("W1_0", micro_batch=1), two).bad
    bad, _ = assign(bad, lambda micro_batch, stage: ("W0_0", "W1_0")[micro_batch % 2], two)
    assert [(b.worker, b.out) for b in committed(bad, 6, two)[1]] == [("W0_0", True), ("W1_0", False)]


def test_what_then_succeeds_on_the_same_worker_is_held_against_nobody() -> None:
    alone = {"W0_0": "i0"}
    bad, _ = assign(found(BadSamples(), report("W0_0"), alone).bad, planned, alone)
    assert committed(bad, 6, alone) == (BadSamples(), ())


def test_two_that_raised_on_each_others_workers_swap_once() -> None:
    bad = found(BadSamples(), report("W0_0", micro_batch=3)).bad
    bad = found(bad, report("W1_0", micro_batch=1)).bad
    two = {"W0_0": "i0", "W1_0": "i1"}
    bad, runs = assign(bad, lambda micro_batch, stage: {3: "W0_0", 1: "W1_0"}[micro_batch], two)
    assert runs == (("W0_0", ("W1_0",)), ("W1_0", ("W0_0",))) and [s.given for s in bad.suspects] == ["i1", "i0"]


def test_one_that_fails_at_everything_is_given_nothing() -> None:
    """After a swap it fails at the other's, too."""
    two = {"W0_0": "i0", "W1_0": "i1"}
    bad = found(BadSamples(), report("W0_0", micro_batch=3), two).bad
    bad = found(bad, report("W0_0", micro_batch=1), two).bad
    bad, runs = assign(bad, lambda micro_batch, stage: {3: "W0_0", 1: "W1_0"}[micro_batch], two)
    assert runs == (("W0_0", ()), ("W1_0", ("W1_0", "W0_0"))) and [s.given for s in bad.suspects] == ["i1", "i1"]


@pytest.mark.parametrize("skip", [True, False])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 1)), max_size=40))
def test_it_is_decided_after_a_few_attempts(skip: bool, history: list[tuple[int, int, int]]) -> None:
    """Whoever raises in whatever order, and however often: no micro-batch is tried for ever."""
    bad, tries = BadSamples(), dict[tuple[int, int], int]()
    for pipeline, micro_batch, stage in history:
        key = stage, micro_batch
        if (5, micro_batch) in bad.left_out:
            continue
        peers = {f"W{p}_{stage}": f"i{p}{stage}" for p in range(3)}
        tries[key] = tries.get(key, 0) + 1
        said = report(f"W{pipeline}_{stage}", micro_batch=micro_batch, stage=stage, **peers)
        result = found(bad, said, peers, skip=skip)
        if result.halt:
            return
        bad = result.bad
        assert tries[key] < ATTEMPTS or result.left_out
        bad, runs = assign(bad, lambda m, s: f"W{m % 3}_{s}", peers)
        parts = [part for _, mine in runs for part in mine]
        assert sorted(parts) == [worker for worker, _ in runs], "every part is done, once"
