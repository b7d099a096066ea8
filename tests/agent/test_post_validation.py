"""The validation of an iteration's gradients, and when the stages wait for it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.stages.post_validation import (
    CLEAN,
    CLEAN_NEEDED,
    MAX_CLEAN_NEEDED,
    SKIP,
    PostValidation,
    Slot,
    ValidationResult,
    judge,
)
from openrecycle.agent.workers.validation_exchange import tellers
from openrecycle.planner.jobs.job import Worker

VALIDATIONS = st.sampled_from([CLEAN, SKIP, ValidationResult(0.5)])


def _after(validations: list[ValidationResult]) -> PostValidation:
    post_validation = PostValidation()
    for validation in validations:
        post_validation = post_validation.after(validation)
    return post_validation


def test_the_validation() -> None:
    assert judge([Slot((9.0,)), Slot((16.0,))], None) == CLEAN
    assert judge([Slot((9.0,)), Slot((16.0,))], 6.0) == ValidationResult(1.0, norm=5.0)
    assert judge([Slot((9.0,)), Slot((16.0,))], 6.0).clean
    clipped = judge([Slot((9.0,)), Slot((16.0,))], 1.0)
    assert clipped.coefficient == 1.0 / (5.0 + 1e-6) and not clipped.clean
    assert judge([Slot((9.0,)), Slot((0.0,), 1)], None) == SKIP
    assert judge([Slot((math.inf,)), Slot((0.0,))], 1.0) == judge([Slot((math.nan,))], 1.0) == SKIP


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8), st.floats(1e-6, 1e6))
def test_what_is_left_of_the_norm_is_at_most_what_was_asked_for(norms: list[float], clip: float) -> None:
    coefficient = judge([Slot((n,)) for n in norms], clip).coefficient
    assert coefficient is not None and 0 < coefficient <= 1
    assert coefficient * math.sqrt(sum(norms)) <= clip * (1 + 1e-9)


def test_a_surprise_makes_the_stages_wait_until_it_has_been_calm() -> None:
    assert PostValidation().optimistic
    assert not _after([ValidationResult(0.5)]).optimistic
    assert not _after([ValidationResult(0.5)] + [CLEAN] * (2 * CLEAN_NEEDED - 1)).optimistic
    assert _after([ValidationResult(0.5)] + [CLEAN] * 2 * CLEAN_NEEDED).optimistic
    again = [ValidationResult(0.5)] + [CLEAN] * (2 * CLEAN_NEEDED - 1)
    assert not _after([*again, SKIP, *[CLEAN] * CLEAN_NEEDED]).optimistic


def test_skipped_updates_in_a_row_are_counted() -> None:
    assert _after([CLEAN, SKIP, SKIP]).skipped == 2
    assert _after([SKIP, SKIP, ValidationResult(0.5)]).skipped == 0
    assert _after([SKIP, SKIP, CLEAN]).skipped == 0


@given(st.lists(VALIDATIONS, max_size=400))
def test_no_history_makes_optimism_dear(validations: list[ValidationResult]) -> None:
    """Surprises (each costs about an iteration) stay below one in CLEAN_NEEDED, whatever the history."""
    post_validation, surprises = PostValidation(), 0
    for validation in validations:
        surprises += post_validation.optimistic and not validation.clean
        post_validation = post_validation.after(validation)
        assert (
            CLEAN_NEEDED <= post_validation.clean_needed <= MAX_CLEAN_NEEDED
            and 0 <= post_validation.calm < post_validation.clean_needed
        )
        assert PostValidation.from_json(post_validation.to_json()) == post_validation
    assert surprises <= 1 + len(validations) / CLEAN_NEEDED


@pytest.mark.parametrize("calm", range(1, 60))
def test_clipping_now_and_then_costs_less_and_less(calm: int) -> None:
    """Two thousand iterations of which every so-and-so-many-th is clipped: surprises stay below 3%."""
    post_validation, surprises = PostValidation(), 0
    for i in range(2000):
        validation = ValidationResult(0.5) if i % (calm + 1) == calm else CLEAN
        surprises += post_validation.optimistic and not validation.clean
        post_validation = post_validation.after(validation)
    assert surprises <= 60


WORKERS = st.integers(1, 5).flatmap(
    lambda stages: st.integers(1, 5).flatmap(
        lambda pipelines: st.sets(
            st.sampled_from([Worker(p, s) for p in range(pipelines) for s in range(stages)]), min_size=1
        )
    )
)


@given(WORKERS)
def test_everybody_is_told_of_every_stage_by_a_living_worker_of_it(living: set[Worker]) -> None:
    stages = {w.stage for w in living}
    for worker in living:
        told = tellers(living, worker.pipeline)
        assert set(told) == stages and told[worker.stage] == worker
        for stage, teller in told.items():
            assert teller in living and teller.stage == stage
            # In a whole pipeline nobody else is needed.
            assert teller.pipeline == worker.pipeline or Worker(worker.pipeline, stage) not in living
