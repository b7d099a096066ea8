"""A console has layers moved between stages, in real processes, after a death and after the return: the bits stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.consoles import console, until
from tests.agent.runs import Run, forked
from tests.agent.test_console_moves import GRID, Job
from tests.conftest import at_length

pytestmark = pytest.mark.processes

ITERATIONS = 80
GPT = {"layers": 6, "width": 8, "heads": 1, "sequence": 4, "batch": 1, "tied": True}
MODEL = ("--workload-options", json.dumps(GPT), "--iterations", str(ITERATIONS))
PACED = ("--pace", "F=5ms,I=5ms,W=5ms", "--pace-per", "layer")
HOME = [3, 3]


RANKS = (
    *("--ranks-per-worker", "2", "--workload", "agent.examples.fully_sharded:Gpt"),
    *("--workload-options", json.dumps(GPT | {"batch": 2})),
)


@pytest.fixture(scope="module", params=[(), at_length(RANKS)], ids=["a process each", "two ranks each"])
def workers(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """What the workers of the job are."""
    return tuple(request.param)


@pytest.fixture(scope="module")
def reference(workers: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Nothing happens to it."""
    run = forked(tmp_path_factory.mktemp("reference") / "run.jsonl", *GRID, *MODEL, *workers)
    assert run.status == 0, run.errors
    return run


@pytest.fixture
def running(workers: tuple[str, ...], tmp_path: Path) -> Iterator[Job]:
    with console(tmp_path) as server:
        job = Job(server, tmp_path / "run.jsonl", *MODEL, *PACED, "--kill", "W0_1@3:I1", *workers)
        try:
            yield job
        finally:
            job.process.end()


def held(job: Job) -> list[int] | None:
    """Layers per stage, once none moves."""
    status: dict[str, Any] = job.read()
    return None if status["moving_to"] or status["state"] != "running" else list(status["partition"])


@pytest.mark.chaos
def test_layers_move_and_move_back_and_the_bits_stay(reference: Run, running: Job) -> None:
    until(lambda: held(running) not in (None, HOME), "layers are on other stages")
    rerouted, moved = running.generations()[-2:]
    assert (rerouted["partition"], rerouted["failed"], moved["failed"]) == (HOME, ["W0_1"], ["W0_1"])
    assert moved["moved_at"] is not None and moved["partition"] == held(running)
    assert moved["partition"][1] < 3, "the stage that lost a worker holds fewer"
    running.ask("/workers/W0_1/restart")
    until(lambda: held(running) == HOME and running.read()["living"] == 6, "all are back, and so are the layers")
    lines = running.ends(reference)
    assert [line["relayout"]["partition"] for line in lines if "relayout" in line] == [moved["partition"], HOME]
