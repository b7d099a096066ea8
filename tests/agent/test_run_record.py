"""When an iteration counts as committed, and what is said of a failure."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import pytest

from openrecycle.agent.launcher.record import (
    WARNING,
    DataWait,
    DivergedError,
    RunRecord,
    is_remark,
    is_warning,
    sentence_of,
)
from openrecycle.agent.messages.protocol import Iteration
from openrecycle.planner.jobs.job import Worker
from tests.golden import golden

A, B, C, D = (Worker(p, s) for p in range(2) for s in range(2))  # B and D are the last stage
MS = 1_000_000


def _running(exact: bool = True) -> RunRecord:
    record = RunRecord(stages=2, started_at=0, exact=exact)
    record.generation_opened(1, [A, B, C, D], at=0)
    for worker in (A, B, C, D):
        record.formed(worker, 1, 0, at=1 * MS)
    return record


def test_an_iteration_is_committed_when_the_last_worker_has_stepped() -> None:
    record = _running()
    for worker in (A, B, C):
        assert not record.committed_by(worker, 0, (2.5).hex(), at=5 * MS).iterations
    (iteration,) = record.committed_by(D, 0, (2.5).hex(), at=9 * MS).iterations
    assert (iteration.iteration, iteration.loss, iteration.living, iteration.generation) == (0, 2.5, 4, 1)
    assert iteration.seconds == pytest.approx(0.009)


def test_what_is_done_again_after_a_checkpoint_leaves_nothing_behind() -> None:
    """Else each copy for other nodes would hold it, for the rest of the job."""

    def done(record: RunRecord, again: bool) -> str:
        for generation in (2, 3) if again else (3,):
            record.generation_opened(generation, [A, B, C, D], at=5 * MS)
            for worker in (A, B, C, D):
                record.formed(worker, generation, 0, at=6 * MS)
            for iteration in range(50):
                for worker in (A, B, C, D):
                    record.committed_by(worker, iteration, (2.5).hex(), at=(7 + iteration) * MS)
        return json.dumps(record.saved())

    assert len(done(_running(), again=True)) == len(done(_running(), again=False))


def _said(record: RunRecord, *heard: int | tuple[int, str], there: int = 0) -> list[tuple[int, bool]]:
    """Of checkpoints, every 4 iterations: what is said when that is heard; True: it is written."""
    told = [(one, None) if isinstance(one, int) else one for one in heard]
    said = [line for about in told for line in record.checkpoint(*about, 4, lambda iteration: iteration == there)]
    return [(iteration, problem is None) for iteration, problem in said]


def test_a_checkpoint_of_which_nobody_has_said_anything_is_missed_when_the_next_is_written() -> None:
    """A worker died before its share was written; that of another died once the checkpoint was whole."""
    assert _said(_running(), 4, 8, 16, 18) == [(4, True), (8, True), (12, False), (16, True), (18, True)]
    assert _said(_running(), 12, there=8) == [(4, False), (8, True), (12, True)]
    assert _said(RunRecord(stages=2, started_at=0, committed=10), 16) == [(12, False), (16, True)]


def test_a_checkpoint_that_is_written_again_or_fails_at_several_workers_is_said_once() -> None:
    full = "no space"
    assert _said(_running(), 4, 4, (4, full)) == [(4, True)]
    assert _said(_running(), (4, full), (4, full), (8, full), (4, full), 12) == [(4, False), (8, False), (12, True)]
    assert _said(_running(), (4, full), 4) == [(4, False), (4, True)], "a later generation could write it"
    record = _running()
    assert _said(record, 4, 8, 12)
    restored = RunRecord.restored(2, json.loads(json.dumps(record.saved())), [], 0)
    assert not _said(restored, 12), "by another launcher"


def test_checkpoints_are_said_once_more_after_all_went_back_behind_them() -> None:
    record = _running()
    assert _said(record, 4, 8, 12)
    record.generation_opened(2, [A, B, C, D], at=5 * MS)
    record.formed(A, 2, 12, at=6 * MS)
    assert not _said(record, 12)
    record.generation_opened(3, [A, B, C, D], at=7 * MS)
    record.formed(A, 3, 4, at=8 * MS)
    assert _said(record, 12) == [(8, False), (12, True)]


def test_a_death_before_its_step_does_not_hold_up_what_all_others_committed() -> None:
    record = _running()
    for worker in (A, B, C):
        record.committed_by(worker, 0, (2.5).hex(), at=5 * MS)
    record.died(D, detected_at=6 * MS)
    (iteration,) = record.generation_opened(2, [A, B, C], at=7 * MS).iterations
    assert iteration.living == 3


def test_what_nobody_knows_the_loss_of_is_left_out() -> None:
    """Who computed it, on a node whose launcher stood still, is lost, and nobody has heard of it. All go on from a
    checkpoint that is further than what is recorded; or a newcomer from the state of a peer."""
    record = _running()
    for iteration in range(4):
        for worker in (A, C):
            record.committed_by(worker, iteration, (0.0).hex(), at=(5 + iteration) * MS)
    for worker in (B, D):
        record.committed_by(worker, 0, (2.5).hex(), at=5 * MS)
    for worker in (B, D):
        record.died(worker, detected_at=20 * MS)
    record.generation_opened(2, [A, B, C, D], at=21 * MS, joining=[B, D])
    recorded = [record.formed(worker, 2, 3, at=30 * MS) for worker in (A, B, C, D)]
    unknown = [iteration for some in recorded for iteration in some.unknown]
    assert [i.iteration for i in unknown] == [1, 2] and record.committed == 3
    assert all(math.isnan(i.loss) for i in unknown), "a console counts them"
    recorded = [record.committed_by(w, 3, (1.5).hex(), at=40 * MS) for w in (A, B, C, D)]
    assert [(i.iteration, i.loss) for some in recorded for i in some.iterations] == [(3, 1.5)]
    assert sorted(r.worker for some in recorded for r in some.recoveries) == [str(B), str(D)]


def test_who_was_done_before_a_death_is_not_done_after_it() -> None:
    """The dead one was to write its stage's weights: its peer has to first."""
    record = _running()
    for worker in (A, B, C, D):
        record.committed_by(worker, 0, (2.5).hex(), at=5 * MS)
    for worker in (B, C, D):
        record.done(worker, "hash", 1)
    record.died(A, detected_at=6 * MS)
    record.generation_opened(2, [B, C, D], at=7 * MS)
    record.done(D, "hash", 1)  # under way for long
    assert not record.finished(1)
    for worker in (B, C, D):
        assert not record.finished(1)
        record.done(worker, "hash", 2)
    assert record.finished(1)


