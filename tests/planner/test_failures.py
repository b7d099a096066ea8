from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.failures import canonical_pattern, failures_per_stage, parse_failed, patterns
from openrecycle.planner.jobs.job import Job, Worker

JOB = Job.uniform(3, 4, 6)


def test_names_are_read() -> None:
    assert parse_failed(["W1_2", " W0_3 ", "W1_2"], JOB) == {Worker(1, 2), Worker(0, 3)}


@pytest.mark.parametrize("name", ["W3_0", "W0_4", "w1_2", "1_2", "W1", "", "W-1_2", "W1_2x", "W1_²"])
def test_other_names_are_refused_with_field_and_value(name: str) -> None:
    with pytest.raises(InputError) as error:
        parse_failed([name], JOB)
    assert error.value.field == "--fail"
    assert repr(name) in str(error.value)


def test_failures_are_counted_by_stage() -> None:
    assert failures_per_stage(parse_failed(["W1_2", "W0_2", "W0_3"], JOB), JOB) == (0, 0, 2, 1)


failure_sets = st.frozensets(st.builds(Worker, st.integers(0, 2), st.integers(0, 3)), max_size=6)


@given(failure_sets, st.permutations(range(3)))
def test_renaming_pipelines_does_not_change_the_pattern(failed: frozenset[Worker], names: list[int]) -> None:
    renamed = frozenset(Worker(names[w.pipeline], w.stage) for w in failed)
    assert canonical_pattern(failed, JOB)[0] == canonical_pattern(renamed, JOB)[0]


@given(failure_sets)
def test_the_permutation_leads_to_the_pattern(failed: frozenset[Worker]) -> None:
    pattern, permutation = canonical_pattern(failed, JOB)
    assert sorted(permutation) == [0, 1, 2]
    assert {Worker(permutation[w.pipeline], w.stage) for w in failed} == pattern
    assert canonical_pattern(pattern, JOB) == (pattern, (0, 1, 2))


@pytest.mark.parametrize("count", range(5))
def test_patterns_are_those_of_all_failure_sets_with_living_peers(count: int) -> None:
    every = (frozenset(workers) for workers in combinations(JOB.workers(), count))
    survivable = (f for f in every if max(failures_per_stage(f, JOB)) < JOB.pipelines)
    expected = {canonical_pattern(f, JOB)[0] for f in survivable}
    listed = list(patterns(JOB, count))
    assert len(listed) == len(set(listed))
    assert set(listed) == expected
