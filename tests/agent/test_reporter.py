"""The report-only agent against the real console: plans come in, losses go out, and training never notices."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from openrecycle import InputError, Job, Reporter
from openrecycle.agent.messages.client import ConsoleClient
from openrecycle.agent.messages.protocol import Deployment, JobState, JobStatus
from openrecycle.agent.monitoring.heartbeat import WorkerReports
from openrecycle.agent.own_loops import own_loop
from openrecycle.agent.own_loops import reporter as reporter_module
from openrecycle.agent.own_loops.reporter import MAX_ITERATIONS, asking_pause
from openrecycle.planner.plans.plan import Plan
from tests.agent.consoles import JobConsole, console, until
from tests.agent.own_loop import JOB
from tests.golden import golden

WORKERS = [str(worker) for worker in JOB.workers()]
PAIR = ("W0_0", "W1_0")


class OwnLoop:
    """A process of the test's own training loop."""

    def __init__(self, server: JobConsole, worker: str, folder: Path) -> None:
        self.said_in = folder / f"{worker}.jsonl"
        with self.said_in.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.agent.own_loop", server.root, "run-7", worker],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
            )

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.said_in.read_text().splitlines() if line.endswith("}")]

    def generations(self) -> dict[int, dict[str, Any]]:
        return {line["generation"]: line for line in self.said() if "generation" in line}

    def end(self) -> str:
        """What it wrote to standard error."""
        return self.process.communicate(timeout=30)[1]


@contextmanager
def loops(server: JobConsole, folder: Path) -> Iterator[dict[str, OwnLoop]]:
    running = {worker: OwnLoop(server, worker, folder) for worker in WORKERS}
    try:
        yield running
    finally:
        for loop in running.values():
            if loop.process.poll() is None:
                loop.process.kill()
                loop.process.communicate()


def reported(server: JobConsole, job_id: str) -> dict[int, float | None]:
    rows: dict[int, float | None] = {}
    while page := server.read(f"/jobs/{job_id}/iterations?after={max(rows, default=-1)}&limit=500")["iterations"]:
        rows |= {row["iteration"]: row["loss"] for row in page}
    return rows


def _times(server: JobConsole, job_id: str) -> dict[str, dict[str, float]]:
    return {w["name"]: w["op_milliseconds"] for w in server.read(f"/jobs/{job_id}/workers")["workers"]}


@pytest.mark.processes
def test_the_others_get_the_plan_that_goes_on_without_a_silent_worker(tmp_path: Path) -> None:
    """W0_1 hangs, which is also the one that spoke for all; another takes over, and no iteration is missing."""
    failure_timeouts = ("--heartbeat", "0.2", "--suspect", "1", "--dead", "4")
    with console(tmp_path, *failure_timeouts) as server, loops(server, tmp_path) as running:
        job_id = server.job_id()
        until(lambda: all(1 in loop.generations() for loop in running.values()), "the first plan everywhere")
        until(lambda: len(reported(server, job_id)) > 3, "iterations")
        until(lambda: server.read(f"/jobs/{job_id}")["state"] == "running", "all, though one's callback failed")
        workers = server.read(f"/jobs/{job_id}/workers")["workers"]
        assert {w["name"]: w["pid"] for w in workers} == {name: loop.process.pid for name, loop in running.items()}

        until(lambda: _times(server, job_id)["W1_0"].get("F", 0) > 0, "op times")

        silent = running["W0_1"]
        os.kill(silent.process.pid, signal.SIGSTOP)
        others = [loop for name, loop in running.items() if name != "W0_1"]
        until(lambda: all(2 in loop.generations() for loop in others), "the plan without W0_1")
        for loop in others:
            second = loop.generations()[2]
            assert second["failed"] == ["W0_1"]
            assert second["forwards"] == {"W0_0": 3, "W1_0": 3, "W1_1": 6}
        before = max(reported(server, job_id))
        until(lambda: max(reported(server, job_id)) > before + 3, "iterations from W1_1")
        until(lambda: server.read(f"/jobs/{job_id}")["state"] == "running", "the second generation to be taken up")
        rows = reported(server, job_id)
        assert sorted(rows) == list(range(len(rows)))
        page = server.read(f"/jobs/{job_id}/iterations?after=-1&limit=500")["iterations"]
        assert {(row["generation"], row["living"]) for row in page} <= {(0, 4), (1, 4), (2, 3)}, "as when each ended"
        assert all(loss == 1 / (1 + i) for i, loss in rows.items())

        os.kill(silent.process.pid, signal.SIGCONT)
        until(lambda: {"fenced": True} in silent.said(), "W0_1 to learn that it is out")
        errors = {name: loop.end() for name, loop in running.items()}
        assert all({"closed": True} in loop.said() and loop.process.returncode == 0 for loop in running.values()), (
            errors
        )
        assert (
            golden("on-plan-failed-for-generation") in errors["W0_0"]
            and golden("goes-on-without-w0-1") in errors["W0_1"]
        )
        assert server.read(f"/jobs/{job_id}")["state"] == "finished"