def test_a_failure_is_survived_though_the_job_ends_before_the_generation_after_the_next() -> None:
    record = _running()
    record.died(D, detected_at=10 * MS)
    record.generation_opened(2, [A, B, C], at=11 * MS)
    for worker in (A, B, C):
        record.formed(worker, 2, 0, at=30 * MS)
    record.generation_opened(3, [A, B, C], at=40 * MS, after=1)
    recorded = [record.committed_by(w, 0, (2.5).hex(), at=70 * MS) for w in (A, B, C)]
    assert [r.worker for some in recorded for r in some.recoveries] == [str(D)]


def test_of_what_workers_wait_for_data_the_longest_counts() -> None:
    record = _running()
    recorded = [
        record.committed_by(worker, 0, (2.5).hex(), at=50 * MS, data_seconds=waited)
        for worker, waited in ((A, 0.004), (B, 0.001), (C, 0.03), (D, 0.0))
    ]
    assert [i.data_seconds for some in recorded for i in some.iterations] == [0.03]


@pytest.mark.parametrize(("waited", "said"), [(0.5, 1), (0.05, 0)])
def test_a_long_wait_for_data_is_said_once(waited: float, said: int) -> None:
    wait = DataWait()
    about = {"loss": 1.0, "loss_hex": (1.0).hex(), "seconds": 1.0, "generation": 1, "living": 4}
    texts = [wait.after(Iteration(iteration=i, **about, data_seconds=waited)) for i in range(100)]  # type: ignore[arg-type]
    assert len(list(filter(None, texts))) == said


