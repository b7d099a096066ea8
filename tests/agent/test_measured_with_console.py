"""Real workers record the same iteration and post it; logs and validations come to the console, too."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule
from tests.agent.consoles import JobConsole, console, until
from tests.agent.launches import Launched
from tests.agent.runs import TINY
from tests.conftest import at_length

pytestmark = pytest.mark.processes

GRID = ("--pipelines", "2", "--stages", "2", "--micro-batches", "3")


def measured(server: JobConsole, job_id: str, generation: int) -> dict[str, Any]:
    """The newest measured iteration, once it is one of this generation and its neighbours are committed."""

    def look() -> dict[str, Any] | None:
        answer = server.get(f"/jobs/{job_id}/measured", params={"watch": "true"})
        found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return found if found.get("generation") == generation and found["period_ms"] is not None else None

    found = until(look, f"a measured iteration of generation {generation}")
    assert found is not None
    return found


def check_order(schedule: Schedule) -> None:
    """What one op needs of another was there before it: on one host all times are of one clock."""
    ends: dict[tuple[str, int, int, int], int] = {}
    starts: dict[tuple[str, int, int, int], int] = {}
    for ops in schedule.ops.values():
        assert all(a.end <= b.start for a, b in pairwise(ops)), "a worker does one op at a time"
        for op in ops:
            if op.kind != "O":
                key = (op.kind, op.stage, op.pipeline, op.micro_batch)
                starts[key], ends[key] = op.start, op.end
    # The paced device makes up for late wake-ups by a millisecond where an op has received something.
    grace = schedule.problem.job.ticks_per_unit + 2
    for pipeline in range(2):
        for m in range(3):
            assert ends["F", 0, pipeline, m] <= starts["F", 1, pipeline, m] + grace
            kind = "I" if ("I", 1, pipeline, m) in ends else "B"
            home = "I" if ("I", 0, pipeline, m) in starts else "B"
            assert ends[kind, 1, pipeline, m] <= starts[home, 0, pipeline, m] + grace


@pytest.mark.parametrize("dies", [False, at_length(True)])
def test_an_iteration_is_measured_before_and_after_a_death(dies: bool, tmp_path: Path) -> None:
    with console(tmp_path) as server:
        command = ["train", *GRID, *TINY, "--console", server.root, "--demo"]
        # So short a norm that the first steps are clipped, after they were taken.
        command += ["--iterations", "100000", "--pace", "F=25ms,I=25ms,W=25ms", "--clip-norm", "0.001"]
        process = Launched(*command, errors=tmp_path / "errors.txt")
        try:
            job_id = server.job_id()
            first = measured(server, job_id, 1)
            planned = Plan.from_json(server.get(f"/jobs/{job_id}/plans/{first['planned_fingerprint']}").content)
            plan = Plan.from_document(first["plan"])
            assert first["uncertainty_ms"] == 0, "one host has one clock"
            assert first["planned_ms"] == planned.metrics.period

            def order(of: Plan) -> dict[str, list[tuple[str, int, int | None]]]:
                return {w: [(o.kind, o.pipeline, o.micro_batch) for o in ops] for w, ops in of.workers.items()}

            assert order(plan) == order(planned), "each worker ran its ops in the plan's order"
            check_order(plan.schedule())
            took = [o.duration for ops in plan.workers.values() for o in ops if o.kind in "FIW"]
            assert min(took) >= 25 - 1.001, "no op is shorter than its pace but for the grace"

            if dies:
                server.post(f"/jobs/{job_id}/workers/W1_1/kill")
                second = measured(server, job_id, 2)
                after = Plan.from_document(second["plan"])
                assert set(after.workers) == {"W0_0", "W0_1", "W1_0"} and after.failed == ("W1_1",)
                assert sum(o.kind == "F" for o in after.workers["W0_1"]) == 6
                check_order(after.schedule())
                dead = server.read(f"/jobs/{job_id}/workers/W1_1/history")
                assert [s["state"] for s in dead["states"]] == ["running", "failed"]

            history = server.read(f"/jobs/{job_id}/workers/W0_1/history")
            said = [line["text"] for line in history["log"]]
            assert any(f"generation {1 + dies}: resumed" in text for text in said), said
            assert history["op_milliseconds"]["F"] >= 24
            events = server.read(f"/jobs/{job_id}/events?limit=500")["events"]
            assert any(e["kind"] == "step" and "clipped" in e["text"] for e in events)
        finally:
            process.end()
