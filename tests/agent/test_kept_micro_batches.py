"""What is run again after a death, when finished micro-batches are kept: a pure decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.workers.recovery import decode_finished, encode_finished, redo
from openrecycle.planner.jobs.job import Job, Worker
from tests.golden import golden

JOB = Job(2, 2, 3)
ALL = {(p, m) for p in range(2) for m in range(3)}


@given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 10))))
def test_a_set_survives_its_journey(keys: set[tuple[int, int]]) -> None:
    job = Job(13, 2, 11)
    numbers = encode_finished(keys, job)
    assert decode_finished(numbers, job) == keys and len(numbers) == len(encode_finished((), job)) == 3
    assert all(0 <= n < 2**62 for n in numbers)


def test_what_the_dead_had_is_run_again_on_all_stages() -> None:
    """Stage 0: W0_0 has pipeline 0 and W1_0 is dead; stage 1 lives and has finished everything but one."""
    finished = {Worker(0, 0): {(0, 0), (0, 1), (0, 2)}, Worker(0, 1): {(0, 0), (0, 1)}, Worker(1, 1): {(1, 0), (1, 1)}}
    first, second = redo(finished, JOB, 0), redo(finished, JOB, 1)
    assert first.run == second.run == ALL - {(0, 0), (0, 1)}
    assert first.counted == {(0, 2)}
    assert second.counted == {(1, 0), (1, 1)}


def test_nobody_finished_anything() -> None:
    assert redo(dict.fromkeys(JOB.workers(), ()), JOB, 0).run == ALL


def test_everything_is_finished() -> None:
    """Only the step is left."""
    finished = {w: {(w.pipeline, m) for m in range(3)} for w in JOB.workers()}
    assert redo(finished, JOB, 1).run == frozenset()


def test_nothing_counts_twice() -> None:
    with pytest.raises(ValueError, match=golden("two-workers-of-stage-0")):
        redo({Worker(0, 0): {(0, 0)}, Worker(1, 0): {(0, 0)}, Worker(0, 1): ()}, JOB, 0)


@given(st.data())
def test_each_micro_batch_is_counted_exactly_once_per_stage(data: st.DataObject) -> None:
    """In the sums that are kept, or by the run."""
    finished: dict[Worker, set[tuple[int, int]]] = {w: set() for w in JOB.workers()}
    for stage in range(JOB.stages):
        for key in sorted(ALL):
            holder = data.draw(st.sampled_from([None, 0, 1]))
            if holder is not None:
                finished[Worker(holder, stage)].add(key)
    for stage in range(JOB.stages):
        left = redo(finished, JOB, stage)
        kept = finished[Worker(0, stage)] | finished[Worker(1, stage)]
        added = left.run - left.counted
        assert kept | added == ALL and not kept & added
        assert left.run == redo(finished, JOB, 1 - stage).run
