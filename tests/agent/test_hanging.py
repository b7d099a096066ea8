"""A worker whose training thread hangs, while its process is heard: the others go on without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.timeouts import Timeouts
from agent.workload import NamedWorkload
from tests.agent.local_jobs import TINY, LocalJob, fault_free_losses

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("local-jobs")]

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}
# Above the 10 s after which a worker says where it stands.
SHORT = Timeouts(form=60.0, transfer=11.0, group=12.0)


def test_a_worker_that_hangs_is_ended_and_says_where_it_stood(tmp_path: Path) -> None:
    """Its peers wait for its data until they give up, and for it to take up the next epoch until its launcher does."""
    once = tmp_path / "once"
    once.touch()
    hanging = {"once": str(once), "iteration": 2, "pipeline": 1, **TINY}

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if len([i for i in job.iterations if i["living"] == 3]) >= 3:
            job.stop()

    job = LocalJob(
        **GRID,
        workload=NamedWorkload("tests.agent.hanging:Hanging", hanging),
        timeouts=SHORT,
        on_line=act,
    ).run()
    assert job.dead == ["W1_0"]
    assert job.losses == fault_free_losses(len(job.losses), **GRID)
    assert len(job.said("broken")) >= 1, "its peers gave up first"
    warnings = {line["warning"] for line in job.lines if "warning" in line}
    (said,) = (text for text in warnings if text.startswith("W1_0: an epoch waits for"))
    assert "hanging.py:" in said and "MainThread at " in said
