"""How a job goes on, decided by an operator over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from console_server import Agents, ConsoleServer, ForkedConsole
from ui_console import until

from tests.golden import golden

pytestmark = pytest.mark.processes

MS = {"F": 40.0, "I": 40.0, "W": 40.0}
# Nobody sends heartbeats here, and comparing the options takes its time on a busy machine.
PATIENT = ("--api-only", "--suspect", "80000", "--dead", "86400")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    server = ForkedConsole(f"sqlite:///{tmp_path_factory.mktemp('choice') / 'console.db'}", *PATIENT)
    yield server
    server.close()


def started(server: ConsoleServer, **spec: Any) -> Agents:
    """3 x 4, all train; times are known, so that options can be compared."""
    agents = Agents(server, durations=MS, paced=True, **spec)
    agents.register_all()
    agents.resume(agents.names, 1)
    return agents


def choice(agents: Agents) -> dict[str, Any]:
    answer = agents.server.get(agents.path("/choice"))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def put_mode(agents: Agents, mode: str, **more: Any) -> Any:
    body = {"mode": mode, **more}
    headers = {"X-Actor": "ada"}
    return agents.server.session.put(agents.server.base + agents.path("/mode"), json=body, headers=headers, timeout=30)


def test_the_operator_compares_and_chooses(server: ConsoleServer) -> None:
    agents = started(server, migrate=True, micro_batches=3)
    assert choice(agents) == {
        "mode": "automatic",
        "choice_timeout": 60.0,
        "frozen_by": "",
        "paused": False,
        "stopped": False,
        "waiting": False,
        "seconds_left": None,
        "failed": [],
        "candidates": [],
        "better": "",
    }
    answer = put_mode(agents, "manual", choice_timeout=600)
    assert answer.status_code == 200 and golden("waits-up-to-600-s") in answer.json()["reason"]
    agents.exit("W0_2")
    agents.exit("W1_2")
    until(lambda: bool(choice(agents)["candidates"]), "the candidates come")
    seen = choice(agents)
    assert seen["waiting"] and 0 < seen["seconds_left"] <= 600 and seen["failed"] == ["W0_2", "W1_2"]
    assert [c["name"] for c in seen["candidates"]] == ["migrate and re-route", "re-route", "stand by"]
    assert seen["better"] == "migrate and re-route"
    assert seen["candidates"][0]["rate"] > seen["candidates"][1]["rate"] > seen["candidates"][2]["rate"]
    for candidate in seen["candidates"]:
        plan = server.get(agents.path(f"/plans/{candidate['plan']}")).json()
        assert plan["failed"] == candidate["failed"]
    sentence = server.get(agents.path()).json()["sentence"]
    assert sentence.startswith(golden("waiting-for-you-3-candidates-without"))

    stale = server.post(agents.path("/choice"), {"name": "re-route", "failed": ["W0_2"]})
    assert (stale.status_code, stale.json()["code"]) == (409, "no_choice")
    wrong = server.post(agents.path("/choice"), {"name": "pray"})
    assert wrong.status_code == 422
    assert wrong.json()["detail"].startswith("name: got 'pray',")
    best = seen["candidates"][0]
    body = {"name": best["name"], "failed": seen["failed"]}
    assert server.post(agents.path("/choice"), body, headers={"X-Actor": "ada"}).status_code == 200
    newest = agents.deployment(after=1)
    assert newest["failed"] == best["failed"] and not newest["restore"]
    ((source, to),) = best["moves"]
    assert newest["incarnations"][to] == agents.incarnations[source]
    assert newest["plan_fingerprint"] == best["plan"]
    assert newest["reason"].endswith(golden("ada-chose-to-migrate-and-re-route"))
    events = server.get(agents.path("/events"), params={"limit": 500}).json()["events"]
    assert any(e["kind"] == "operator" and e["text"].startswith(golden("ada-chose-to-migrate-and")) for e in events)


@pytest.mark.chaos
def test_a_mode_outlives_the_console(tmp_path: Path) -> None:
    server = ForkedConsole(f"sqlite:///{tmp_path / 'console.db'}", *PATIENT)
    try:
        agents = started(server)
        assert put_mode(agents, "manual", choice_timeout=500).status_code == 200
        agents.exit("W1_1")
        assert choice(agents)["waiting"]
        assert server.post(agents.path("/pause")).status_code == 202
        server.stop()
        server.start()
        after = choice(agents)
        assert (after["mode"], after["choice_timeout"], after["waiting"], after["paused"]) == (
            "manual",
            500,
            True,
            True,
        )
        assert put_mode(agents, "automatic").status_code == 200
        assert agents.deployment(after=1)["failed"] == ["W1_1"]
        assert not choice(agents)["waiting"]
    finally:
        server.close()


def test_a_worker_is_drained(server: ConsoleServer) -> None:
    agents = started(server)
    answer = server.post(agents.path("/workers/W2_1/drain"), headers={"X-Actor": "ada"})
    assert (answer.status_code, answer.json()) == (202, {"reason": "ada asked W2_1 to leave"})
    newest = agents.deployment(after=1)
    assert newest["failed"] == newest["leaving"] == ["W2_1"]
    stored = server.get(agents.path("/generations")).json()["generations"]
    assert [generation["let_go"] for generation in stored] == [[], [["W2_1", False]]]
    again = server.post(agents.path("/workers/W2_1/drain"))
    assert (again.status_code, again.json()["code"]) == (409, "not_running")
    worker = next(w for w in server.get(agents.path("/workers")).json()["workers"] if w["name"] == "W2_1")
    assert (worker["state"], worker["detail"]) == ("leaving", golden("asked-to-leave-by-ada"))
    # It still counts until it has left, and another one has no place before.
    assert not agents.heartbeat("W2_1").json()["refused"]
    early = server.post(agents.path("/workers/W2_1/restart"))
    assert (early.status_code, early.json()["code"]) == (409, "not_failed")
    agents.exit("W2_1")
    assert server.post(agents.path("/workers/W2_1/restart")).status_code == 202
    assert agents.heartbeat("W2_1").json()["refused"][0]["code"] == "fenced"


def test_a_job_is_paused_and_goes_on(server: ConsoleServer) -> None:
    agents = started(server)
    assert server.post(agents.path("/resume")).json()["code"] == "not_paused"
    assert server.post(agents.path("/pause"), headers={"X-Actor": "ada"}).status_code == 202
    assert server.post(agents.path("/pause")).json()["code"] == "paused"
    now = choice(agents)
    assert now["paused"] and not now["stopped"], "nobody has said yet that it waits"
    assert agents.job()["condition"] == "pausing"
    assert agents.job()["sentence"].startswith("Pausing: waiting for W0_0, ")
    assert server.post(agents.path("/resume"), headers={"X-Actor": "ada"}).status_code == 202
    assert not choice(agents)["paused"]
    commands = server.get(agents.path("/commands")).json()["commands"]
    assert [(command["seq"], command["kind"]) for command in commands] == [(1, "pause"), (2, "resume")]
    texts = [e["text"] for e in server.get(agents.path("/events"), params={"limit": 500}).json()["events"]]
    assert texts[-2:] == [golden("ada-asked-to-pause-the"), golden("ada-asked-to-resume-the")]


def test_a_loop_of_its_own_is_not_paused_and_its_workers_are_not_started(server: ConsoleServer) -> None:
    agents = started(server, own_loop=True)
    agents.exit("W1_1")
    for path in ("/pause", "/workers/W1_1/restart"):
        refused = server.post(agents.path(path))
        assert (refused.status_code, refused.json()["code"]) == (409, "own_loop")
    assert agents.job()["condition"] != "pausing"


def test_the_baseline_is_measured_again_when_somebody_asks(server: ConsoleServer) -> None:
    agents = Agents(server)
    agents.register_all()
    agents.resume(agents.names, 1)
    ask = partial(server.post, agents.path("/baseline"), headers={"X-Actor": "ada"})
    early = ask()
    assert (early.status_code, early.json()["code"]) == (409, "not_measured"), "it will be measured anyway"

    def commit(first: int, last: int, seconds: float) -> None:
        row = {"loss": 2.0, "loss_hex": (2.0).hex(), "seconds": seconds, "generation": 1, "living": 12}
        rows = [{"iteration": i, **row} for i in range(first, last + 1)]
        assert server.post(agents.path("/iterations"), {"iterations": rows}).status_code == 204

    def rate() -> float | None:
        return agents.job()["fault_free_samples_per_second"]  # type: ignore[no-any-return]

    commit(0, 40, 1.0)
    until(lambda: rate() is not None, "it is measured")
    before = rate()
    commit(41, 60, 2.0)
    assert ask().status_code == 202 and rate() == before, "it stays until there is another one"
    commit(61, 99, 2.0)
    until(lambda: rate() != before, "it is measured anew")
    assert rate() == pytest.approx((before or 0) / 2, rel=0.02)
    texts = [e["text"] for e in server.get(agents.path("/events"), params={"limit": 500}).json()["events"]]
    assert any(text.startswith(golden("ada-has-the-fault-free-rate")) for text in texts)
    assert any("until now" in text for text in texts), "a change is an event"


def test_what_is_wrong_is_said_by_its_name(server: ConsoleServer) -> None:
    agents = started(server)
    assert put_mode(agents, "manual", choice_timeout=0).json()["detail"].startswith("choice_timeout: got 0, expected")
    assert put_mode(agents, "semi").json()["detail"] == "mode: got 'semi', expected 'automatic' or 'manual'"
    nothing = server.post(agents.path("/choice"), {"name": "re-route"})
    assert (nothing.status_code, nothing.json()["code"]) == (409, "no_choice")
    assert server.post(agents.path("/workers/W9_9/drain")).status_code == 404


def test_a_plan_is_frozen_and_a_failure_handled_all_the_same(server: ConsoleServer) -> None:
    agents = started(server)

    def put(frozen: object) -> Any:
        where = server.base + agents.path("/frozen")
        return server.session.put(where, json={"frozen": frozen}, headers={"X-Actor": "ada"}, timeout=30)

    assert put("perhaps").status_code == 422
    answer = put(True)
    assert answer.status_code == 200 and golden("stays-while-its-workers-do") in answer.json()["reason"]
    assert choice(agents)["frozen_by"] == "ada"
    assert "frozen by ada" in agents.job()["sentence"]
    agents.exit("W1_2")
    assert agents.deployment(after=1)["failed"] == ["W1_2"]
    assert put(False).json()["reason"] == golden("ada-unfroze-the-plan")
    assert choice(agents)["frozen_by"] == ""
