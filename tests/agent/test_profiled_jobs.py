"""Jobs whose stages differ: the console plans them as they are, and paced ops take what each stage's do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, StageProfile, Technique, Worker
from openrecycle.planner.plans.plan import Plan, job_doc
from tests.agent.consoles import JobConsole, console, until
from tests.agent.launches import Launched
from tests.agent.runs import TINY
from tests.golden import golden

pytestmark = pytest.mark.processes

HELD = {"activation_bytes": 100, "weight_backward_bytes": 100}
UNEVEN = Job(
    2,
    2,
    3,
    (StageProfile(6, 6, 6, 2, (0.0, 1.0), **HELD), StageProfile(12, 9, 6, 1, **HELD)),
    (0.5,),
    "ms",
    (0.25,),
    (300, 300),
    ((Worker(1, 1), 0.5),),
)


@pytest.mark.chaos
def test_an_uneven_job_is_planned_and_paced_by_its_profile(tmp_path: Path) -> None:
    profile = tmp_path / "job.json"
    profile.write_text(job_doc(UNEVEN).model_dump_json())
    command = ["train", "--profile", str(profile), "--pace", "profile", *TINY]
    command += ["--memory", "bytes", "--iterations", "100000", "--demo"]
    with console(tmp_path) as server:
        process = Launched(*command, "--console", server.root, errors=tmp_path / "errors.txt")
        try:
            job_id = server.job_id()
            spec = server.read(f"/jobs/{job_id}")["spec"]
            assert spec["profile"] == json.loads(job_doc(UNEVEN).model_dump_json()) and spec["paced"]
            check_plan(server, job_id, ())
            times = until(lambda: op_times(server, job_id, {"F", "W", "O"}), "op times of all workers")
            # An op may be short of its pace by a millisecond, never by more, and longer on a busy machine.
            assert times["W1_0"]["F"] >= 5 and times["W0_1"]["F"] >= 11 and times["W1_1"]["F"] >= 23
            assert times["W1_1"]["W"] >= 11 and times["W1_0"]["O"] >= 2
            assert server.post(f"/jobs/{job_id}/workers/W0_0/kill").ok
            until(lambda: server.read(f"/jobs/{job_id}")["living"] == 3, "the death")
            check_plan(server, job_id, ("W0_0",))
        finally:
            process.end()


def check_plan(server: JobConsole, job_id: str, failed: tuple[str, ...]) -> None:
    """The newest generation's plan is of the uneven job, and no worse than the launcher's own would be."""
    fingerprint = until(lambda: server.read(f"/jobs/{job_id}")["plan_fingerprint"], "a generation")
    plan = Plan.from_json(json.dumps(server.read(f"/jobs/{job_id}/plans/{fingerprint}")))
    assert plan.failed == failed and plan.job.job() == UNEVEN and plan.memory == "bytes"
    own = Catalog(UNEVEN, Technique.STAGGERED, MemoryLimit("bytes")).plan_for(map(Worker.parse, failed))[0]
    assert plan.metrics.period <= own.metrics.period


def op_times(server: JobConsole, job_id: str, kinds: set[str]) -> dict[str, dict[str, float]] | None:
    """Milliseconds by worker and kind, once all workers have said these kinds in one heartbeat."""
    workers: list[dict[str, Any]] = server.read(f"/jobs/{job_id}/workers")["workers"]
    found = {w["name"]: w["op_milliseconds"] for w in workers}
    return found if all(kinds <= set(times) for times in found.values()) else None


@pytest.mark.chaos
def test_a_worker_that_becomes_slow_is_given_less_to_do(tmp_path: Path) -> None:
    command = ["train", "--pipelines", "2", "--stages", "2", "--micro-batches", "6"]
    command += ["--pace", "F=25ms,I=25ms,W=25ms", "--memory", "none", "--slow", "W1_1@3:3", *TINY]
    with console(tmp_path, "--heartbeat", "0.1") as server:
        process = Launched(*command, "--iterations", "100000", "--console", server.root, errors=tmp_path / "errors.txt")
        try:
            job_id = server.job_id()

            def planned_with() -> dict[str, float]:
                fingerprint = server.read(f"/jobs/{job_id}")["plan_fingerprint"]
                speeds: dict[str, float] = server.read(f"/jobs/{job_id}/plans/{fingerprint}")["job"].get("speeds", {})
                return speeds

            until(lambda: server.read(f"/jobs/{job_id}")["plan_fingerprint"], "a generation")
            until(lambda: planned_with().get("W1_1", 1.0) < 0.8, "a plan with its speed", timeout=90)
            job = server.read(f"/jobs/{job_id}")
            plan = Plan.from_json(json.dumps(server.read(f"/jobs/{job_id}/plans/{job['plan_fingerprint']}")))
            forwards = {name: sum(op.kind == "F" for op in ops) for name, ops in plan.workers.items()}
            assert plan.failed == () and forwards["W1_1"] < forwards["W0_1"]
            workers = {w["name"]: w for w in server.read(f"/jobs/{job_id}/workers")["workers"]}
            assert workers["W1_1"]["slow"] > 1.3
            texts = [e["text"] for e in server.read(f"/jobs/{job_id}/events?after=0&limit=500")["events"]]
            assert any(golden("w1-1-is-slow-its") in text for text in texts)
            # And all train on with it.
            committed = server.read(f"/jobs/{job_id}")["committed"]
            until(lambda: server.read(f"/jobs/{job_id}")["committed"] > committed + 3, "iterations")
        finally:
            process.end()