def test_an_iteration_that_was_rolled_back_is_recorded_once() -> None:
    record = _running()
    record.committed_by(A, 0, (0.0).hex(), at=5 * MS)
    record.committed_by(B, 0, (2.5).hex(), at=5 * MS)
    record.dying(D, at=6 * MS)
    record.died(D, detected_at=10 * MS)
    assert not record.generation_opened(2, [A, B, C], at=11 * MS).iterations
    for worker, left in ((A, 20), (B, 22), (C, 21)):
        record.left(worker, at=left * MS)
    for worker in (A, B, C):
        assert not record.formed(worker, 2, 0, at=30 * MS).iterations
    record.committed_by(A, 0, (0.0).hex(), at=70 * MS)
    record.committed_by(B, 0, (2.5).hex(), at=71 * MS)
    recorded = record.committed_by(C, 0, (0.0).hex(), at=72 * MS)
    assert [i.iteration for i in recorded.iterations] == [0]
    (recovery,) = recorded.recoveries
    times = (recovery.detected_ms, recovery.unblocked_ms, recovery.reformed_ms, recovery.resumed_ms)
    assert times == (4.0, 16.0, 24.0, 66.0) and recovery.death_known


def test_a_recovery_of_weeks_is_recorded() -> None:
    """All waited for somebody, say, or were suspended; a message takes no more than twelve days."""
    record, week = _running(), 7 * 24 * 3_600_000
    record.dying(D, at=0)
    record.died(D, detected_at=2 * week * MS)
    record.generation_opened(2, [A, B, C], at=3 * week * MS)
    for worker in (A, B, C):
        record.formed(worker, 2, 0, at=3 * week * MS)
    recorded = [record.committed_by(w, 0, (2.5).hex(), at=4 * week * MS) for w in (A, B, C)]
    (recovery,) = recorded[-1].recoveries
    assert (recovery.detected_ms, recovery.unblocked_ms, recovery.resumed_ms) == (1e9, 0.0, 1e9)


def test_redone_to_another_loss_is_an_error() -> None:
    record = _running()
    record.committed_by(B, 0, (2.5).hex(), at=5 * MS)
    with pytest.raises(DivergedError, match="iteration 0"):
        record.committed_by(D, 0, (2.25).hex(), at=6 * MS)


def test_a_newcomer_counts_from_where_it_joined() -> None:
    record = _running()
    record.died(C, detected_at=2 * MS)
    record.generation_opened(2, [A, B, D], at=3 * MS)
    for worker in (A, B, D):
        record.formed(worker, 2, 0, at=4 * MS)
        record.committed_by(worker, 0, (2.5).hex(), at=5 * MS)
    assert record.committed == 1
    record.generation_opened(3, [A, B, C, D], at=6 * MS)
    for worker in (A, B, C, D):
        record.formed(worker, 3, 1, at=7 * MS)
        record.committed_by(worker, 1, (2.25).hex(), at=8 * MS)
    assert record.committed == 2


def test_final_hash_is_over_the_stages_in_order_and_peers_must_agree() -> None:
    record = _running()
    one, two = hashlib.sha256(b"1").hexdigest(), hashlib.sha256(b"2").hexdigest()
    for worker, sha in ((A, one), (B, two), (C, one), (D, two)):
        record.committed_by(worker, 0, (2.5).hex(), at=5 * MS)
        assert not record.finished(1)
        record.done(worker, sha, 1)
    assert record.finished(1) and not record.finished(2)
    expected = hashlib.sha256(bytes.fromhex(one) + bytes.fromhex(two)).hexdigest()
    assert record.final() == {"parameters_sha256": expected, "iterations": 1}
    record.done(C, two, 1)
    with pytest.raises(DivergedError, match="stage 0"):
        record.final()