def lonely(server: JobConsole, **changes: Any) -> Reporter:
    arguments: dict[str, Any] = {
        "console": server.root,
        "run": "alone",
        "job": Job.uniform(1, 1, 2),
        "worker": "W0_0",
        "iterations": 10_000,
        **changes,
    }
    return Reporter(**arguments)


@pytest.mark.processes
def test_a_dead_console_costs_nothing_and_learns_the_newest_later(tmp_path: Path) -> None:
    with console(tmp_path) as server:
        server.crash()
        with lonely(server) as reporter:
            for i in range(MAX_ITERATIONS + 200):
                with reporter.op("F"), reporter.op("nonsense"):
                    pass
                reporter.iteration(i, loss=math.nan if i == 700 else 0.5)
            server.start(server.port)
            job_id = server.job_id()
            until(lambda: MAX_ITERATIONS + 199 in reported(server, job_id), "the newest iteration")
        kept = range(200, MAX_ITERATIONS + 200)
        assert reported(server, job_id) == {i: None if i == 700 else 0.5 for i in kept}
        assert server.read(f"/jobs/{job_id}")["state"] == "finished"


def test_it_says_when_nobody_is_at_the_address(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        arguments: dict[str, Any] = {"run": "alone", "job": Job.uniform(1, 1, 2), "worker": "W0_0", "iterations": 9}
        with Reporter(console=f"http://127.0.0.1:{taken.getsockname()[1]}", **arguments):
            until(lambda: caplog.records, "a warning")
    (warning,) = caplog.records
    assert golden("your-loop-goes-on") in warning.getMessage()


@pytest.mark.filterwarnings("error")
def test_a_loss_may_be_the_tensor_that_the_backward_began_at() -> None:
    torch.set_warn_always(True)
    try:
        with Reporter(
            console="http://127.0.0.1:1", run="tensor", job=Job.uniform(1, 1, 2), worker="W0_0", iterations=9
        ) as one:
            one.iteration(0, loss=torch.ones((), requires_grad=True))  # type: ignore[arg-type]
    finally:
        torch.set_warn_always(False)


@pytest.mark.processes
def test_a_job_that_is_over_before_the_console_has_heard_of_it_is_seen_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "CLOSE_SECONDS", 60.0)  # a busy machine's console may take longer than usual
    with console(tmp_path) as server:
        with lonely(server, iterations=3) as reporter:
            for i, loss in enumerate((1.0, 2.0, math.inf)):
                reporter.iteration(i, loss=loss)
        job_id = server.job_id()
        assert server.read(f"/jobs/{job_id}")["state"] == "finished"
        assert reported(server, job_id) == {0: 1.0, 1: 2.0, 2: None}, "a loss that is no number is none"


@pytest.mark.processes
def test_a_run_of_another_job_s_name_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with console(tmp_path) as server, lonely(server):
        until(lambda: server.read("/jobs")["jobs"], "the job to be created")
        with lonely(server, job=Job.uniform(1, 1, 4)):
            until(lambda: golden("give-each-run-a-name") in caplog.text, "a warning")


