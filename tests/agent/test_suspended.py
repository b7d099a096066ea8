"""Processes that stand still for a while: the launcher, its workers, all of them. It costs no worker and no bit."""

from __future__ import annotations

import random
import signal
import threading
import time
from typing import Any

import pytest

from openrecycle.agent.config.options import Timeouts
from tests.agent.local_jobs import LocalJob, fault_free_losses
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}
WORKERS = [f"W{p}_{s}" for p in range(2) for s in range(2)]
BORNE, STILL = 4.0, 6.0
ITERATIONS = 20


class Once:
    """Does something in the launcher's own thread, when it first hears that iteration 10 is committed."""

    def __init__(self, act: Any) -> None:
        self._act, self.done = act, False

    def __call__(self, job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        if not self.done and message["kind"] == "committed" and message["iteration"] >= 10:
            self.done = True
            self._act(job)


def run(act: Any, **more: Any) -> LocalJob:
    once = Once(act)
    job = LocalJob(**GRID, iterations=ITERATIONS, hang_seconds=BORNE, on_message=once, pace=0.01, **more).run()
    assert once.done
    assert job.dead == []
    assert job.losses == fault_free_losses(ITERATIONS, **GRID)
    return job


def stop(job: LocalJob) -> None:
    for name in WORKERS:
        job.signal(name, signal.SIGSTOP)


def wake(job: LocalJob, name: str) -> None:
    job.signal(name, signal.SIGCONT)


def test_a_launcher_that_stands_still_blames_nobody() -> None:
    run(lambda job: time.sleep(STILL))


@pytest.mark.chaos
def test_all_of_them() -> None:
    def suspend(job: LocalJob) -> None:
        stop(job)
        time.sleep(STILL)
        for name in WORKERS:
            wake(job, name)

    run(suspend)


@pytest.mark.chaos
def test_workers_that_are_woken_later_than_the_launcher() -> None:
    def suspend(job: LocalJob) -> None:
        stop(job)
        time.sleep(STILL)
        for n, name in enumerate(WORKERS):
            threading.Timer(BORNE * (0.3 + 0.1 * n), wake, (job, name)).start()

    run(suspend)


@pytest.mark.parametrize("seed", [1, at_length(2)])
def test_all_workers_while_the_launcher_runs(seed: int) -> None:
    dice = random.Random(seed)

    def suspend(job: LocalJob) -> None:
        stop(job)
        order = dice.sample(WORKERS, len(WORKERS))
        for n, name in enumerate(order):
            threading.Timer(STILL + 0.5 * n, wake, (job, name)).start()

    job = run(suspend)
    said = [line["warning"] for line in job.lines if "warning" in line]
    assert any(golden("none-of-the-workers-has") in text for text in said)


def test_all_workers_of_a_stage() -> None:
    """Nobody could go on without them. They are woken one after the other, once that is said of both."""
    stage, said = ["W0_1", "W1_1"], list[str]()

    def suspend(job: LocalJob) -> None:
        for name in stage:
            job.signal(name, signal.SIGSTOP)

    def hear(job: LocalJob, line: dict[str, Any]) -> None:
        if golden("as-all-of-its-stage-without") in line.get("warning", ""):
            said.append(line["warning"][:4])
            if len(said) == len(stage):
                for n, name in enumerate(stage):
                    threading.Timer(1.5 * n, wake, (job, name)).start()

    run(suspend, on_line=hear, timeouts=Timeouts(first_op=120.0))
    assert sorted(said) == stage


def test_waits_for_peers_that_run_out_meanwhile_lead_to_a_new_generation_and_to_no_death() -> None:
    def suspend(job: LocalJob) -> None:
        stop(job)
        time.sleep(STILL)
        for name in WORKERS:
            wake(job, name)

    job = run(suspend, timeouts=Timeouts(transfer=STILL - 1, group=STILL - 0.5))
    assert {line["generation"] for line in job.iterations} >= {1}
    for _, message in job.messages:
        if message["kind"] == "broken":
            assert message["stood_still"] > STILL - 3


def test_one_that_is_stopped_alone_is_out_in_time() -> None:
    begun: list[float] = []

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 5:
            begun.append(time.monotonic())
            job.signal("W1_1", signal.SIGSTOP)
        if "failure" in line:
            begun.append(time.monotonic())
        if len(job.iterations) >= 12:
            job.stop()

    job = LocalJob(**GRID, hang_seconds=BORNE, on_line=act).run()
    assert job.dead == ["W1_1"]
    assert BORNE - 1 < begun[1] - begun[0] < Timeouts().transfer, "no wait for it had run out"
    assert job.losses == fault_free_losses(len(job.losses), **GRID)
