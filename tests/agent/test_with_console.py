"""Agents, launcher and console together, each a real process: decisions by the console, same bits."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.messages.client import ConsoleClient
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.agent.monitoring.console_link import ConsoleCoordination, create_job
from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import Plan
from tests.agent import nan_model
from tests.agent.consoles import JobConsole, console, until
from tests.agent.launches import Launched
from tests.agent.local_jobs import TINY as MODEL
from tests.agent.local_jobs import LocalJob, fault_free_losses, uncut
from tests.agent.runs import GRID, ITERATIONS, SQUARE, TINY, Run, fault_free, forked, small
from tests.conftest import at_length
from tests.golden import golden

# One test process for all of these: they share the fault-free run they compare with.
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def reference() -> Run:
    return fault_free()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobConsole]:
    """A console for jobs that have names: no silence ends anything here."""
    with console(tmp_path_factory.mktemp("console"), "--suspect", "40", "--dead", "90") as server:
        yield server


@contextmanager
def job(
    server: JobConsole, record: Path, iterations: int, *arguments: str, grid: tuple[str, ...] = GRID
) -> Iterator[Launched]:
    """A job that runs beside the test, slow enough (paced) to act on."""
    command = ["train", "--record", str(record), *grid, *TINY]
    # These are about other things than workers that change their stage.
    command += ["--console", server.root, "--demo", "--no-migrate", "--iterations", str(iterations), *arguments]
    process = Launched(*command, errors=record.with_suffix(".errors"))
    try:
        yield process
    finally:
        process.end()


def _events(server: JobConsole, job_id: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = server.read(f"/jobs/{job_id}/events?after=0&limit=500")["events"]
    return events


def _committed(server: JobConsole, job_id: str) -> int:
    return int(server.read(f"/jobs/{job_id}")["committed"])


def test_a_death_is_decided_by_the_console_and_the_bits_stay(
    reference: Run, server: JobConsole, tmp_path: Path
) -> None:
    run = small(tmp_path / "run.jsonl", "--console", server.root, "--name", "a death", "--kill", "W1_1@2:I1")
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    job_id = server.job_id("a death")
    state = server.read(f"/jobs/{job_id}")
    assert state["state"] == "finished" and state["committed"] == ITERATIONS
    told = state["spec"]["stage_bytes"]
    assert len(told) == state["spec"]["stages"]
    assert golden("a-worker-takes-up-to", f"{max(told) / 1000000.0:.1f}") in run.errors, "as it was said here"
    rows = server.read(f"/jobs/{job_id}/iterations?limit=100")["iterations"]
    assert [row["loss_hex"] for row in rows] == reference.losses
    plans = server.read(f"/jobs/{job_id}/plans")["plans"]
    generations = server.read(f"/jobs/{job_id}/generations")["generations"]
    assert [generation["generation"] for generation in generations] == [1, 2]
    assert generations[1]["failed"] == ["W1_1"] and generations[1]["plan_fingerprint"] in {
        p["fingerprint"] for p in plans
    }
    plan = Plan.from_json(json.dumps(server.read(f"/jobs/{job_id}/plans/{generations[1]['plan_fingerprint']}")))
    assert check(plan) == [] and plan.failed == ("W1_1",)
    texts = "\n".join(event["text"] for event in _events(server, job_id))
    assert "W1_1" in texts and "SIGKILL" in texts and "resumed" in texts


def test_a_worker_that_hangs_is_fenced(tmp_path: Path) -> None:
    """SIGSTOP: nothing breaks and nobody exits; only silence tells."""
    record = tmp_path / "run.jsonl"
    record.touch()
    stops = json.dumps({**MODEL, "record": str(record), "pipeline": 0})
    workload = ("--workload", "tests.agent.hanging:Stopped", "--workload-options", stops)
    with (
        console(tmp_path, "--heartbeat", "0.3", "--suspect", "1.5", "--dead", "4") as server,
        job(server, record, ITERATIONS, "--pace", "F=40ms,I=40ms,W=40ms", *workload, grid=SQUARE) as launcher,
    ):
        job_id = server.job_id()
        planned = server.read(f"/jobs/{job_id}")["spec"]["durations"]
        assert planned["F"] == 40 and 0 < planned["O"] < 5_000, "the step was measured before anything was planned"
        assert launcher.wait(60) == 0
        pid = int((tmp_path / "run.jsonl.pid").read_text())
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        reference = fault_free(stages=2, micro_batches=2)
        assert [line["loss"] for line in lines if "loss" in line] == reference.losses
        assert lines[-1]["final"] == reference.final
        assert [line["failure"]["worker"] for line in lines if "failure" in line] == ["W0_1"]
        assert any("W0_1" in event["text"] for event in _events(server, job_id) if event["kind"] == "failure")
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


@pytest.mark.chaos
def test_a_library_that_lets_nobody_speak_is_no_silence_for_a_console(tmp_path: Path) -> None:
    """It hears of it from the launcher, which looks at what the process does."""
    once = tmp_path / "once"
    once.touch()
    options = {"once": str(once), "iteration": 5, "pipeline": 0, "seconds": 7.0, "gil": True}
    workload = ("--workload", "tests.agent.hanging:SlowForward", "--workload-options", json.dumps({**MODEL, **options}))
    grid = ("--pipelines", "2", "--stages", "2", "--micro-batches", "2", "--iterations", "10")
    with console(tmp_path, "--heartbeat", "0.3", "--suspect", "1.5", "--dead", "4") as server:
        run = forked(tmp_path / "run.jsonl", *grid, *workload, "--console", server.root)
        assert run.status == 0, run.errors
        assert not once.exists() and not run.failures
        assert run.losses == fault_free_losses(10, pipelines=2, stages=2, micro_batches=2)


def test_a_refusing_or_absent_console_is_told_in_a_sentence(server: JobConsole, tmp_path: Path) -> None:
    run = forked(tmp_path / "run.jsonl", *SQUARE, *TINY, "--console", server.root, "--name", "bad\nname")
    assert run.status == 2 and "Traceback" not in run.errors and "name" in run.errors


@pytest.mark.chaos
def test_a_halted_job_says_why_at_the_launcher_too(tmp_path: Path) -> None:
    """The last worker of a stage dies: nobody can go on, and nobody is left wondering."""
    with console(tmp_path) as server:
        errors = tmp_path / "errors.txt"
        command = ["train", *GRID, *TINY, "--console", server.root, "--iterations", "100000", "--kill", "W0_1@1:F0"]
        process = Launched(*command, errors=errors)
        try:
            job_id = server.job_id()
            until(lambda: server.read(f"/jobs/{job_id}")["living"] == 5, "the first death")
            workers = server.read(f"/jobs/{job_id}/workers")["workers"]
            os.kill(next(w["pid"] for w in workers if w["name"] == "W1_1"), signal.SIGKILL)
            until(lambda: server.read(f"/jobs/{job_id}")["state"] == "halted", "the halt")
            until(lambda: "stage 1 has no living worker" in errors.read_text(), "the sentence")
        finally:
            process.end()
            assert process.poll() == 128 + signal.SIGTERM


def test_a_workload_that_fails_in_every_worker_ends_the_job_with_its_words(server: JobConsole, tmp_path: Path) -> None:
    """The factory works in the launcher and not in the workers."""
    command = (*SQUARE, "--iterations", "2", "--console", server.root, "--name", "fails")
    run = forked(tmp_path / "run.jsonl", *command, "--workload", "tests.agent.nan_model:Absent")
    assert run.status == 1 and "Traceback" not in run.errors
    assert golden("no-worker-process-is-left") in run.errors and "no such library here" in run.errors
    job_id = server.job_id("fails")
    until(lambda: server.read(f"/jobs/{job_id}")["state"] == "stopped", "the job's end")


def test_what_a_worker_wrote_before_it_crashed_is_there_to_read(server: JobConsole, tmp_path: Path) -> None:
    command = (*SQUARE, "--iterations", "5", "--console", server.root, "--name", "crashes")
    run = forked(tmp_path / "run.jsonl", *command, "--workload", "tests.agent.nan_model:Crashing")
    assert run.status == 0 and "Traceback" not in run.errors
    log = server.read(f"/jobs/{server.job_id('crashes')}/workers/W0_0/history")["log"]
    written = [line["text"] for line in log]
    assert nan_model.LAST_WORDS in written and written[-1].startswith("RuntimeError: ")
    assert any("nan_model.py" in line for line in written), "the traceback"


@pytest.mark.chaos
def test_a_worker_comes_back_without_anybody_asking_for_it(server: JobConsole, tmp_path: Path) -> None:
    """Its launcher starts it, and the console lets it in as one that somebody has restarted."""
    options = ("--pace", "F=20ms,I=20ms,W=20ms", "--max-restarts", "2", "--restart-delay", "3", "--kill", "W1_1@1:F0")
    record = tmp_path / "run.jsonl"
    with job(server, record, 100_000, *options, "--name", "comes back", grid=SQUARE) as process:
        job_id = server.job_id("comes back")
        assert server.read(f"/jobs/{job_id}")["spec"]["max_restarts"] == 2

        def detail() -> str:
            workers = server.read(f"/jobs/{job_id}/workers")["workers"]
            return str(next(worker["detail"] for worker in workers if worker["name"] == "W1_1"))

        until(lambda: "(1 of 2)" in detail(), "word of what comes next")
        until(lambda: server.read(f"/jobs/{job_id}")["condition"] == "running", "all to train")
        assert server.read(f"/jobs/{job_id}")["living"] == 4
        assert "asked to restart" not in " ".join(event["text"] for event in _events(server, job_id))
        process.end()
    losses = [line["loss"] for line in map(json.loads, record.read_text().splitlines()) if "iteration" in line]
    assert losses == fault_free_losses(len(losses), pipelines=2, stages=2, micro_batches=2)


@pytest.mark.parametrize("back_to", ["checkpoint", at_length("start")])
def test_a_stage_that_lost_everybody_is_re_staffed_by_the_console(
    back_to: str, server: JobConsole, reference: Run, tmp_path: Path
) -> None:
    """Both workers of stage 1 die; one of another stage takes over there in its process, all go back to the
    checkpoint, or to the start, and the losses are those of a run without failures."""
    record, name = tmp_path / "run.jsonl", f"re-staffed from the {back_to}"
    kept = ("--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2")
    back = kept if back_to == "checkpoint" else ("--max-restarts", "1", "--restart-delay", "0.5")
    options = ("--pace", "F=20ms,I=20ms,W=20ms", "--name", name, *back)
    kills = ("--kill", "W0_1@5:F0", "--kill", "W1_1@5:I0")
    with job(server, record, ITERATIONS, *options, *kills) as process:
        job_id = server.job_id(name)

        def moves() -> list[list[str]]:
            generations = server.read(f"/jobs/{job_id}/generations")["generations"]
            return next((generation["moves"] for generation in generations if generation["moves"]), [])

        moved = until(moves, "a move")
        assert len(moved) == 1 and moved[0][1] in ("W0_1", "W1_1")
        assert process.wait(120) == 0
    state = server.read(f"/jobs/{job_id}")
    assert state["state"] == "finished" and state["committed"] == ITERATIONS
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    losses = {line["iteration"]: line["loss"] for line in lines if "iteration" in line}
    assert [losses[i] for i in range(ITERATIONS)] == reference.losses
    assert [line["final"] for line in lines if "final" in line][-1] == reference.final


@pytest.mark.chaos
def test_the_console_says_what_is_run_while_a_worker_returns_and_when_all_have_stopped(tmp_path: Path) -> None:
    # A stage of some megabytes, which take some seconds.
    wide = ("--workload-options", '{"width": 256, "heads": 2, "sequence": 16, "batch": 2}', "--hand-over-rate", "3MB")
    options = ("--pace", "F=20ms,I=20ms,W=20ms", *wide, "--kill", "W1_1@1:F0")
    with console(tmp_path) as server, job(server, tmp_path / "run.jsonl", 100_000, *options):
        job_id = server.job_id()

        def detail() -> dict[str, Any]:
            return dict(server.read(f"/jobs/{job_id}"))

        until(lambda: detail()["condition"] == "degraded", "training without it")
        without = detail()["plan_fingerprint"]
        server.post(f"/jobs/{job_id}/workers/W1_1/restart")
        meanwhile = until(lambda: (now := detail())["plan_state"] == "interim" and now, "the interim plan")
        plan = Plan.from_json(json.dumps(server.read(f"/jobs/{job_id}/plans/{meanwhile['plan_fingerprint']}")))
        assert check(plan) == [] and plan.failed == ("W1_1",)
        full = until(lambda: (now := detail())["plan_state"] == "in force" and now, "the plan of all")
        assert full["plan_fingerprint"] not in (without, meanwhile["plan_fingerprint"]) and full["living"] == 6
        newest = server.read(f"/jobs/{job_id}/generations")["generations"][-1]
        assert newest["interim_plan"] == plan.fingerprint and newest["joining"] == ["W1_1"]
        # A pause is one once all have stopped; then nothing more is committed.
        until(lambda: detail()["condition"] == "running", "all train")
        server.post(f"/jobs/{job_id}/pause")
        until(lambda: detail()["condition"] == "paused", "all have stopped")
        committed = detail()["committed"]
        workers = server.read(f"/jobs/{job_id}/workers")["workers"]
        assert {worker["state"] for worker in workers} == {"paused"}
        server.post(f"/jobs/{job_id}/resume")
        until(lambda: detail()["committed"] > committed and detail()["condition"] == "running", "it goes on")


def test_a_death_after_the_last_iteration_is_survived(server: JobConsole, tmp_path: Path) -> None:
    """All iterations are committed, and not all final hashes are in: the dead one's would be waited for for ever."""
    grid: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2, "iterations": 3}
    killed: list[str] = []

    def kill_the_first_that_is_done(run: LocalJob, worker: str, message: dict[str, Any]) -> None:
        if message["kind"] == "done" and not killed:
            killed.append(worker)
            run.signal(worker, signal.SIGKILL)

    # No heartbeats come from these workers.
    spec = JobSpec.of(Job(2, 2, 2), name="end", iterations=3, samples_per_micro_batch=2)
    created = create_job(ConsoleClient(server.root), spec, print)
    decides = ConsoleCoordination(lambda: ConsoleClient(server.root), created.job_id, lambda text: None)
    run = LocalJob(**grid, decides=lambda *args, **more: decides, on_message=kill_the_first_that_is_done).run()
    assert killed and server.read(f"/jobs/{created.job_id}")["state"] == "finished"
    assert run.lines[-1] == uncut(**grid).lines[-1] and "final" in run.lines[-1]
