"""Two console processes on one real PostgreSQL: one leads, the other takes over, nothing is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import requests
from console_server import Agents, ConsoleServer, ForkedConsole
from sqlalchemy import create_engine, text
from ui_console import until

from tests.conftest import new_database
from tests.golden import golden

pytestmark = pytest.mark.processes

DEADLINE = 60.0


@pytest.fixture(scope="module")
def url(postgres_url: str) -> str:
    return new_database(postgres_url)


@pytest.fixture(scope="module")
def consoles(url: str) -> Iterator[list[ConsoleServer]]:
    """Two processes, shared by the tests of this module: either may lead."""
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            server = ForkedConsole(url, "--api-only")
            stack.callback(end, server)
            made.append(server)
        yield made


@pytest.fixture
def pair(consoles: list[ConsoleServer]) -> tuple[ConsoleServer, ConsoleServer]:
    """The leader and its standby."""
    for server in consoles:
        if server.process.poll() is not None:
            server.start()
        server.process.send_signal(signal.SIGCONT)
    until(lambda: sum(map(ready, consoles)) == 1, "one to lead")
    leader, standby = sorted(consoles, key=ready, reverse=True)
    until(lambda: leader.root in standby.get("/jobs").text, "the standby to know the leader")
    return leader, standby


def end(server: ConsoleServer) -> None:
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGCONT)
    server.close()


def ready(server: ConsoleServer) -> bool:
    return requests.get(f"{server.root}/readyz", timeout=30).status_code == 200


def iteration(number: int) -> dict[str, Any]:
    return {
        "iterations": [
            {"iteration": number, "loss": 2.5, "loss_hex": (2.5).hex(), "seconds": 0.25, "generation": 1, "living": 2}
        ]
    }


def committed(server: ConsoleServer, agents: Agents) -> list[int]:
    rows = server.get(agents.path("/iterations"), params={"limit": 1000}).json()["iterations"]
    return [row["iteration"] for row in rows]


def test_a_standby_says_who_leads(pair: tuple[ConsoleServer, ConsoleServer]) -> None:
    leader, standby = pair
    assert requests.get(f"{standby.root}/healthz", timeout=30).status_code == 200
    for path in ("/readyz", "/api/v1/jobs", "/api/v1/openapi.json", "/metrics", "/anything"):
        answer = requests.get(standby.root + path, timeout=30)
        assert answer.status_code == 503, path
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"] == "1"
        problem = answer.json()
        assert problem["code"] == "standby"
        assert f"{leader.root} leads (term " in problem["detail"]
        assert problem["detail"].endswith(f"ask {leader.root}")
    assert standby.post("/jobs", {"name": "x"}).json()["code"] == "standby"
    assert ready(leader) and leader.get("/jobs").status_code == 200


def test_reports_that_were_accepted_are_there_once_after_the_leader_was_killed(
    pair: tuple[ConsoleServer, ConsoleServer],
) -> None:
    """SIGKILL between any two reports: what was answered with success is stored, what was not is sent again."""
    leader, standby = pair
    agents = Agents(leader, pipelines=2, stages=1, iterations=100_000)
    agents.register_all()
    agents.resume(agents.names, 1)
    accepted: list[int] = []
    enough, stop = threading.Event(), threading.Event()

    def report() -> None:
        """As an agent does it: the next one after the last was taken, by whoever takes it."""
        servers, number = [leader, standby], 0
        while not stop.is_set():
            try:
                address = f"{servers[0].base}{agents.path('/iterations')}"
                answer = requests.post(address, json=iteration(number), timeout=30)
            except requests.RequestException:
                servers.reverse()
                continue
            if answer.status_code == 503:
                servers.reverse()
                continue
            assert answer.status_code == 204, answer.text
            accepted.append(number)
            number += 1
            if number == 20:
                enough.set()

    thread = threading.Thread(target=report)
    thread.start()
    try:
        assert enough.wait(DEADLINE)
        leader.process.kill()
        leader.process.wait(30)
        before = len(accepted)
        until(lambda: ready(standby), "the standby to lead")
        until(lambda: len(accepted) >= before + 10, "reports to the new leader")
    finally:
        stop.set()
        thread.join()
    assert committed(standby, agents)[: len(accepted)] == accepted[:1000]
    agents.server = standby
    # It decides, too: the dead are fenced, the generation follows.
    for name in agents.names:
        assert agents.heartbeat(name).json()["generation"] == 1
    agents.exit("W1_0")
    assert agents.deployment(after=1)["failed"] == ["W1_0"]
    texts = [e["text"] for e in standby.get(agents.path("/events"), params={"limit": 500}).json()["events"]]
    assert golden("the-console-was-restarted-and") in texts


def test_a_leader_that_stood_still_writes_nothing_any_more(pair: tuple[ConsoleServer, ConsoleServer], url: str) -> None:
    leader, standby = pair
    agents = Agents(leader, pipelines=2, stages=1)
    agents.register_all()
    agents.resume(agents.names, 1)
    assert leader.post(agents.path("/iterations"), iteration(0)).status_code == 204
    leader.process.send_signal(signal.SIGSTOP)
    # On its way while the leader does not run; it will read it when it does.
    late: list[requests.Response] = []
    sender = threading.Thread(
        target=lambda: late.append(
            requests.post(f"{leader.base}{agents.path('/iterations')}", json=iteration(1), timeout=DEADLINE)
        )
    )
    sender.start()
    until(lambda: ready(standby), "the standby to lead")
    assert committed(standby, agents) == [0]
    before = rows(url)
    leader.process.send_signal(signal.SIGCONT)
    sender.join(DEADLINE)
    assert [answer.status_code for answer in late] == [503]
    assert leader.get("/jobs").json()["code"] == "standby"
    until(lambda: standby.root in leader.get("/jobs").json()["detail"], "the old leader to know the new one")
    assert committed(standby, agents) == [0]
    assert rows(url) == before, "not even an event of its own"
    # And it is a standby that takes over again.
    assert standby.post(agents.path("/iterations"), iteration(1)).status_code == 204
    standby.stop(signal.SIGTERM)
    until(lambda: ready(leader), "the first one to lead again")
    assert committed(leader, agents) == [0, 1]


@pytest.mark.chaos
def test_when_the_database_drops_everybody_one_of_them_leads_again(
    pair: tuple[ConsoleServer, ConsoleServer], url: str
) -> None:
    """As when it restarts."""
    agents = Agents(pair[0], pipelines=2, stages=1)
    agents.register_all()
    term = lead(url)
    end_sessions(url)
    until(lambda: lead(url) > term, "the next term")

    def all_resume() -> bool:
        """As agents do, who try again and elsewhere: one of the two may not have seen yet that it is cut off."""
        agents.server = max(pair, key=ready)
        states = ("adopted", "formed", "resumed")
        return all(agents.acknowledge(name, 1, state).status_code == 200 for state in states for name in agents.names)

    until(all_resume, "one that leads")
    assert agents.job()["state"] == "running"


def test_agents_are_no_strangers_while_nobody_knows_who_leads(postgres_url: str) -> None:
    """A launcher that is told that its token is a wrong one ends its job."""
    url, token = new_database(postgres_url), "a-token-for-one-console"
    only = ForkedConsole(url, "--api-only", environment={"OPENRECYCLE_TOKEN": token})
    try:
        made = only.post("/tokens", {"role": "agent"}, headers={"Authorization": f"Bearer {token}"})
        agent = {"Authorization": f"Bearer {made.json()['token']}"}
        term, seen = lead(url), set[int]()
        end_sessions(url)

        def takes_reports() -> bool:
            answer = only.post("/jobs/x/heartbeats", {}, headers=agent).status_code
            seen.add(answer)
            return lead(url) > term and answer not in (401, 503)

        until(takes_reports, "it to lead again")
        assert 401 not in seen and 503 in seen, seen
    finally:
        only.close()


@pytest.mark.chaos
def test_tokens_are_asked_for_at_a_standby_too(postgres_url: str) -> None:
    url = new_database(postgres_url)
    token = "a-token-for-two-consoles"
    environment = {"OPENRECYCLE_TOKEN": token}
    leader = ForkedConsole(url, "--api-only", environment=environment)
    try:
        headers = {"Authorization": f"Bearer {token}"}
        made = leader.post("/tokens", {"role": "agent"}, headers=headers)
        assert made.status_code == 201, made.text
        standby = ForkedConsole(url, "--api-only", environment=environment)
        try:
            for known in (token, made.json()["token"]):
                answer = standby.get("/jobs", headers={"Authorization": f"Bearer {known}"})
                assert answer.status_code == (503 if known == token else 403), answer.text
                beat = standby.post("/jobs/x/heartbeats", {}, headers={"Authorization": f"Bearer {known}"})
                assert (beat.status_code, beat.json()["code"]) == (503, "standby")
            assert standby.get("/jobs", headers={"Authorization": "Bearer wrong"}).status_code == 401
        finally:
            standby.close()
    finally:
        leader.close()


def database(url: str) -> Any:
    return create_engine(url.replace("postgresql:", "postgresql+psycopg:"))


def rows(url: str) -> list[Any]:
    """Everything of jobs that a console writes."""
    engine = database(url)
    with engine.connect() as connection:
        found = [
            connection.execute(text(f"select * from {table} order by 1, 2")).all()
            for table in ("event", "generation", "iteration", "audit", "worker_state")
        ]
    engine.dispose()
    return found


def lead(url: str) -> int:
    engine = database(url)
    with engine.connect() as connection:
        term = connection.execute(text("select term from leadership")).scalar_one()
    engine.dispose()
    return int(term)


def end_sessions(url: str) -> None:
    engine = database(url)
    with engine.connect() as connection:
        connection.execute(
            text(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
        )
    engine.dispose()
