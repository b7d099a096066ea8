"""What a console is told of a job: its whole profile, or the few numbers that say as much."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.config.options import with_profile
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, StageProfile, Worker
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.profiles import load_profile
from tests.conftest import refuses
from tests.golden import golden

GRID: dict[str, Any] = {"name": "n", "pipelines": 2, "stages": 2, "micro_batches": 3, "iterations": 5}
TIMES = st.decimals(0, 500, places=3).map(float)
ABOVE_ZERO = st.decimals("0.001", 500, places=3).map(float)
BYTES = st.integers(0, 1 << 40)


def told(job: Job, memory: str = "uniform") -> JobSpec:
    """After its way over the wire."""
    spec = JobSpec.of(job, name="n", iterations=5, memory=memory)
    return JobSpec.model_validate_json(spec.model_dump_json())


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """With stages of their own, whatever a profile can say, or with stages that are alike."""
    pipelines, stages, micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    unit = draw(st.sampled_from(["slot", "ms", "us"]))
    if draw(st.booleans()):
        times = {"F": draw(ABOVE_ZERO), "I": draw(ABOVE_ZERO), "W": draw(TIMES), "O": draw(TIMES)}
        return Job.uniform(pipelines, stages, micro_batches, durations=times, time_unit=unit)
    profiles = [
        StageProfile(
            *(draw(ABOVE_ZERO), draw(ABOVE_ZERO), draw(TIMES), draw(TIMES)),
            tuple(draw(st.lists(TIMES, min_size=pipelines, max_size=pipelines))) if draw(st.booleans()) else (),
            *(draw(BYTES) for _ in range(4)),
        )
        for _ in range(stages)
    ]
    between = st.lists(TIMES, min_size=stages - 1, max_size=stages - 1).map(tuple)
    return Job(
        pipelines,
        stages,
        micro_batches,
        tuple(profiles),
        draw(between),
        unit,
        draw(between),
        draw(st.sampled_from([(), (1 << 36,) * stages])),
        draw(st.sampled_from([(), ((Worker(0, stages - 1), 0.5),)])),
    )


@given(jobs())
def test_the_console_plans_the_job_that_the_launcher_has(job: Job) -> None:
    assert told(job).job() == job


def test_stages_that_are_alike_need_no_profile() -> None:
    spec = told(Job.uniform(2, 2, 3, durations={"F": 1.5, "I": 2.0, "W": 0.25, "O": 3.0}, time_unit="ms"))
    assert spec.durations == {"F": 1.5, "I": 2, "W": 0.25, "O": 3, "transfer": 0}
    assert spec.profile is None
    assert told(Job(2, 2, 3)).durations == {}


def test_durations_are_whole_microseconds() -> None:
    spec = JobSpec.model_validate_json(json.dumps({**GRID, "durations": {"F": 1, "I": 1, "W": 1.23456}}))
    assert spec.job().profiles[1] == StageProfile(1, 1, 1.235) and spec.job().time_unit == "ms"


def test_one_profile_says_it() -> None:
    profile = job_doc(Job(2, 2, 3, (StageProfile(1), StageProfile(2))))
    with refuses("durations"):
        JobSpec(**GRID, durations={"F": 1}, profile=profile).job()
    with refuses("profile.pipelines", 2):
        JobSpec(**{**GRID, "pipelines": 4}, profile=profile).job()


def test_memory_in_bytes_needs_bytes() -> None:
    with pytest.raises(InputError, match="capacity_bytes"):
        JobSpec(**GRID, memory="bytes").job()
    held = StageProfile(activation_bytes=100, weight_backward_bytes=80, weight_bytes=1000)
    job = Job(2, 2, 3, (held, held), capacity_bytes=(1250, 1250))
    spec = told(job, "bytes")
    assert MemoryLimit(spec.memory).limits(spec.job()) == (2, 2)
    with pytest.raises(InfeasibleError, match=golden("memory-holds-0-5-of")):
        told(replace(job, capacity_bytes=(1050, 1250)), "bytes").job()


def test_a_profile_gives_a_grid_its_op_times(tmp_path: Path) -> None:
    grid, own = Job(2, 2, 3), Job(2, 2, 3, (StageProfile(1), StageProfile(2)), time_unit="ms")
    assert with_profile(grid, None) is grid
    assert with_profile(grid, job_doc(own)) == own
    (tmp_path / "job.json").write_text(job_doc(own).model_dump_json())
    assert with_profile(grid, tmp_path / "job.json") == own
    shipped = load_profile("gpt-3-medium")
    assert with_profile(grid, "gpt-3-medium") == with_profile(grid, shipped) == shipped.job_for(2, 2, 3)
    with refuses("profile", "gpt-3-medium"):
        with_profile(own, "gpt-3-medium")
    with refuses("job.stages", 2):
        with_profile(grid, job_doc(Job(2, 3, 3)))


def test_a_measured_capacity_is_planned_with(tmp_path: Path) -> None:
    measured = load_profile("gpt-3-medium").model_copy(update={"capacity_bytes": 1 << 36})
    assert measured.job_for(2, 4, 8).capacity_bytes == (1 << 36,) * 4
    # Documents of workers whose memory nobody has said are as they were.
    assert "capacity_bytes" not in json.loads(load_profile("gpt-3-medium").model_dump_json())
    written = tmp_path / "profile.json"
    written.write_text(measured.profile(2, 4, 8).model_dump_json())
    assert load_profile(written).job.job().capacity_bytes == (1 << 36,) * 4
