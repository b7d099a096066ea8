"""Jobs that are disturbed all the time: workers killed, stopped and started anew at random moments that the
iterations set. `make chaos`."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest

from openrecycle.agent.config.devices import Platform, Transport
from openrecycle.agent.config.options import Faults
from tests.agent.local_jobs import LocalJob, fault_free_losses

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 3, "stages": 2, "micro_batches": 3}
ITERATIONS = 80


@pytest.fixture(scope="module")
def losses() -> list[str]:
    return fault_free_losses(ITERATIONS, **GRID)


class _Disturber:
    """After an iteration, now and then, does one bad thing. Never takes the second worker of a stage while
    the first one is away."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.killed = 0

    def __call__(self, job: LocalJob, line: dict[str, Any]) -> None:
        if "iteration" not in line or self._random.random() > 0.25:
            return
        pids = job.launcher.pids
        missing = [f"W{p}_{s}" for p in range(3) for s in range(2) if f"W{p}_{s}" not in pids]
        whole = [s for s in range(2) if all(not name.endswith(f"_{s}") for name in missing)]
        deed = self._random.choice(["kill", "kill", "start"])
        if deed == "kill" and whole:
            self.killed += 1
            job.signal(f"W{self._random.randrange(3)}_{self._random.choice(whole)}", signal.SIGKILL)
        elif deed == "start" and missing:
            job.start(missing[0])


@pytest.mark.parametrize("transport", ["tagged", "ordered"])
@pytest.mark.parametrize("keep", [False, True], ids=["redo all", "keep finished"])
@pytest.mark.parametrize("seed", range(10))
def test_the_bits_stay(seed: int, keep: bool, transport: Transport, losses: list[str]) -> None:
    disturber = _Disturber(seed)
    job = LocalJob(
        **GRID,
        iterations=ITERATIONS,
        on_line=disturber,
        faults=Faults(keep_finished=keep),
        platform=Platform(transport=transport),
    ).run()
    assert job.losses == losses
    assert disturber.killed
