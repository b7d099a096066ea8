"""A plan of an operator's own, put in force in a job of real processes while it trains: the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agent.consoles import console, until
from tests.agent.launches import Launched
from tests.agent.local_jobs import uncut
from tests.agent.runs import SQUARE, TINY

pytestmark = pytest.mark.processes

ITERATIONS = 32  # the console has to take up two plans before they are done, on a busy machine too


def test_all_take_it_up_at_the_end_of_an_iteration_and_the_bits_stay(tmp_path: Path) -> None:
    reference = uncut(pipelines=2, stages=2, micro_batches=2, iterations=ITERATIONS)
    record = tmp_path / "run.jsonl"
    command = ["train", "--record", str(record), *SQUARE, *TINY]
    with console(tmp_path) as server:
        command += ["--console", server.root, "--iterations", str(ITERATIONS), "--pace", "F=32ms,I=32ms,W=32ms"]
        process = Launched(*command, errors=tmp_path / "errors.txt")
        try:
            job = f"/jobs/{server.job_id()}"
            until(lambda: server.read(job)["committed"] >= 2, "training")
            before = server.read(f"{job}/plans/{server.read(job)['plan_fingerprint']}")
            assert server.post("/plans", {"name": "before", "plan": before}).status_code == 201
            # Made in the background, for the job's own grid and op times, with B in one piece.
            asked = {"kind": "plan", "job": before["job"], "technique": "adaptive", "memory": "1f1b", "solver": "list"}
            solve = server.post("/solves", asked).json()["id"]
            until(lambda: server.read(f"/solves/{solve}")["state"] == "done", "the plan")
            kept = server.post("/plans", {"name": "B in one piece", "solve": solve}).json()["fingerprint"]
            used = server.session.put(f"{server.base}{job}/plan", json={"fingerprint": kept}, timeout=30)
            assert used.status_code == 200, used.text
            until(lambda: server.read(job)["plan_fingerprint"] == kept, "the new generation")
            after = server.read(job)["committed"]
            until(lambda: server.read(job)["committed"] >= after + 2, "training under it")
            assert server.read(job)["generation"] == 2 and server.read(job)["living"] == 4
            # And back to the one before, once all have committed an iteration under this one.
            use = {"fingerprint": before["fingerprint"]}
            until(lambda: server.session.put(f"{server.base}{job}/plan", json=use, timeout=30).ok, "the way back")
            assert process.wait(120) == 0
        finally:
            process.end()
        rows = server.read(f"{job}/iterations?limit=500")["iterations"]
        assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
        assert {row["generation"] for row in rows} == {1, 2, 3}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["loss"] for line in lines if "iteration" in line] == reference.losses
    assert lines[-1] == reference.lines[-1] and "final" in lines[-1]
