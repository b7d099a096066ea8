"""The lead of a job on several nodes is lost: another goes on, with the same bits, and no worker restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.agent.consoles import console, until
from tests.agent.launches import Launched
from tests.agent.node_runs import free_port, kill_group, launch_node, members
from tests.agent.node_runs import lines as lead_lines
from tests.agent.runs import TINY, Run, fault_free, forked
from tests.golden import golden

pytestmark = pytest.mark.processes

PACED = ("--pace", "F=15ms,I=15ms,W=15ms")
ITERATIONS = 16
"""So many that a busy machine sees what it waits for before the job ends."""
GRID = ("--pipelines", "3", "--stages", "2", "--micro-batches", "3", "--iterations", str(ITERATIONS))


def record_of(folder: Path, rank: int) -> Run:
    return Run(0, "", tuple(lead_lines(folder, f"run{rank}.jsonl")))


def log_of(folder: Path, rank: int) -> str:
    return (folder / f"node{rank}.log").read_text()


def leading(folder: Path, ranks: Iterable[int], iterations: int = 1) -> int | None:
    """Which of these nodes has led for so many iterations. Where the lead was lost while it handed out a copy, only
    one of them may have the newest: so it need not be the first."""
    return next((rank for rank in ranks if len(record_of(folder, rank).iterations) >= iterations), None)


def ended(folder: Path, launchers: Sequence[Launched], ranks: Sequence[int]) -> Run:
    """The record of the job, once these nodes have ended well."""
    for rank in ranks:
        assert launchers[rank].wait(90) == 0, log_of(folder, rank)
    led = leading(folder, ranks)
    assert led is not None
    return record_of(folder, led)


@contextmanager
def nodes(folder: Path, count: int, *options: str) -> Iterator[list[Launched]]:
    """Launchers of one job; each writes its record to folder/run<rank>.jsonl, if it leads."""
    place = ("--nodes", str(count), "--lead", f"127.0.0.1:{free_port()}")
    job = (*GRID, *TINY, *place)

    def begin(rank: int) -> Launched:
        own = ("--node-rank", str(rank), "--record", str(folder / f"run{rank}.jsonl"))
        return launch_node(folder / f"node{rank}.log", *job, *own, *options)

    launchers = [begin(rank) for rank in range(count)]
    try:
        yield launchers
    finally:
        for launcher in launchers:
            kill_group(launcher)


@pytest.fixture(scope="module")
def reference() -> Run:
    return fault_free(iterations=ITERATIONS, pipelines=3, stages=2, micro_batches=3)


def test_another_node_goes_on(reference: Run, tmp_path: Path) -> None:
    with nodes(tmp_path, 3, *PACED) as launchers:
        until(lambda: len(lead_lines(tmp_path, "run0.jsonl")) >= 2, "two iterations")
        os.kill(launchers[0].pid, signal.SIGKILL)
        run = ended(tmp_path, launchers, (1, 2))
        until(lambda: not members(launchers[0].pid), "the end of the lost lead's workers", 30)
    assert run.losses == reference.losses and run.final == reference.final
    assert sorted(failure["worker"] for failure in run.failures) == ["W0_0", "W0_1"]


def test_of_two_nodes_one_goes_on_and_writes_on(reference: Run, tmp_path: Path) -> None:
    """Both write the same file, as on a disk that they share."""
    record = ("--record", str(tmp_path / "run.jsonl"))
    with nodes(tmp_path, 2, *PACED, *record) as (lead, node):
        until(lambda: len(lead_lines(tmp_path)) >= 2, "two iterations")
        before = set(members(node.pid))
        os.kill(lead.pid, signal.SIGKILL)
        until(lambda: len([x for x in lead_lines(tmp_path) if "failure" in x]) == 4, "the node to go on")
        assert before <= set(members(node.pid)), "none of its processes has ended"
        assert node.wait(90) == 0, log_of(tmp_path, 1)
    run = Run(0, "", tuple(lead_lines(tmp_path)))
    assert [line["iteration"] for line in run.iterations] == list(range(ITERATIONS))
    assert run.losses == reference.losses and run.final == reference.final


@pytest.mark.chaos
def test_the_successor_is_lost_too(reference: Run, tmp_path: Path) -> None:
    with nodes(tmp_path, 3, *PACED) as launchers:
        until(lambda: leading(tmp_path, [0], 2) is not None, "two iterations")
        os.kill(launchers[0].pid, signal.SIGKILL)
        until(lambda: leading(tmp_path, (1, 2), 4) is not None, "two iterations more")
        second = leading(tmp_path, (1, 2))
        assert second is not None
        os.kill(launchers[second].pid, signal.SIGKILL)
        run = ended(tmp_path, launchers, [3 - second])
    assert [line["iteration"] for line in run.iterations] == list(range(ITERATIONS))
    assert run.losses == reference.losses and run.final == reference.final


@pytest.mark.chaos
def test_a_lead_that_was_stopped_for_long_leads_no_more(reference: Run, tmp_path: Path) -> None:
    """Its process is there, so it takes more than half of the nodes to take its place; it notices, and ends. What it
    had not read yet it writes where the other does not: their record is one file, as on a disk that they share."""
    record = ("--record", str(tmp_path / "run.jsonl"))
    with nodes(tmp_path, 3, *PACED, "--silence-timeout", "4", *record) as launchers:
        until(lambda: len(lead_lines(tmp_path)) >= 2, "two iterations")
        os.kill(launchers[0].pid, signal.SIGSTOP)
        until(lambda: any("leads from here on" in log_of(tmp_path, rank) for rank in (1, 2)), "another to lead")
        os.kill(launchers[0].pid, signal.SIGCONT)
        assert launchers[0].wait(60) == 1, log_of(tmp_path, 0)
        for rank in (1, 2):
            assert launchers[rank].wait(90) == 0, log_of(tmp_path, rank)
        until(lambda: not members(launchers[0].pid), "the end of the old lead's workers", 30)
    run = Run(0, "", tuple(lead_lines(tmp_path)))
    assert [line["iteration"] for line in run.iterations] == list(range(ITERATIONS))
    assert run.losses == reference.losses and run.final == reference.final


@pytest.mark.chaos
def test_a_node_that_stood_still_when_the_lead_was_lost_comes_back(reference: Run, tmp_path: Path) -> None:
    """It comes too late to follow the new one; one of its workers, which had died before, starts there again."""
    last = 3 * ITERATIONS
    again = ("--kill", "W2_0@1:F1", "--rejoin", f"W2_0@{last - 8}", "--iterations", str(last))
    with nodes(tmp_path, 4, *PACED, *again) as launchers:
        until(lambda: record_of(tmp_path, 0).failures, "the first death")
        os.kill(launchers[2].pid, signal.SIGSTOP)
        os.kill(launchers[0].pid, signal.SIGKILL)
        until(lambda: leading(tmp_path, (1, 3), 3) is not None, "another to lead")
        os.kill(launchers[2].pid, signal.SIGCONT)
        run = ended(tmp_path, launchers, (1, 3))
        assert launchers[2].wait(90) == 0, log_of(tmp_path, 2)
    assert golden("comes-back-without") in log_of(tmp_path, 2)
    assert run.losses[:ITERATIONS] == reference.losses
    assert run.iterations[-1]["living"] == 1 + min(line["living"] for line in run.iterations)


@pytest.mark.chaos
def test_the_lead_is_lost_while_a_worker_takes_its_state(reference: Run, tmp_path: Path) -> None:
    slowly = ("--hand-over-rate", "20KB", "--kill", "W1_1@1:F1", "--rejoin", "W1_1@1")
    with nodes(tmp_path, 3, *PACED, *slowly) as launchers:
        until(
            lambda: any("generation" in x and x["generation"] >= 3 for x in record_of(tmp_path, 0).lines), "the death"
        )
        os.kill(launchers[0].pid, signal.SIGKILL)
        run = ended(tmp_path, launchers, (1, 2))
    assert run.losses == reference.losses and run.final == reference.final


@pytest.mark.chaos
def test_the_node_that_led_comes_back_as_one_of_the_others(reference: Run, tmp_path: Path) -> None:
    """With the same command; one of its workers starts there again."""
    last = 40  # a launcher starts meanwhile
    again = ("--kill", "W0_1@1:F1", "--rejoin", f"W0_1@{last - 8}", "--iterations", str(last))
    with nodes(tmp_path, 2, *PACED, *again) as launchers:
        until(lambda: len(record_of(tmp_path, 0).iterations) >= 3, "three iterations")
        kill_group(launchers[0])
        _, *arguments = launchers[0].arguments
        launchers[0] = launch_node(tmp_path / "again.log", *arguments)
        assert launchers[1].wait(120) == 0, log_of(tmp_path, 1)
        assert launchers[0].wait(30) == 0, (tmp_path / "again.log").read_text()
    run = record_of(tmp_path, 1)
    assert run.losses[: len(reference.losses)] == reference.losses and len(run.losses) == last
    assert [line["living"] for line in run.iterations[-last // 2 :: last // 2 - 1]] == [2, 3]
    assert len(record_of(tmp_path, 0).iterations) < last, "the other writes the record"


@pytest.mark.chaos
def test_the_job_of_a_console_goes_on(reference: Run, tmp_path: Path) -> None:
    """It has every iteration once, and decides for the new lead as for the one before."""
    with console(tmp_path) as server, nodes(tmp_path, 2, *PACED, "--console", server.root, "--no-migrate") as launchers:
        job_id = server.job_id()
        until(lambda: len(record_of(tmp_path, 0).iterations) >= 2, "two iterations")
        before = set(members(launchers[1].pid))
        os.kill(launchers[0].pid, signal.SIGKILL)
        until(lambda: record_of(tmp_path, 1).failures, "the node to go on")
        assert before <= set(members(launchers[1].pid)), "none of its processes has ended"
        assert launchers[1].wait(90) == 0, log_of(tmp_path, 1)
        run = record_of(tmp_path, 1)
        assert run.losses == reference.losses and run.final == reference.final
        state = server.read(f"/jobs/{job_id}")
        assert state["state"] == "finished" and state["committed"] == ITERATIONS
        rows = server.read(f"/jobs/{job_id}/iterations?limit=100")["iterations"]
        assert [row["loss_hex"] for row in rows] == reference.losses


@pytest.mark.chaos
def test_of_two_nodes_the_console_replaces_a_lead_that_stands_still(reference: Run, tmp_path: Path) -> None:
    """Neither node is a majority. The one that was stopped notices when it goes on, and does nothing more."""
    quick = ("--heartbeat", "0.5", "--suspect", "3", "--dead", "6")
    record = ("--record", str(tmp_path / "run.jsonl"))
    slowly = ("--pace", "F=150ms,I=150ms,W=150ms")  # its workers train on meanwhile, and are not to come to the end
    with (
        console(tmp_path, *quick) as server,
        nodes(tmp_path, 2, *slowly, "--console", server.root, "--no-migrate", *record) as (lead, node),
    ):
        job_id = server.job_id()
        until(lambda: len(lead_lines(tmp_path)) >= 2, "two iterations")
        before = set(members(node.pid))
        os.kill(lead.pid, signal.SIGSTOP)
        until(lambda: "leads from here on" in "".join(str(line) for line in lead_lines(tmp_path)), "the node to lead")
        assert before <= set(members(node.pid)), "none of its processes has ended"
        os.kill(lead.pid, signal.SIGCONT)
        assert lead.wait(60) == 1, log_of(tmp_path, 0)
        assert node.wait(90) == 0, log_of(tmp_path, 1)
        until(lambda: not members(lead.pid), "the end of the old lead's workers", 30)
        state = server.read(f"/jobs/{job_id}")
        assert state["state"] == "finished" and state["committed"] == ITERATIONS
        rows = server.read(f"/jobs/{job_id}/iterations?limit=100")["iterations"]
        assert [row["loss_hex"] for row in rows] == reference.losses
    run = Run(0, "", tuple(lead_lines(tmp_path)))
    assert [line["iteration"] for line in run.iterations] == list(range(ITERATIONS))
    assert run.losses == reference.losses and run.final == reference.final


@pytest.mark.chaos
def test_spare_ranks_are_known_to_who_leads_next(tmp_path: Path) -> None:
    """One is left on node 1 before the lead is lost, another one after it: they make a worker again."""
    longer = ("--iterations", str(2 * ITERATIONS))  # a worker starts meanwhile
    ranks = ("--ranks-per-worker", "2", "--workload", "agent.examples.tensor_parallel:Gpt", *longer)
    calm = forked(tmp_path / "calm.jsonl", *GRID, *TINY, *ranks, timeout=300)
    assert calm.status == 0, calm.errors
    kills = ("--kill", "W1_0.1@1:F0", "--kill", f"W1_1.1@{ITERATIONS - 5}:F0")
    with nodes(tmp_path, 3, *PACED, *ranks, *kills) as launchers:
        until(lambda: any("failure" in line for line in record_of(tmp_path, 0).lines), "the first death", 120)
        os.kill(launchers[0].pid, signal.SIGKILL)
        run = ended(tmp_path, launchers, (1, 2))
    living = [line["living"] for line in run.iterations]
    assert living[living.index(2) :][-1] == 3, living
    assert run.losses == calm.losses and run.final == calm.final
