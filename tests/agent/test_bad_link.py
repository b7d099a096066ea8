"""A link that carries nothing, one way, while everybody lives: it is found, one end goes, and the others train on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.launcher.launch import JobFailed
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.local_jobs import TINY, LocalJob, fault_free_losses
from tests.golden import golden

pytestmark = pytest.mark.processes

SHORT = Timeouts(form=15.0, transfer=4.0, group=5.0)


def bad_link(*lost: list[str]) -> NamedWorkload:
    return NamedWorkload("tests.agent.bad_link:BadLink", {"launcher": os.getpid(), "lost": lost, **TINY})


@pytest.mark.chaos
@pytest.mark.timeout(200)
def test_a_link_that_breaks_again_and_again_costs_one_end_of_it() -> None:
    """It may come back, and goes for good when the link is still bad."""
    grid: dict[str, Any] = {"pipelines": 2, "stages": 3, "micro_batches": 2}
    starts = 0

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        nonlocal starts
        taken_out = [x for x in job.lines if "is taken out" in x.get("warning", "")]
        if "iteration" in line and len(taken_out) > starts and line["living"] == 5:
            starts += 1
            job.start("W0_1")
        if "may not re-join" in line.get("warning", ""):
            job.stop()

    job = LocalJob(**grid, workload=bad_link(["W0_0", "W0_1"]), timeouts=SHORT, on_line=act).run()
    warnings = [line["warning"] for line in job.lines if "warning" in line]
    assert all("W0_0 and W0_1" in text for text in warnings[:4]), warnings
    assert golden("w0-1-is-taken-out") in warnings[2] and golden("it-may-re-join") in warnings[2]
    assert "for good" in warnings[3] and warnings[4].startswith(golden("w0-1-may-not-re-join"))
    assert starts == 2 and {line["living"] for line in job.iterations} == {5}
    assert job.losses == fault_free_losses(len(job.losses), **grid)


@pytest.mark.timeout(200)
def test_a_job_that_can_spare_neither_end_stops_with_their_names() -> None:
    job = LocalJob(pipelines=1, stages=2, micro_batches=2, workload=bad_link(["W0_0", "W0_1"]), timeouts=SHORT)
    with pytest.raises(JobFailed, match=golden("5-generations-in-a-row")):
        job.run()
    assert len([line for line in job.lines if "W0_0 and W0_1" in line.get("warning", "")]) == 4
