"""What the console decides beyond re-routing, carried out by real processes: the bits stay those of a run
without failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.consoles import JobConsole, console, until
from tests.agent.launches import Launched
from tests.agent.runs import TINY, Run, forked
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID = ("--pipelines", "3", "--stages", "2", "--micro-batches", "2")
ITERATIONS = 75


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Nothing happens to it."""
    folder = tmp_path_factory.mktemp("reference")
    run = forked(folder / "run.jsonl", *GRID, *TINY, "--iterations", str(ITERATIONS))
    assert run.status == 0, run.errors
    return run


class Job:
    """A paced job that a real console decides on."""

    def __init__(self, server: JobConsole, record: Path, *arguments: str) -> None:
        self.server, self.record = server, record
        command = ["train", "--record", str(record), *GRID, *TINY]
        command += [
            "--console",
            server.root,
            "--demo",
            "--iterations",
            str(ITERATIONS),
            "--pace",
            "F=16ms,I=16ms,W=16ms",
        ]
        self.process = Launched(*command, *arguments, errors=record.with_suffix(".errors"))
        self.job_id = server.job_id()

    def read(self, path: str = "") -> Any:
        return self.server.read(f"/jobs/{self.job_id}{path}")

    def ask(self, path: str, body: Any = None) -> Any:
        answer = self.server.post(f"/jobs/{self.job_id}{path}", body)
        answer.raise_for_status()
        return answer.json()

    def generations(self) -> list[dict[str, Any]]:
        return list(self.read("/generations")["generations"])

    def texts(self) -> list[str]:
        return [event["text"] for event in self.read("/events?after=0&limit=2000")["events"]]

    def commits(self, more: int = 3) -> None:
        """Training goes on."""
        after = self.read()["committed"]
        until(lambda: self.read()["committed"] >= min(after + more, ITERATIONS), "training")

    def settles(self, living: int) -> int:
        """Waits until so many workers train by the newest generation; returns its number."""
        until(lambda: self.read()["living"] == living and self.read()["state"] == "running", f"{living} that train")
        return int(self.read()["generation"])

    def ends(self, reference: Run) -> list[dict[str, Any]]:
        """Waits for the end; the losses and the parameters must be the reference's. Returns the record."""
        assert self.process.wait(120) == 0
        lines = [json.loads(line) for line in self.record.read_text().splitlines()]
        assert [line["loss"] for line in lines if "loss" in line] == reference.losses
        assert lines[-1]["final"] == reference.final
        return lines


@contextmanager
def job(folder: Path, *arguments: str) -> Iterator[Job]:
    with console(folder) as server:
        running = Job(server, folder / "run.jsonl", *arguments)
        try:
            yield running
        finally:
            running.process.end()


@pytest.mark.chaos
def test_a_failure_is_moved_to_where_it_costs_less(reference: Run, tmp_path: Path) -> None:
    """Two of three workers of stage 0 die. One of stage 1 takes over there, because that trains more; it takes
    its state from the one that lives. A worker that is started anew takes the place that it gave up."""
    with job(tmp_path, "--kill", "W0_0@1:F1", "--kill", "W1_0@3:I0") as running:
        moved = until(lambda: next((e for e in running.generations() if e["moves"]), None), "a move")
        ((source, to),) = moved["moves"]
        assert source in ("W0_1", "W1_1", "W2_1") and to in ("W0_0", "W1_0")
        assert not moved["restore"] and moved["joining"] == [to]
        assert sorted(name[-1] for name in moved["failed"]) == ["0", "1"]
        assert "migrate and re-route" in moved["reason"] and "samples/s" in moved["reason"]
        running.settles(4)
        texts = running.texts()
        assert any(golden("the-best-option-is-migrate") in t and golden("this-job-does-so-now") in t for t in texts)
        assert golden("gives-up-its-stage-and", source, to) in texts
        # It stays where it is: with the failures spread, nothing else is clearly better.
        running.commits(5)
        assert running.generations()[-1]["generation"] == moved["generation"]
        running.ask(f"/workers/{source}/restart")
        running.settles(5)
        back = running.generations()[-1]
        assert source in back["joining"] and not back["moves"]
        running.ends(reference)
    # The others finished their iteration before it moved: nothing was run twice for it.
    lines = [json.loads(line) for line in running.record.read_text().splitlines()]
    assert sorted(line["failure"]["worker"] for line in lines if "failure" in line) == ["W0_0", "W1_0"]
    assert [line["move"] for line in lines if "move" in line] == [
        {"worker": source, "to": to, "generation": moved["generation"], "reason": moved["reason"]}
    ]