def test_a_process_that_never_was_a_member_is_no_failure() -> None:
    record = _running()
    record.died(Worker(5, 5), detected_at=1 * MS)
    recoveries = []
    for worker in (A, B, C, D):
        recoveries += record.committed_by(worker, 0, (2.5).hex(), at=50 * MS).recoveries
    assert recoveries == []


def test_the_failure_of_a_hung_worker_is_recorded_once() -> None:
    record = _running()
    record.generation_opened(2, [A, B, C], at=20 * MS)
    record.died(D, detected_at=21 * MS)
    recoveries = []
    for worker in (A, B, C):
        record.left(worker, at=22 * MS)
        record.formed(worker, 2, 0, at=30 * MS)
    for worker in (A, B, C):
        recoveries += record.committed_by(worker, 0, (2.5).hex(), at=50 * MS).recoveries
    (recovery,) = recoveries
    assert (recovery.worker, recovery.generation, recovery.death_known) == (str(D), 2, False)
    assert recovery.resumed_ms == 29.0


def test_the_second_death_of_a_worker_is_recorded_with_the_generation_that_follows_it() -> None:
    """While a person is waited for, messages of the others come in between a death and the generation without it."""
    record = _running()

    def train(generation: int, iteration: int, *workers: Worker) -> list[str]:
        for worker in workers:
            record.formed(worker, generation, iteration, at=10 * generation * MS)
        said = [record.committed_by(w, iteration, (2.5).hex(), at=(10 * generation + 5) * MS) for w in workers]
        return [f"{r.worker} {r.generation}" for some in said for r in some.recoveries]

    record.died(D, detected_at=2 * MS)
    record.committed_by(A, 0, (2.5).hex(), at=3 * MS)  # on its way when D died
    record.generation_opened(2, [A, B, C], at=20 * MS)
    assert train(2, 0, A, B, C) == [f"{D} 2"]
    record.generation_opened(3, [A, B, C, D], at=30 * MS, after=0, joining={D})
    assert train(3, 1, A, B, C, D) == []
    record.died(D, detected_at=36 * MS)
    assert train(3, 2, A, B, C) == [], "nobody has gone on without it yet"
    record.generation_opened(4, [A, B, C], at=40 * MS)
    assert train(4, 3, A, B, C) == [f"{D} 4"]


def test_iterations_before_a_change_belong_to_the_old_generation_and_wait_for_no_newcomer() -> None:
    record = _running()
    record.died(D, detected_at=2 * MS)
    record.generation_opened(2, [A, B, C], at=3 * MS)
    for worker in (A, B, C):
        record.formed(worker, 2, 0, at=4 * MS)
    assert record.formed_by_all and record.newest == 0
    # D is back, and enters after iteration 1.
    assert not record.generation_opened(3, [A, B, C, D], at=5 * MS, after=1).iterations
    assert not record.formed_by_all
    for i in range(2):
        for worker in (A, B, C):
            lines = record.committed_by(worker, i, (1.5).hex(), at=(10 + i) * MS).iterations
        assert [(line.iteration, line.generation, line.living) for line in lines] == [(i, 2, 3)]
    for worker in (A, B, C, D):
        record.formed(worker, 3, 2, at=20 * MS)
    for worker in (A, B, C):
        assert not record.committed_by(worker, 2, (1.5).hex(), at=30 * MS).iterations
    (line,) = record.committed_by(D, 2, (1.5).hex(), at=31 * MS).iterations
    assert (line.iteration, line.generation, line.living) == (2, 3, 4)


def test_a_death_is_recorded_though_another_worker_takes_the_place_at_once() -> None:
    """B and D die together; C becomes B before any generation without B has settled."""
    record = _running()
    record.died(D, detected_at=2 * MS)
    record.died(B, detected_at=2 * MS)
    record.generation_opened(2, [A, B, C], at=3 * MS)
    record.moved({B: C})
    record.generation_opened(3, [A, B], at=3 * MS, joining=[B])
    for worker in (A, B):
        record.formed(worker, 3, 0, at=9 * MS)
    record.committed_by(A, 0, (0.0).hex(), at=20 * MS)
    recorded = record.committed_by(B, 0, (2.5).hex(), at=21 * MS)
    assert [i.living for i in recorded.iterations] == [2]
    assert sorted(r.worker for r in recorded.recoveries) == sorted([str(B), str(D)])


