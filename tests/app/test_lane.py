"""Requests that come all the time: the first goes through every guard, the next only where it still may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from lane_served import Served, heartbeat
from ui_console import ConsoleHere, JobHere

from openrecycle.agent.protocol import API
from openrecycle.app.api import lean
from openrecycle.app.notify import AT_ONCE, Topic
from openrecycle.app.security.access import Access

pytestmark = pytest.mark.processes


@pytest.fixture
def served(here: ConsoleHere) -> Iterator[Served]:
    yield Served(here.console, JobHere(here.console, "lane").register())
    here.console.access = Access()


def test_the_second_goes_straight(served: Served) -> None:
    assert served.beat(seq=1) == (200, True, {"generation": 1})
    assert served.beat(seq=2) == (200, False, {"generation": 1})
    assert served.beat("W1_1", seq=20) == (200, False, {"generation": 1})  # of the same node
    job = served.console.job(served.job.job_id)
    job.take_heartbeats()
    assert (job.contacts["W0_1"].beat.seq, job.contacts["W1_1"].beat.seq) == (2, 20)


def test_another_sender_is_looked_at_anew(served: Served) -> None:
    served.beat()
    assert served.beat(Authorization="Bearer wrong")[:2] == (401, True)
    assert served.beat(Host="elsewhere.example")[:2] == (421, True)
    assert served.beat(Origin="http://elsewhere.example")[:2] == (403, True)
    assert served.beat(seq=2)[:2] == (200, False)
    other = JobHere(served.console, "another").register()
    mine, served.job = served.job, other
    assert served.beat()[:2] == (403, True)
    served.job = mine


def test_a_token_that_is_revoked_is_good_for_nothing_at_once(served: Served) -> None:
    served.beat()
    assert served.beat(seq=2)[:2] == (200, False)
    served.console.tokens.revoke(served.token.id)
    assert served.beat(seq=3)[:2] == (401, True)
    assert served.beat(seq=4)[:2] == (401, True)


def test_a_token_that_is_used_here_is_known_to_be_used(served: Served) -> None:
    served.beat()
    served.console.tokens.refresh(write=True)
    served.beat(seq=2)
    assert served.token.id in served.console.tokens._used


def test_what_is_wrong_is_refused_as_ever(served: Served) -> None:
    whole_way = served.post("heartbeats", {**heartbeat("W0_1", 1), "seq": -1})
    assert whole_way[:2] == (422, True) and whole_way[2]["detail"].startswith("seq: got -1, expected")
    served.beat()
    straight = served.post("heartbeats", {**heartbeat("W0_1", 1), "seq": -1})
    assert (straight[0], straight[2]) == (whole_way[0], whole_way[2])
    fenced = {**heartbeat("W0_1", 1), "incarnation": "somebody-else"}
    assert served.post("heartbeats", fenced)[::2] == (409, served.post("heartbeats", fenced)[2])
    assert served.post("heartbeats", fenced)[2]["code"] == "fenced"
    assert served.post("heartbeats", {**heartbeat("W9_9", 1)})[0] == 404
    large = {**heartbeat("W0_1", 1), "op_milliseconds": {"F": 1.0}, "phase": "x" * 70_000}
    assert served.post("heartbeats", large)[:2] == (413, True)


def test_another_leader_is_asked_anew(served: Served) -> None:
    served.beat()
    served.leader = None
    assert served.beat(seq=2)[:2] == (200, True)
    served.leader = served.console
    assert served.beat(seq=3)[:2] == (200, True)
    assert served.beat(seq=4)[:2] == (200, False)


def test_acknowledgements_and_deployments_too(served: Served) -> None:
    job = served.console.job(served.job.job_id)
    said = {"worker": "W0_1", "incarnation": "W0_1-a", "generation": 1, "state": "resumed"}
    first = served.post("acknowledgements", said)
    assert first[:2] == (200, True) and served.post("acknowledgements", said) == (200, False, first[2])
    assert served.post("acknowledgements", said, **{"Idempotency-Key": "k"})[:2] == (200, True)
    path = f"{API}/jobs/{served.job.job_id}/deployment"
    answers = []
    for query in ("after=0&wait=1", "after=0", "wait=0&after=0", "after=1", "after=1&wait=0.1"):
        before = served.whole
        answer = served.client.get(f"{path}?{query}", headers=served.headers)
        answers.append((answer.status_code, served.whole > before))
    # An unusual order of the query goes the lane, is not understood there, and is answered by FastAPI.
    assert answers == [(200, True), (200, False), (200, True), (204, False), (204, False)]
    assert (
        json.loads(served.client.get(f"{path}?after=0", headers=served.headers).content)["generation"]
        == job.state.generation
    )
    assert served.client.get(f"{path}?after=x", headers=served.headers).status_code == 422
    assert served.client.get(f"{path}?after=0&wait=61", headers=served.headers).status_code == 422
    operator = {"Authorization": "Bearer the console's own"}
    assert served.client.head(path, headers=operator).status_code == 405


def test_all_are_counted(served: Served) -> None:
    def counted() -> float:
        labels = {"method": "POST", "route": f"{API}/jobs/{{job_id}}/heartbeats", "status": "2xx"}
        return served.console.metrics.registry.get_sample_value("openrecycle_http_requests_total", labels) or 0.0

    before = counted()
    for seq in range(1, 6):
        served.beat(seq=seq)
    assert counted() == before + 5


def test_thousands_that_wait_are_woken_some_at_a_time() -> None:
    async def run() -> list[int]:
        topic, told, steps = Topic(), [False], list[int]()
        waiting = [asyncio.create_task(topic.wait_for(lambda: told[0] or None, 60)) for _ in range(3 * AT_ONCE)]
        await asyncio.sleep(0)
        told[0] = True
        topic.publish()
        while not all(task.done() for task in waiting):
            await asyncio.sleep(0)
            steps.append(sum(task.done() for task in waiting))
        return steps

    steps = asyncio.run(run())
    assert max(b - a for a, b in zip([0, *steps], steps, strict=False)) <= AT_ONCE


def test_a_large_deployment_is_compressed_for_those_who_can_read_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "LARGE_BYTES", 10)
    path = f"{API}/jobs/{served.job.job_id}/deployment?after=0"
    answers = {}
    for accepted in ("gzip, deflate", "identity", "gzip;q=0", "deflate, gzip;q=0.5"):
        headers = {**served.headers, "Accept-Encoding": accepted}
        answer = served.client.get(path, headers=headers)
        answers[accepted] = answer.headers.get("content-encoding"), answer.json()
    assert [how for how, _ in answers.values()] == ["gzip", None, None, "gzip"]
    assert len({json.dumps(said) for _, said in answers.values()}) == 1
    assert answers["identity"][1]["generation"] == 1
