"""The store through which groups form dies or hangs: trainers don't notice, and the next generation forms anew."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.transport.store import Unanswered
from tests.agent.local_jobs import LocalJob, fault_free_losses

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}
ITERATIONS = 8


@pytest.fixture(scope="module")
def losses() -> list[str]:
    return fault_free_losses(ITERATIONS, **GRID)


def test_while_all_train_and_a_worker_dies_afterwards(losses: list[str]) -> None:
    def strike(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 1:
            job.signal("store", signal.SIGKILL)

    job = LocalJob(**GRID, iterations=ITERATIONS, kills=("W0_1@5:F1",), on_line=strike).run()
    assert job.losses == losses and job.dead == ["W0_1"]
    generations = [line["generation"] for line in job.iterations]
    # The last one before the death may have been committed by some only when the next generation opened.
    assert generations[:4] == [1] * 4 and generations[4] in (1, 2) and generations[5:] == [2] * 3, (
        "the store's death opened no generation"
    )


def test_while_a_generation_forms(losses: list[str]) -> None:
    def strike(job: LocalJob, deployment: Any) -> None:
        if deployment.generation == 2:
            job.signal("store", signal.SIGKILL)

    job = LocalJob(**GRID, iterations=ITERATIONS, kills=("W0_1@2:F1",), on_generation=strike).run()
    assert job.losses == losses and job.dead == ["W0_1"]
    assert job.iterations[-1]["living"] == 3


def test_before_anybody_has_met(losses: list[str]) -> None:
    def strike(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        if message["kind"] == "ready" and worker == "W0_0":
            job.signal("store", signal.SIGKILL)

    job = LocalJob(**GRID, iterations=ITERATIONS, on_message=strike).run()
    assert job.losses == losses and not job.dead


def test_one_that_hangs_is_replaced_while_a_generation_forms(losses: list[str]) -> None:
    stopped = list[int]()

    def strike(job: LocalJob, deployment: Any) -> None:
        if deployment.generation == 2 and not stopped:
            stopped.append(job.launcher.pids["store"])
            job.signal("store", signal.SIGSTOP)

    job = LocalJob(**GRID, iterations=ITERATIONS, kills=("W0_1@2:F1",), on_generation=strike).run()
    assert job.losses == losses and job.dead == ["W0_1"], "nobody else is put out"
    assert stopped and job.launcher.pids["store"] not in stopped


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30))
def test_only_time_in_which_the_launcher_could_run_counts(looks: list[tuple[float, bool]]) -> None:
    now, answers, most, unanswered = 0.0, 0, 0.0, Unanswered(0.0)
    for seconds, answered in looks:
        now, answers = now + seconds, answers + answered
        most = 0.0 if answered else most + min(seconds, 1.0)
        waited = unanswered.look(now, answers)
        assert waited == pytest.approx(most), "however long it stood still, that is one second"