@pytest.mark.chaos
def test_an_operator_decides_and_lets_workers_go(reference: Run, tmp_path: Path) -> None:
    """Manual mode: the survivors of a death wait for a choice; those of its pipeline stand by, and come back with the
    worker that was lost. Then a worker that is asked to leave finishes its iteration first."""
    with job(tmp_path) as running:
        running.settles(6)
        put = f"{running.server.base}/jobs/{running.job_id}/mode"
        running.server.session.put(put, json={"mode": "manual", "choice_timeout": 3000}, timeout=30).raise_for_status()
        running.ask("/workers/W1_1/kill")
        seen = until(lambda: (c := running.read("/choice"))["candidates"] and c, "the candidates")
        assert seen["waiting"] and seen["failed"] == ["W1_1"]
        assert {c["name"] for c in seen["candidates"]} >= {"re-route", "stand by"}
        assert [e["generation"] for e in running.generations()] == [1]
        running.ask("/choice", {"name": "stand by", "failed": ["W1_1"]})
        running.settles(4)
        assert running.generations()[-1]["failed"] == ["W1_0", "W1_1"]
        running.commits()
        running.ask("/workers/W1_1/restart")
        running.settles(6)
        running.ask("/workers/W2_0/drain")
        generation = running.settles(5)
        assert running.generations()[-1]["failed"] == ["W2_0"]
        running.commits()
        running.ask("/workers/W2_0/restart")
        assert running.settles(6) > generation
        lines = running.ends(reference)
        assert [line["failure"]["worker"] for line in lines if "failure" in line] == ["W1_1"]
        assert [line["left"]["worker"] for line in lines if "left" in line] == ["W1_0", "W2_0"]


@pytest.mark.chaos
def test_workers_of_a_sharded_optimizer_leave(reference: Run, tmp_path: Path) -> None:
    """The second one is asked while others may still take what the first one has. When each goes:
    test_leaving_shards."""
    with job(tmp_path, "--optimizer-sharding", "zero1") as running:
        running.settles(6)
        running.ask("/workers/W0_0/drain")
        running.settles(5)
        # Refused while the generation forms that is without the first one.
        until(lambda: running.ask("/workers/W1_0/drain"), "W1_0 to be asked")
        lines = running.ends(reference)
        assert sorted(line["left"]["worker"] for line in lines if "left" in line) == ["W0_0", "W1_0"]
        assert not any("failure" in line for line in lines)


@pytest.mark.chaos
def test_one_that_is_to_leave_outlives_a_death(tmp_path: Path) -> None:
    """The parts of the state that it has come to nobody else before the job ends: so it stays, whoever dies."""
    wider = ("--workload-options", TINY[1].replace("32", "128"))
    whole = forked(tmp_path / "whole.jsonl", *GRID, *wider, "--iterations", str(ITERATIONS))
    with job(tmp_path, *wider, "--optimizer-sharding", "zero1", "--hand-over-rate", "10KB") as running:
        running.settles(6)
        running.ask("/workers/W0_0/drain")
        running.settles(5)
        running.ask("/workers/W2_1/kill")
        running.settles(4)
        lines = running.ends(whole)
        assert not any("left" in line for line in lines)
        assert [line["failure"]["worker"] for line in lines if "failure" in line] == ["W2_1"]
