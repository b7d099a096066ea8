"""Two launchers on this machine as two nodes: a lost node, a lost lead, and torchrun, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.nodes.frames import Frames, greet
from openrecycle.agent.workers.spec import same_on_all
from tests.agent.consoles import until
from tests.agent.node_runs import free_port, kill_group, launch_node, lines, members, start, two_nodes
from tests.agent.runs import GRID, ITERATIONS, TINY, Run, fault_free, forked
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes

PACED = ("--pace", "F=15ms,I=15ms,W=15ms")


@pytest.fixture(scope="module")
def reference() -> Run:
    return fault_free()


def test_a_lost_node_costs_no_bit(reference: Run, tmp_path: Path) -> None:
    """The whole second node is killed, three workers of six and their launcher; the first goes on."""
    with two_nodes(tmp_path, *PACED) as (lead, node):
        until(lambda: len(lines(tmp_path)) >= 2, "two iterations")
        names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in members(node.pid)}
        assert {"W1_0", "W1_1", "W1_2"} <= names, "as people know them who kill one by hand"
        kill_group(node)
        assert lead.wait(90) == 0, (tmp_path / "lead.log").read_text()
    run = Run(0, "", tuple(lines(tmp_path)))
    assert run.losses == reference.losses and run.final == reference.final
    assert sorted(failure["worker"] for failure in run.failures) == ["W1_0", "W1_1", "W1_2"]
    assert run.iterations[0]["living"] == 6 and run.iterations[-1]["living"] == 3
    assert golden("the-connection-with-node-1") in (tmp_path / "lead.log").read_text()


def test_the_options_of_the_lead_count_also_once_another_leads(reference: Run, tmp_path: Path) -> None:
    """The other node says which of those on its own command line do not; not those that are the same, or its own."""
    options = (*GRID, "--iterations", str(ITERATIONS), *PACED)
    place = ("--nodes", "2", "--lead", f"127.0.0.1:{free_port()}")
    others = ("--micro-batches", "3", "--seed", "7", "--optimizer-sharding", "zero1", "--profile", "gpt-3-medium")
    own = ("--workload-options", '{"width": 64}', "--record", str(tmp_path / "run.jsonl"))
    first = str(tmp_path / "first.jsonl")
    lead = launch_node(tmp_path / "lead.log", *options, *TINY, *place, "--node-rank", "0", "--record", first)
    node = launch_node(tmp_path / "node.log", *options, *others, *own, *place, "--node-rank", "1")
    try:
        until(lambda: len(lines(tmp_path, "first.jsonl")) >= 2, "two iterations")
        os.kill(lead.pid, signal.SIGKILL)
        assert node.wait(90) == 0, (tmp_path / "node.log").read_text()
    finally:
        kill_group(lead)
        kill_group(node)
    run = Run(0, "", tuple(lines(tmp_path)))
    assert run.losses == reference.losses and run.final == reference.final
    (text,) = [line for line in (tmp_path / "node.log").read_text().splitlines() if "--seed" in line]
    assert {word for word in text.split() if word.startswith("--")} == {*others[::2], own[0]}


def test_a_worker_elsewhere_dies_and_comes_back(reference: Run, tmp_path: Path) -> None:
    with two_nodes(tmp_path, "--kill", "W1_1@1:I2", "--rejoin", "W1_1@2") as (lead, node):
        assert lead.wait(90) == 0, (tmp_path / "lead.log").read_text()
        assert node.wait(30) == 0, (tmp_path / "node.log").read_text()
    run = Run(0, "", tuple(lines(tmp_path)))
    assert run.losses == reference.losses and run.final == reference.final
    (failure,) = run.failures
    # Its clock is put on the lead's: the death was seen after it happened, and soon.
    assert failure["worker"] == "W1_1" and failure["death_known"] and 0 <= failure["detected_ms"] < 5000


@pytest.mark.chaos
def test_a_sharded_optimizer_outlives_a_node(tmp_path: Path) -> None:
    """Of each part one of the two owners is on either node."""
    grid = ("--pipelines", "4", "--stages", "1", "--micro-batches", "2")
    calm = forked(tmp_path / "calm.jsonl", *grid, *TINY, "--iterations", str(ITERATIONS))
    with two_nodes(tmp_path, *grid, *PACED, "--optimizer-sharding", "zero1") as (lead, node):
        until(lambda: len(lines(tmp_path)) >= 2, "two iterations")
        kill_group(node)
        assert lead.wait(90) == 0, (tmp_path / "lead.log").read_text()
    run = Run(0, "", tuple(lines(tmp_path)))
    assert run.losses == calm.losses and run.final == calm.final
    assert run.iterations[0]["living"] == 4 and run.iterations[-1]["living"] == 2


def test_a_node_waits_for_a_lead_that_was_lost_before_training(reference: Run, tmp_path: Path) -> None:
    """Nobody has been told yet what the job is: it begins anew, once that lead is started again."""
    place = ("--nodes", "2", "--lead", f"127.0.0.1:{free_port()}")
    job = (*GRID, *TINY, "--iterations", str(ITERATIONS), *place)
    logs = [tmp_path / f"{name}.log" for name in ("lead", "node", "again")]
    record = ("--record", str(tmp_path / "run.jsonl"))
    launchers = [launch_node(log, *job, *record, "--node-rank", rank) for log, rank in zip(logs, "01", strict=False)]
    try:
        until(lambda: "node 1 is here" in logs[0].read_text(), "the node to come")
        os.kill(launchers[0].pid, signal.SIGKILL)
        until(lambda: golden("the-connection-with-the-lead") in logs[1].read_text(), "the node to wait", 30)
        until(lambda: not members(launchers[0].pid), "the end of the lead's workers", 30)
        launchers.append(launch_node(logs[2], *job, *record, "--node-rank", "0"))
        assert launchers[2].wait(90) == 0, logs[2].read_text()
        assert launchers[1].wait(30) == 0, logs[1].read_text()
    finally:
        for launcher in launchers:
            kill_group(launcher)
    run = Run(0, "", tuple(lines(tmp_path)))
    assert run.losses == reference.losses and run.final == reference.final


def test_a_worker_that_has_too_much_to_say_ends_no_node(tmp_path: Path) -> None:
    """Of a micro-batch that raises: which samples are in it would be 80 MB."""
    bad = {"inputs": [(1, 1, 1)], "named": 20_000, "width": 32, "heads": 2, "sequence": 16, "batch": 2}
    task = ("--workload", "tests.agent.poisoned:Poisoned", "--workload-options", json.dumps(bad))
    with two_nodes(tmp_path, *task, "--on-bad-sample", "skip") as (lead, node):
        assert lead.wait(90) == 0, (tmp_path / "lead.log").read_text()
        assert node.wait(30) == 0, (tmp_path / "node.log").read_text()
    run = Run(0, "", tuple(lines(tmp_path)))
    assert "W1_0" in {line["raised"]["worker"] for line in run.lines if "raised" in line}
    assert not run.failures and run.iterations[-1]["living"] == 6


@pytest.mark.chaos
def test_under_torchrun(reference: Run, tmp_path: Path) -> None:
    """torchrun names the nodes, and its store says where the lead listens."""
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0")
    place = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    job = ("-m", "agent", "train", *GRID, *TINY, "--iterations", str(ITERATIONS))
    record = ("--record", str(tmp_path / "run.jsonl"))
    lead = start(tmp_path / "lead.log", *torchrun, *place, "--node-rank", "0", *job, *record)
    node = start(tmp_path / "node.log", *torchrun, *place, "--node-rank", "1", *job)
    try:
        assert lead.wait(100) == 0, (tmp_path / "lead.log").read_text()
        assert node.wait(30) == 0, (tmp_path / "node.log").read_text()
    finally:
        kill_group(lead)
        kill_group(node)
    run = Run(0, "", tuple(lines(tmp_path)))
    assert run.losses == reference.losses and run.final == reference.final


def test_a_node_with_another_script_is_turned_away(tmp_path: Path) -> None:
    """It would train on other data, say, and nobody would see that."""
    place = (*GRID, "--iterations", "1", "--nodes", "2", "--lead", f"127.0.0.1:{free_port()}")
    lead = launch_node(tmp_path / "lead.log", *place, *TINY, "--node-rank", "0")
    other = ("--workload", "tests.agent.nan_model:NanModel")
    node = launch_node(tmp_path / "node.log", *place, *other, "--node-rank", "1")
    try:
        assert node.wait(60) == 1
        assert "tests.agent.nan_model" in (tmp_path / "node.log").read_text()
        assert lead.poll() is None, "it waits for the right one"
    finally:
        kill_group(lead)
        kill_group(node)


@pytest.mark.chaos
def test_a_node_with_another_token_is_turned_away(tmp_path: Path) -> None:
    place = (*GRID, *TINY, "--nodes", "2", "--lead", f"127.0.0.1:{free_port()}")
    lead = launch_node(tmp_path / "lead.log", *place, "--node-rank", "0", OPENRECYCLE_TOKEN="one of 16 characters")
    node = launch_node(tmp_path / "node.log", *place, "--node-rank", "1", OPENRECYCLE_TOKEN="two of 16 characters")
    try:
        assert node.wait(60) == 1
        assert golden("the-lead-has-another-token") in (tmp_path / "node.log").read_text()
        until(lambda: golden("a-node-has-another-token") in (tmp_path / "lead.log").read_text(), "the lead's word")
        assert lead.poll() is None, "it waits for the right one"
    finally:
        kill_group(lead)
        kill_group(node)


def test_off_loopback_without_a_token_it_refuses(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OPENRECYCLE_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-m", "agent", "train", "--nodes", "2", "--node-rank", "0", "--lead", "10.0.0.1:1234"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )
    assert done.returncode == 2 and "OPENRECYCLE_TOKEN" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "from", "message": {"kind": "committed", "generation": "x", "iteration": None, "at": 1}},
        at_length({"kind": "from", "message": {"kind": "alive", "op_limit": "x", "current": 5, "at": 1}}),
        at_length({"kind": "from", "message": {"kind": "checkpoint", "at_iteration": 10**9, "problem": None, "at": 1}}),
        at_length({"kind": "exited", "code": "x"}),
    ],
)
def test_what_a_node_says_does_not_end_the_lead(odd: dict[str, Any], tmp_path: Path) -> None:
    """It has the token, and a fault, or another program."""
    token, port, log = "a secret of 20 signs", free_port(), tmp_path / "lead.log"
    grid = ("--pipelines", "2", "--stages", "1", "--micro-batches", "2", "--iterations", "1000000")
    place = ("--nodes", "2", "--node-rank", "0", "--lead", f"127.0.0.1:{port}", "--form-timeout", "5")
    lead = launch_node(log, *grid, *TINY, *place, OPENRECYCLE_TOKEN=token)

    def met() -> Frames | None:
        with contextlib.suppress(OSError):
            return greet(socket.create_connection(("127.0.0.1", port)), token, "node")
        return None

    try:
        node = until(met, "the lead to listen")
        node.send({"rank": 1, "address": "127.0.0.1"} | same_on_all(NamedWorkload("agent.examples.gpt:Gpt")))
        said: dict[str, Any] = {}
        while said.get("kind") != "start":
            said = node.receive(time.monotonic() + 60)
            if said["kind"] == "clock":
                node.send({"kind": "clock", "at": time.monotonic_ns()})
        node.send({"incarnation": said["spec"]["incarnation"]} | odd)
        if odd["kind"] == "from":
            while node.receive(time.monotonic() + 60)["kind"] != "kill":
                pass
            until(lambda: "what can't be understood" in log.read_text(), "the lead's word")
        node.close()
        assert lead.wait(60) == 1, "a worker that is lost before training began ends the job"
        assert "Traceback" not in log.read_text() and golden("the-job-ended-early") in log.read_text()
    finally:
        kill_group(lead)