def test_iterations_run_again_from_a_checkpoint_must_have_the_recorded_loss() -> None:
    record = _running()
    for i in range(2):
        for worker in (A, B, C, D):
            record.committed_by(worker, i, (float(i)).hex() if worker.stage else (0.0).hex(), at=5 * MS)
    assert record.committed == 2
    for worker in (A, B, C, D):
        record.formed(worker, 1, 0, at=9 * MS)
    assert not record.committed_by(B, 0, (0.0).hex(), at=10 * MS).iterations
    with pytest.raises(DivergedError, match="iteration 1"):
        record.committed_by(B, 1, (1.5).hex(), at=10 * MS)


def _redone_with(record: RunRecord, loss: str) -> str:
    """Only the last stage steps iteration 0; A dies; all do it again, with this loss. Returns the recorded one."""
    for worker in (B, D):
        record.committed_by(worker, 0, (2.5).hex(), at=5 * MS)
    record.died(A, detected_at=6 * MS)
    record.generation_opened(2, [B, C, D], at=7 * MS)
    for worker in (B, C, D):
        record.formed(worker, 2, 0, at=8 * MS)
    done = [record.committed_by(worker, 0, loss, at=9 * MS) for worker in (B, C, D)]
    return next(i.loss_hex for some in done for i in some.iterations)


def test_an_iteration_that_is_done_again_has_the_same_loss() -> None:
    with pytest.raises(DivergedError):
        _redone_with(_running(), (2.25).hex())


def test_in_fast_mode_the_loss_of_the_newest_generation_counts() -> None:
    record = _running(exact=False)
    assert _redone_with(record, (2.25).hex()) == (2.25).hex()
    with pytest.raises(DivergedError):  # of one generation all say the same
        for worker, loss in ((B, 2.0), (C, 2.0), (D, 2.5)):
            record.committed_by(worker, 1, loss.hex(), at=11 * MS)


def test_without_a_micro_batch_the_loss_is_another_one() -> None:
    record = _running()
    record.left_out(0, 3)
    assert _redone_with(record, (2.25).hex()) == (2.25).hex()
    assert record.skipped == {0: (3,)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"said": golden("the-console-does-not-answer", WARNING)}, True),
        ({"said": "job 7 at http://127.0.0.1:8501"}, False),
        ({"warning": "W0_1 is at a forward for 90 s"}, True),
        ({"checkpoint": {"iteration": 3, "problem": golden("the-disk-is-full")}}, True),
        ({"checkpoint": {"iteration": 3, "problem": None}}, False),
        ({"validation": {"iteration": 3, "coefficient": None, "redone": False}}, True),
    ],
)
def test_what_is_wrong_is_told_from_what_is_not(line: dict[str, Any], expected: bool) -> None:
    """Of lines of the record and of what is said beside it, in one place."""
    assert is_remark(line) and is_warning(line) is expected


@pytest.mark.parametrize("coefficient", [0.5, 1.0])
def test_gradients_that_are_clipped_are_nothing_out_of_the_ordinary(coefficient: float) -> None:
    """Nothing is lost where that comes out after the step, which is then taken again."""
    line = {"validation": {"iteration": 3, "coefficient": coefficient, "redone": True}}
    assert not is_remark(line) and not is_warning(line)


def test_layers_that_come_to_their_stages_at_the_end_are_said_of_no_iteration_that_there_is_not() -> None:
    about: dict[str, Any] = {"generation": 3, "iteration": 6, "partition": [3, 2, 1], "moved_layers": 4}
    assert golden("after-6-iterations-4-moved") in sentence_of({"relayout": {**about, "stall_ms": 1.0, "reason": ""}})
