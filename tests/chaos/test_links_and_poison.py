"""Links that carry nothing, deaths while groups connect as NCCL's do, and data that raises, each with deaths beside it:
every bit is that of the undisturbed run. `make chaos`.

There is one link for each direction and transport, and two draws of bad samples for each transport and way to redo.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.config.devices import Platform, Transport
from openrecycle.agent.config.options import Faults, Timeouts
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.planner.jobs.job import Job
from tests.agent.local_jobs import TINY, LocalJob, Message, fault_free_losses
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 3, "stages": 2, "micro_batches": 3}
WORKERS = [str(w) for w in Job(3, 2, 3).workers()]
ITERATIONS = 30


@pytest.fixture(scope="module")
def losses() -> list[str]:
    return fault_free_losses(ITERATIONS, **GRID)


@pytest.mark.parametrize("transport", ["tagged", "ordered"])
@pytest.mark.parametrize("seed", [0, 1])  # from the second stage back, and from the first one on
def test_a_link_carries_nothing_one_way(seed: int, transport: Transport, losses: list[str]) -> None:
    """Of two neighbours; one end goes, comes back, and goes for good. Elsewhere a worker dies."""
    draw = random.Random(seed)
    pipeline = draw.randrange(3)
    link = draw.choice([[f"W{pipeline}_0", f"W{pipeline}_1"], [f"W{pipeline}_1", f"W{pipeline}_0"]])
    other = f"W{(pipeline + 1) % 3}_{draw.randrange(2)}"
    started: list[str] = []

    def act(job: LocalJob, line: Message) -> None:
        out = [name for name in link for x in job.lines if f"{name} is taken out" in x.get("warning", "")]
        if "iteration" in line and len(out) > len(started) and out[-1] not in job.launcher.pids:
            started.append(out[-1])
            job.start(out[-1])

    settings = {"launcher": os.getpid(), "lost": [link], **TINY}
    job = LocalJob(
        **GRID,
        iterations=ITERATIONS,
        workload=NamedWorkload("tests.agent.bad_link:BadLink", settings),
        platform=Platform(transport=transport),
        timeouts=Timeouts(form=15.0, transfer=5.0, group=6.0),
        kills=(f"{other}@20:I1",),
        pace=0.01,
        on_line=act,
    ).run()
    warnings = [line["warning"] for line in job.lines if "warning" in line]
    assert any("for good" in text for text in warnings) and any(golden("may-not-re-join") in text for text in warnings)
    assert set(job.dead) <= {*link, other} and len(set(job.dead) & set(link)) == 1
    assert job.losses == losses


@pytest.mark.parametrize("dies", WORKERS[1:])
def test_a_death_while_the_survivors_of_another_connect(dies: str, losses: list[str], tmp_path: Path) -> None:
    once = tmp_path / "launcher"
    once.write_text(str(os.getpid()))
    settings = {"once": str(once), "dies": dies, **TINY}
    job = LocalJob(
        **GRID,
        iterations=ITERATIONS,
        kills=("W0_0@3:F1",),
        workload=NamedWorkload("tests.agent.connecting:Connecting", settings),
        platform=Platform(transport="ordered"),
        timeouts=Timeouts(form=10.0, transfer=20.0, group=25.0),
    ).run()
    assert job.dead == sorted(["W0_0", dies]) and job.losses == losses


@pytest.mark.parametrize("transport", ["tagged", "ordered"])
@pytest.mark.parametrize("keep", [False, True], ids=["redo all", "keep finished"])
@pytest.mark.parametrize("seed", range(2))
def test_samples_that_raise_whenever_they_are_read(seed: int, keep: bool, transport: Transport) -> None:
    draw = random.Random(seed)

    def places(count: int) -> list[list[int]]:
        # Not the first micro-batch, which is read before there are workers.
        return [[draw.randrange(1, ITERATIONS - 3), draw.randrange(3), draw.randrange(3)] for _ in range(count)]

    bad = {"inputs": places(3), "targets": places(3)}
    workload = NamedWorkload("tests.agent.poisoned:Poisoned", {**bad, **TINY})

    def run(kills: tuple[str, ...], on_line: Any = lambda job, line: None) -> LocalJob:
        faults = Faults(on_bad_sample="skip", keep_finished=keep and bool(kills))
        options: dict[str, Any] = {"faults": faults, "platform": Platform(transport=transport)}
        return LocalJob(**GRID, iterations=ITERATIONS, workload=workload, kills=kills, on_line=on_line, **options).run()

    calm = run(())
    assert calm.dead == []
    left_out: dict[int, list[int]] = {}
    for iteration, pipeline, micro_batch in sorted({tuple(place) for place in (*bad["inputs"], *bad["targets"])}):
        left_out.setdefault(iteration, []).append(3 * pipeline + micro_batch)
    assert {x["iteration"]: x["skipped"] for x in calm.iterations if "skipped" in x} == left_out
    # Deaths in iterations that are poisoned, one of which is made up for.
    first, second = sorted(left_out)[1], sorted(left_out)[-1]
    gone, later = f"W{draw.randrange(2)}_0", f"W2_{draw.randrange(2)}"

    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == first + 1:
            job.start(gone)

    hurt = run((f"{gone}@{first}:{draw.choice(['R', 'O'])}", f"{later}@{second}:O"), act)
    assert hurt.dead == sorted([gone, later])
    assert hurt.losses == calm.losses
    assert [x["skipped"] for x in hurt.iterations if "skipped" in x] == [left_out[i] for i in sorted(left_out)]
    finals = [[x["final"] for x in job.lines if "final" in x] for job in (calm, hurt)]
    assert finals[0] == finals[1]