@pytest.mark.processes
def test_closing_waits_for_no_plan_of_a_job_that_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's name was used again. What has been said goes out all the same, however late it is by then."""
    joined, join = list[float](), WorkerReports.join

    def joining(reports: WorkerReports, seconds: float) -> None:
        joined.append(seconds)
        join(reports, seconds)

    monkeypatch.setattr(WorkerReports, "join", joining)
    with console(tmp_path) as server:
        with lonely(server):
            until(lambda: server.read(f"/jobs/{server.job_id()}")["generation"] == 1, "the first generation")
        again = lonely(server)
        with pytest.raises(RuntimeError, match="finished"):
            again.membership(timeout=30)
        until(lambda: caplog.records, "the refusal")
        monkeypatch.setattr(reporter_module, "CLOSE_SECONDS", 3600.0)
        closing = threading.Thread(target=again.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
        monkeypatch.setattr(reporter_module, "CLOSE_SECONDS", 0.0)
        last = lonely(server, worker="W0_1", job=Job.uniform(1, 2, 2), run="of two")
        until(lambda: server.read(f"/jobs/{server.job_id('of two')}/workers")["workers"][1]["host"], "it to register")
        last.close()
        assert joined[-1] > 0.5


@pytest.mark.processes
def test_whoever_waits_for_the_others_hears_that_the_job_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ended just after this worker had come back, and meet it no more."""
    monkeypatch.setattr(reporter_module, "LONG_POLL_SECONDS", 0.2)
    with console(tmp_path) as server:
        two = Job.uniform(2, 1, 2)
        first, last = lonely(server, job=two), lonely(server, worker="W1_0", job=two)
        now = last.membership()
        first.membership()
        store = torch.distributed.FileStore(str(tmp_path / "group"), 2)  # type: ignore[attr-defined]
        with ThreadPoolExecutor() as pool:
            meeting = pool.submit(now.meet, store, 60.0)
            assert not wait([meeting], 0.2).done
            first.close()
            with pytest.raises(RuntimeError) as over:
                meeting.result()
        assert type(over.value) is RuntimeError, "a lost group would be formed anew"
        with pytest.raises(RuntimeError):
            last.membership(timeout=60)
        last.close()


@pytest.mark.processes
def test_closing_does_not_wait_for_a_dead_console(tmp_path: Path) -> None:
    with console(tmp_path) as server:
        server.crash()
        reporter = lonely(server)
        reporter.iteration(0, loss=1.0)
        began = time.monotonic()
        reporter.close()
        reporter.close()
        assert time.monotonic() - began < 30, "its bound is a few seconds; the machine may be slow"
        reporter.iteration(1, loss=1.0)


@pytest.mark.parametrize("workers", [1, 4, 2048, 16384])
def test_the_end_of_a_large_job_floods_no_console(workers: int) -> None:
    """All but one of its workers ask whether it is over. Of 2,048, they asked 6,800 times a second."""
    assert asking_pause(workers) <= max(0.3, workers / 50)
    assert workers / asking_pause(workers) <= 100


@pytest.mark.processes
def test_a_loop_that_fails_does_not_end_the_job(tmp_path: Path) -> None:
    with console(tmp_path) as server:
        with pytest.raises(ZeroDivisionError), lonely(server) as reporter:
            job_id = server.job_id()
            until(lambda: server.read(f"/jobs/{job_id}")["generation"] == 1, "the first generation")

            def said() -> str:
                return str(server.read(f"/jobs/{job_id}/workers")["workers"][0]["acknowledged"])

            until(lambda: said() != "", "the plan to be taken up")
            assert said() == "adopted", "that it has its state it says after an iteration"
            reporter.iteration(0, loss=1 / 0)
        assert server.read(f"/jobs/{job_id}")["state"] not in ("finished", "stopped")


@pytest.mark.processes
@pytest.mark.parametrize("done", [True, False])
def test_the_console_hears_at_once_that_a_loop_has_ended(tmp_path: Path, done: bool) -> None:
    """It heard of it by a silence only, which here is none for an hour."""
    with console(tmp_path, "--suspect", "3000", "--dead", "3600") as server:
        fenced: list[str] = []
        two = [lonely(server, worker=w, job=Job.uniform(2, 1, 2), on_fenced=lambda: fenced.append("")) for w in PAIR]
        for one in two:
            one.membership()
        job_id = server.job_id()
        ended = two[1]
        ended.close(done=done)
        ended.close(done=not done)
        state = "finished" if done else "failed"
        until(lambda: server.read(f"/jobs/{job_id}/workers")["workers"][1]["state"] == state, "the end of W1_0")
        if done:
            (row,) = server.read("/jobs")["jobs"]
            assert (row["living"], row["generation"], row["state"]) == (1, 1, "starting")
        else:
            assert two[0].membership(60).workers == ("W0_0",)
        two[0].close()
        assert server.read(f"/jobs/{job_id}")["state"] == "finished" and not fenced


@pytest.mark.processes
def test_the_console_hears_that_a_loop_has_ended_which_has_run_a_plan_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was judged by its silence, which here is none for an hour; until then generations were opened with it."""

    class Begun(own_loop.OwnLoop):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.generation = 1

    monkeypatch.setattr(own_loop, "OwnLoop", Begun)
    monkeypatch.setattr(reporter_module, "CLOSE_SECONDS", 0.5)
    with console(tmp_path, "--suspect", "3000", "--dead", "3600") as server:
        first, last = (lonely(server, worker=w, job=Job.uniform(2, 1, 2)) for w in PAIR)
        first.membership()
        last.membership().sums(None)
        job_id = server.job_id()
        last.close()
        until(lambda: server.read(f"/jobs/{job_id}/workers")["workers"][1]["state"] == "finished", "the end of W1_0")
        assert server.read(f"/jobs/{job_id}")["state"] == "starting"
        first.close()
        assert server.read(f"/jobs/{job_id}")["state"] == "finished"


@pytest.mark.processes
def test_the_last_step_may_be_taken_alone_however_the_end_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the job is finished was heard while it was looked whether it is, and taken for a reason to end."""
    ends: list[Any] = []
    answers: list[JobState] = []
    get = ConsoleClient.get

    def record(client: ConsoleClient, *args: Any, **more: Any) -> Any:
        answer = get(client, *args, **more)
        if isinstance(answer, JobStatus) and threading.current_thread().name == "generations":
            answers.append(answer.state)
        return answer

    class Kept(own_loop.OwnLoop):
        """It lacks only the last step. The end of the job comes in while it is asked."""

        _alone = False

        @property
        def alone(self) -> bool:
            while ends:
                ends.pop()()
            return self._alone

        @alone.setter
        def alone(self, value: bool) -> None:
            self._alone = value

        def may_step_alone(self, iteration: int) -> bool:
            return True

    monkeypatch.setattr(own_loop, "OwnLoop", Kept)
    monkeypatch.setattr(ConsoleClient, "get", record)
    with console(tmp_path) as server:
        first, last = (lonely(server, worker=w, job=Job.uniform(2, 1, 2)) for w in PAIR)
        first.membership()
        now = last.membership()
        now.sums(None)
        # Of two answers that it is over, the thread has taken up the first.
        ends += [lambda: until(lambda: answers.count(JobState.FINISHED) >= 2, "the end to be heard"), first.close]
        assert [now.newest(), now.newest()] == [1, 2]
        last.close()


@pytest.mark.processes
def test_a_loop_all_of_whose_processes_are_started_again_gets_plans(tmp_path: Path) -> None:
    """torchrun starts all of them again when one dies, and they go on from a checkpoint that the console does not know
    of. It is restarted meanwhile."""
    plans: list[tuple[str, tuple[str, ...]]] = []

    def reporter(worker: str, name: str) -> Reporter:
        def on_plan(deployment: Deployment, _plan: Plan) -> None:
            plans.append((name, deployment.living))

        return lonely(server, worker=worker, job=Job.uniform(2, 1, 2), on_plan=on_plan)

    everybody = ("W0_0", "W1_0")
    with console(tmp_path) as server:
        before = [reporter(worker, "before") for worker in everybody]
        job_id = server.job_id()
        until(lambda: plans.count(("before", everybody)) == 2, "the first plan")
        after = [reporter("W0_0", "W0_0 again")]
        until(lambda: ("W0_0 again", everybody) in plans, "the plan with the first one")
        server.crash()
        server.start(server.port)
        after.append(reporter("W1_0", "W1_0 again"))
        until(lambda: ("W1_0 again", everybody) in plans, "the plan with both")
        for one in after:
            one.iteration(0, loss=0.5)
        until(lambda: server.read(f"/jobs/{job_id}")["state"] == "running", "both to have their state")
        for one in (*after, *before):
            one.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"console": "nowhere"}, "console: got 'nowhere'"),
        ({"worker": "W1_0"}, "worker: got 'W1_0',"),
        ({"worker": "me"}, "worker: got 'me'"),
        ({"profile": "no/such.json"}, "profile: got 'no/such.json',"),
        ({"run": "night\nrun"}, "run: got"),
        ({"run": "Läufe"}, "run: got"),
        ({"run": 5}, "run: got 5"),
        ({"job": None}, "job: got None"),
        ({"worker": None}, "worker: got None"),
        ({"console": None}, "console: got None"),
        ({"profile": []}, "profile: got []"),
        ({"iterations": 0}, "iterations: got 0"),
        ({"technique": "fault-free"}, "technique: got 'fault-free', expected adaptive"),
        ({"memory": "lots"}, "memory: got 'lots'"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "console": "http://127.0.0.1:1",
        "run": "alone",
        "job": Job.uniform(1, 1, 2),
        "worker": "W0_0",
        "iterations": 10,
        **changes,
    }
    with pytest.raises(InputError) as caught:
        Reporter(**arguments)
    assert words in str(caught.value)
