"""A worker whose training thread hangs, while its process is heard: the others go on without it. One that is only slow,
that waits, or whose library lets nobody speak, stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.local_jobs import TINY, LocalJob, fault_free_losses
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}
# Transfers and generations have minutes: nothing but the op's own limit may notice.
SHORT = Timeouts(form=60.0, op=3.0)


def job_of(workload: str, options: dict[str, Any], timeouts: Timeouts = SHORT, **more: Any) -> LocalJob:
    return LocalJob(
        **GRID, workload=NamedWorkload(f"tests.agent.hanging:{workload}", options | TINY), timeouts=timeouts, **more
    )


@pytest.mark.parametrize(
    ("workload", "where", "stage"),
    [at_length("Hanging", {"iteration": 5, "pipeline": 1}, 0), ("SlowForward", {"iteration": 5, "pipeline": 1}, 1)],
    ids=["in its data", "in its forward"],
)
def test_a_worker_that_hangs_is_ended_and_says_where_it_stood(
    workload: str, where: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    once.touch()
    begun: list[float] = []
    noticed: list[float] = []

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if "warning" in line and " is at " in line["warning"]:
            noticed.append(time.monotonic())
        if len([i for i in job.iterations if i["living"] == 3]) >= 3:
            job.stop()

    def watch(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        if not begun and not once.exists():
            begun.append(time.monotonic())

    job = job_of(workload, {"once": str(once), **where}, on_line=act, on_message=watch).run()
    (dead,) = job.dead
    assert dead.endswith(f"_{stage}")
    assert job.losses == fault_free_losses(len(job.losses), **GRID)
    stands, why = [line["warning"] for line in job.lines if "warning" in line and " is at " in line["warning"]]
    assert stands.startswith(f"{dead} is at ") and "hanging.py:" in stands and "MainThread at " in stands
    assert why.startswith(f"{dead} ") and golden("hangs-it-is-at") in why
    assert noticed[0] - begun[0] < SHORT.transfer, "no wait for it had run out"


def test_what_is_slow_before_it_was_ever_measured_is_no_hang(tmp_path: Path) -> None:
    """As a first compilation: it takes several times what a measured op may take."""
    once = tmp_path / "once"
    once.touch()
    timeouts = Timeouts(op=1.0)
    job = job_of(
        "SlowForward", {"once": str(once), "iteration": 0, "pipeline": 0, "seconds": 6.0}, timeouts, iterations=4
    ).run()
    assert not once.exists() and not job.dead
    assert job.losses == fault_free_losses(4, **GRID)


def test_a_library_that_lets_nobody_speak_while_it_computes_is_no_silence(tmp_path: Path) -> None:
    """For longer than a silence is borne, and than such an op may take."""
    once = tmp_path / "once"
    once.touch()
    options = {"once": str(once), "iteration": 5, "pipeline": 0, "seconds": 7.0, "gil": True}
    job = job_of("SlowForward", options, Timeouts(op=4.0), hang_seconds=4.0, iterations=12).run()
    assert not once.exists() and not job.dead
    assert job.losses == fault_free_losses(12, **GRID)


@pytest.mark.chaos
def test_one_that_never_lets_go_is_ended(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if len([i for i in job.iterations if i["living"] == 3]) >= 2:
            job.stop()

    options = {"once": str(once), "iteration": 5, "pipeline": 0, "gil": True}
    # Paced, so that its ops are measured by then, and that is known.
    job = job_of("SlowForward", options, Timeouts(op=2.0), hang_seconds=4.0, on_line=act, pace=0.1).run()
    assert len(job.dead) == 1
    assert job.losses == fault_free_losses(len(job.losses), **GRID)


def test_a_stage_that_is_slow_as_a_whole_is_not_fenced() -> None:
    """Its disk is: who would go on without it?"""
    job = job_of("SlowData", {"iteration": 8, "seconds": 8.0}, iterations=12, pace=0.02).run()
    assert not job.dead
    assert job.losses == fault_free_losses(12, **GRID)
    assert [line for line in job.lines if "warning" in line and golden("loading-the-data") in line["warning"]]
