"""A job's life over real HTTP: 12 workers register, one dies, comes back, the job ends."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import pytest
import requests
from console_server import Agents, ConsoleServer

from openrecycle.planner.check import check
from openrecycle.planner.plans.packed import unpack
from openrecycle.planner.plans.plan import Plan
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes


# What the console decides is the same on each database; what it stores of it is tried on both.
ONE_DATABASE = pytest.mark.parametrize("server", ["sqlite", at_length("postgresql")], indirect=True)


def plan_of(agents: Agents, fingerprint: str) -> Plan:
    answer = agents.server.get(agents.path(f"/plans/{fingerprint}"))
    assert answer.status_code == 200, answer.text
    return Plan.from_json(answer.content)


def wait_for_plans(agents: Agents) -> dict[str, Any]:
    """The job, once all plans ahead are made."""
    until = time.monotonic() + 60
    while (job := agents.job())["planned_ahead"] < job["plans_to_make"] or not job["plans_to_make"]:
        assert time.monotonic() < until, job
        time.sleep(0.1)
    return job


@ONE_DATABASE
def test_what_a_launcher_reckons_that_workers_take_is_kept_and_may_be_left_out(server: ConsoleServer) -> None:
    told = [5 * 2**20, 7 * 2**20]
    job = Agents(server, pipelines=1, stages=2, stage_bytes=told).job()
    assert job["spec"]["stage_bytes"] == told
    assert Agents(server, pipelines=1, stages=2).job()["spec"]["stage_bytes"] == []


def test_a_lost_node_is_one_generation(agents: Agents) -> None:
    agents.register_all()
    agents.resume(agents.names, 1)
    lost = [f"W1_{stage}" for stage in range(3)]
    ends = [
        {"worker": name, "incarnation": agents.incarnations[name], "cause": "exit", "reporter": "launcher"}
        for name in lost
    ]
    told = [report for end in ends for report in (end, {**end, "restart": {"number": 1, "most": 3, "node": 1}})]
    for _ in range(2):  # the first answer may be lost
        answer = agents.server.post(agents.path("/failures"), {"failures": told}).json()
        assert (answer["generation"], answer["taken"], answer["refused"]) == (2, len(told), [])
    generations = agents.server.get(agents.path("/generations")).json()["generations"]
    assert [(g["generation"], g["failed"]) for g in generations] == [(1, []), (2, lost)]
    assert plan_of(agents, generations[1]["plan_fingerprint"]).failed == tuple(lost)
    workers = {w["name"]: w for w in agents.server.get(agents.path("/workers")).json()["workers"]}
    assert [name for name, worker in workers.items() if worker["state"] == "failed"] == lost
    assert all("(1 of 3)" in workers[name]["detail"] for name in lost), "who starts them again is known of all"


def test_a_worker_dies_and_comes_back(agents: Agents) -> None:
    first = agents.register_all()
    assert (first["generation"], first["failed"], first["joining"]) == (1, [], [])
    assert first["living"] == agents.names
    agents.resume(agents.names, 1)
    assert agents.job()["state"] == "running"

    reply = agents.heartbeat("W1_2")
    assert (reply.status_code, reply.json()["generation"], reply.json()["taken"]) == (200, 1, 1)

    answer = agents.exit("W1_2").json()
    assert (answer["taken"], answer["refused"], answer["generation"]) == (1, [], 2)
    second = agents.deployment(after=1)
    survivors = [name for name in agents.names if name != "W1_2"]
    assert (second["generation"], second["failed"], second["living"]) == (2, ["W1_2"], survivors)
    plan = plan_of(agents, second["plan_fingerprint"])
    assert plan.failed == ("W1_2",)
    assert check(plan) == []
    assert sorted(plan.workers) == sorted(survivors)
    workers = {w["name"]: w for w in agents.server.get(agents.path("/workers")).json()["workers"]}
    assert workers["W1_2"]["state"] == "failed"
    assert workers["W0_2"]["takes_rerouted"] + workers["W2_2"]["takes_rerouted"] == 6
    assert workers["W0_1"]["takes_rerouted"] == 0

    fenced = agents.heartbeat("W1_2", generation=1)
    assert [(r["index"], r["worker"], r["code"]) for r in fenced.json()["refused"]] == [(0, "W1_2", "fenced")]

    agents.resume(survivors, 2)
    assert agents.register("W1_2", incarnation="W1_2-b")["generation"] == 3
    third = agents.deployment(after=2)
    assert (third["generation"], third["failed"], third["joining"]) == (3, [], ["W1_2"])
    agents.resume(agents.names, 3)
    job = agents.job()
    assert (job["state"], job["sentence"]) == ("running", golden("training-in-generation-3-with"))
    assert third["plan_fingerprint"] == first["plan_fingerprint"]

    ended = agents.server.post(agents.path("/finish"), {"state": "finished", "reason": "all iterations are done"})
    assert ended.status_code == 204
    assert agents.job()["state"] == "finished"
    assert agents.register("W0_0", incarnation="late")["refused"][0]["code"] == "job_over"

    generations = agents.server.get(agents.path("/generations")).json()["generations"]
    assert [e["generation"] for e in generations] == [1, 2, 3]
    assert len(generations[1]["acknowledgements"]) == 3 * 11
    events = agents.server.get(agents.path("/events"), params={"limit": 500}).json()["events"]
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    assert [e["text"] for e in events if e["kind"] == "failure"] == [golden("w1-2-failed-its-process")]


@ONE_DATABASE
def test_who_is_out_is_advised_on(agents: Agents) -> None:
    agents.register_all()
    agents.resume(agents.names, 1)
    row = {"loss": 2.5, "loss_hex": (2.5).hex(), "seconds": 0.25, "generation": 1, "living": 12}
    agents.server.post(agents.path("/iterations"), {"iterations": [{"iteration": i, **row} for i in range(3)]})
    assert agents.job()["advice"] is None
    agents.exit("W1_2")
    agents.resume([name for name in agents.names if name != "W1_2"], 2)
    until = time.monotonic() + 60
    while (advice := agents.job()["advice"]) is None:
        assert time.monotonic() < until, agents.job()
        time.sleep(0.05)
    assert advice.startswith(golden("with-w1-2-empty-the"))
    events = agents.server.get(agents.path("/events"), params={"limit": 500}).json()["events"]
    assert [e["text"] for e in events if e["kind"] == "plan"] == [advice]

    agents.register("W1_2", incarnation="W1_2-b")
    agents.resume(agents.names, 3)
    assert agents.job()["advice"] is None


def test_reports_are_kept(agents: Agents) -> None:
    agents.register_all()
    row = {"loss": 2.5, "loss_hex": (2.5).hex(), "seconds": 0.25, "generation": 1, "living": 12}
    batch = {"iterations": [{"iteration": i, **row} for i in range(3)]}
    for _ in range(2):
        assert agents.server.post(agents.path("/iterations"), batch).status_code == 204
    again = {"iterations": [{"iteration": 2, **row, "loss": 9.0}, {"iteration": 3, **row}]}
    assert agents.server.post(agents.path("/iterations"), again).status_code == 204
    found = agents.server.get(agents.path("/iterations"), params={"after": 1}).json()["iterations"]
    assert [(i["iteration"], i["loss"]) for i in found] == [(2, 2.5), (3, 2.5)]
    assert agents.job()["committed"] == 4

    lost = {"iteration": 4, **row, "loss": None, "loss_hex": "nan", "skipped": [*range(12)]}
    assert agents.server.post(agents.path("/iterations"), {"iterations": [lost]}).status_code == 204
    (found,) = agents.server.get(agents.path("/iterations"), params={"after": 3}).json()["iterations"]
    assert (found["loss"], found["loss_hex"], agents.job()["committed"]) == (None, "nan", 5), "it counts all the same"

    recovery = {
        "worker": "W1_2",
        "generation": 2,
        "detected_ms": 3,
        "unblocked_ms": 60,
        "reformed_ms": 90,
        "resumed_ms": 250,
    }
    for _ in range(2):
        assert agents.server.post(agents.path("/recoveries"), recovery).status_code == 204
    events = agents.server.get(agents.path("/events")).json()["events"]
    assert sum("resumed 250 ms after W1_2 died" in e["text"] for e in events) == 1

    too_far = {"iterations": [{"iteration": 100, **row}]}
    refused = agents.server.post(agents.path("/iterations"), too_far)
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("iterations.iteration: got 100, expected below 100")


@ONE_DATABASE
def test_plans_are_made_ahead_for_every_failure(agents: Agents) -> None:
    job = wait_for_plans(agents)
    plans = agents.server.get(agents.path("/plans")).json()["plans"]
    assert len(plans) == job["plans_to_make"]
    assert {len(p["failed"]) for p in plans} == {0, 1, 2}
    assert [p["failed"] for p in plans if len(p["failed"]) == 1] == [["W0_0"], ["W0_1"], ["W0_2"], ["W0_3"]]
    for listed in plans:
        assert check(plan_of(agents, listed["fingerprint"])) == []


def test_a_launcher_gets_the_same_plan_as_people(agents: Agents) -> None:
    fingerprint = agents.register_all()["plan_fingerprint"]
    packed = agents.server.get(agents.path(f"/plans/{fingerprint}?packed=true"))
    assert unpack(packed.content) == plan_of(agents, fingerprint)
    for query in ("", "?packed=true"):
        for name in ("nothing", "in-force"):
            missing = agents.server.get(agents.path(f"/plans/{name}{query}"))
            assert (missing.status_code, missing.json()["code"]) == (404, "unknown_plan")


@ONE_DATABASE
def test_a_failure_wakes_every_long_poll(agents: Agents, server: ConsoleServer) -> None:
    agents.register_all()
    agents.resume(agents.names, 1)
    wait_for_plans(agents)
    arrived: list[float] = []
    waiting = threading.Barrier(13)

    def follow() -> None:
        with requests.Session() as session:
            session.get(f"{server.root}/healthz", timeout=10)
            waiting.wait()
            url = f"{server.base}{agents.path('/deployment')}"
            answer = session.get(url, params={"after": 1, "wait": 30}, timeout=40)
            arrived.append(time.perf_counter())
            assert answer.json()["generation"] == 2

    followers = [threading.Thread(target=follow) for _ in range(12)]
    for follower in followers:
        follower.start()
    waiting.wait()
    begin = time.perf_counter()
    agents.exit("W2_1")
    for follower in followers:
        follower.join(40)
    milliseconds = [1000 * (t - begin) for t in arrived]
    assert len(milliseconds) == 12
    print(f"exit report to deployment at 12 agents: median {statistics.median(milliseconds):.1f} ms")
    # A loose limit, for busy machines: it tells waking at once from polling or timing out.
    assert statistics.median(milliseconds) < 1000


@ONE_DATABASE
def test_a_long_poll_ends_with_nothing_in_time(agents: Agents) -> None:
    agents.register_all()
    begin = time.monotonic()
    answer = agents.server.get(agents.path("/deployment"), params={"after": 1, "wait": 0.3})
    assert (answer.status_code, answer.content) == (204, b"")
    assert time.monotonic() - begin >= 0.3
    commands = agents.server.get(agents.path("/commands"), params={"wait": 0})
    assert commands.json() == {"commands": []}


@ONE_DATABASE
def test_a_broken_transfer_is_taken_from_members_only(agents: Agents) -> None:
    agents.register_all()
    agents.resume(agents.names, 1)
    report = {
        "worker": "W0_2",
        "incarnation": "W0_1-a",
        "cause": "transfer",
        "reporter": "W0_1",
        "detail": "reset",
        "generation": 1,
    }
    stranger = {**report, "incarnation": "other"}
    answer = agents.server.post(agents.path("/failures"), {"failures": [stranger, report]}).json()
    assert (answer["taken"], [(r["index"], r["code"]) for r in answer["refused"]]) == (1, [(0, "fenced")])
    for name in agents.names:
        agents.heartbeat(name)
    assert agents.deployment(after=1)["reason"].startswith(golden("the-link-between-w0-1"))


@ONE_DATABASE
@pytest.mark.parametrize("lost", ["1", at_length("3")])
def test_a_stage_without_peers_halts_the_job(agents: Agents, lost: str) -> None:
    agents.register_all()
    for pipeline in range(3):
        agents.exit(f"W{pipeline}_{lost}")
    job = agents.job()
    assert job["state"] == "halted"
    assert golden("stage-has-no-living-worker", lost, lost, lost, lost) in job["sentence"]


def test_iterations_that_waited_for_the_console_count_from_when_they_were_committed(agents: Agents) -> None:
    """A console that was away held the time against the job: its last iteration had just been committed."""
    agents.register_all()
    row = {"loss": 2.5, "loss_hex": (2.5).hex(), "seconds": 10.0, "generation": 1, "living": 12}
    before = time.time()
    batch = {"iterations": [{"iteration": i, **row} for i in range(3)], "age": 600.0}
    assert agents.server.post(agents.path("/iterations"), batch).status_code == 204
    at = [i["committed_at"] for i in agents.server.get(agents.path("/iterations")).json()["iterations"]]
    assert before - 600 <= at[2] <= time.time() - 600
    assert at == pytest.approx([at[2] - 20, at[2] - 10, at[2]])
