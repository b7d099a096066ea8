"""Jobs that bring their whole profile: planned as they are, shown, and taken up again by another console."""

from __future__ import annotations

import pytest
from ui_console import console_refuses

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.console.service import ConsoleService
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Job, StageProfile, Worker
from openrecycle.planner.plans.plan import job_doc

pytestmark = pytest.mark.processes

BYTES = {"activation_bytes": 100, "weight_backward_bytes": 90, "weight_bytes": 1000}
UNEVEN = Job(
    2,
    2,
    3,
    (StageProfile(6, 6, 6, 2, (0.0, 1.0), **BYTES), StageProfile(12.5, 9, 6, 1, **BYTES)),
    (0.5,),
    "ms",
    (0.25,),
    (1250, 1300),
    ((Worker(1, 1), 0.5),),
)
SIZES = {"name": "job", "pipelines": 2, "stages": 2, "micro_batches": 3, "iterations": 5}
SPEC = JobSpec.model_validate({**SIZES, "memory": "bytes", "profile": job_doc(UNEVEN)})


def test_a_profile_outlives_its_console(store: Store) -> None:
    first = ConsoleService(store)
    first.start()
    created, _ = first.jobs.create(SPEC, "key")
    assert first.queries.view(created.job_id).spec.profile == job_doc(UNEVEN)
    # The same job again, as a launcher sends it that has not heard the answer.
    assert first.jobs.create(JobSpec.model_validate_json(SPEC.model_dump_json()), "key") == (created, False)
    with console_refuses("idempotency_conflict"):
        first.jobs.create(SPEC.model_copy(update={"memory": "uniform"}), "key")
    first.close()
    second = ConsoleService(store)
    second.start()
    job = second.jobs.find(created.job_id)
    assert job.plans.job == UNEVEN and job.spec == SPEC and job.plans.catalog.memory.limits(job.plans.job) == (2, 3)
    second.close()


def test_bytes_that_hold_nothing_are_refused_with_what_would_help(store: Store) -> None:
    console = ConsoleService(store)
    small = SPEC.profile.model_copy(update={"capacity_bytes": 1050}) if SPEC.profile else None
    with console_refuses("invalid"):
        console.jobs.create(SPEC.model_copy(update={"profile": small}))
