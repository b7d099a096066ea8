"""Two launchers of a job on several nodes both would lead: its console takes what one of them says, and no more of the
other."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from starlette.testclient import TestClient
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.coordination.membership import FailureTimeouts, LeadTerm
from openrecycle.agent.messages.protocol import DEPOSED, LEAD, Acknowledgement, BatchReply, WorkerState
from openrecycle.app.api.agents import ReportBatcher
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.security.access import CALLER, Access, Caller, Role
from openrecycle.app.server import create_api
from openrecycle.db.store import Store

pytestmark = pytest.mark.processes

TIMEOUTS = FailureTimeouts(0.05, 0.5, 1.0, 0.5)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[ConsoleHere]:
    made = ConsoleHere(tmp_path, TIMEOUTS)
    yield made
    made.close()


ACKNOWLEDGED = {"worker": "W0_0", "incarnation": "W0_0-a", "generation": 1, "state": "resumed", "iteration": 0}
ITERATION = {"iteration": 0, "loss": 2.0, "loss_hex": (2.0).hex(), "seconds": 0.1, "generation": 1, "living": 12}


def _waiting(sender: LeadTerm) -> int:
    """How many threads wait to change what is stored of a job by what this one has sent; the clock may wait, too."""
    return sum(_is_of(sender, frame) for frame in sys._current_frames().values() if frame.f_code is _WRITING)


_WRITING, _TAKING = (method.__wrapped__.__code__ for method in (LiveJob.writing, LiveJob.taking))  # type: ignore[attr-defined]


def _is_of(sender: LeadTerm, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _TAKING:
        frame = frame.f_back
    return frame is not None and frame.f_locals["sender"] == sender


class Lead:
    """What a launcher asks, as the lead of a term; "": as one of a job on one node."""

    def __init__(self, here: ConsoleHere, job_id: str, lead: str, role: Role | None = None) -> None:
        headers = {LEAD: lead} if lead else {}
        if role is not None:
            headers[CALLER] = Caller("console", "x", role).to_header().decode()
        self._api = TestClient(create_api(here.console), headers=headers, base_url="http://localhost")
        self._job = f"/jobs/{job_id}"

    def asks(self) -> tuple[int, str]:
        answer = self._api.get(f"{self._job}/commands")
        return answer.status_code, "" if answer.status_code == 200 else answer.json()["code"]

    def posts(self, path: str, message: dict[str, Any]) -> tuple[int, str]:
        answer = self._api.post(f"{self._job}/{path}", json=message)
        return answer.status_code, "" if answer.status_code < 300 else answer.json()["code"]

    def finishes(self) -> int:
        return self._api.post(
            f"{self._job}/finish", json={"state": "stopped", "reason": "no worker is left"}
        ).status_code

    def claims(self, term: int, node: int, after: int, *, ask: bool = False) -> bool:
        claim = {"term": term, "node": node, "after": after, "ask": ask}
        return bool(self._api.post(f"{self._job}/lead", json=claim).json()["granted"])


def test_a_lead_that_is_not_heard_loses_it_to_one_that_asks(here: ConsoleHere) -> None:
    job = JobHere(here.console, "nodes").register()
    old, nobody = Lead(here, job.job_id, "1/0"), Lead(here, job.job_id, "")

    def might() -> bool:
        return nobody.claims(2, 1, 1, ask=True)

    def leads() -> bool:  # on a busy machine it is silent for too long between the two requests, too
        return old.asks() == (200, "") and not might()

    until(leads, "the lead to be heard")
    until(might, "the lead to be silent for too long")
    until(leads, "the lead to be heard again")
    until(might, "the lead to be silent for too long")
    with ThreadPoolExecutor(4) as several:
        claims = [several.submit(nobody.claims, 2, node, 1) for node in (1, 2, 3, 4)]
    granted = [node for node, claim in enumerate(claims, 1) if claim.result()]
    assert len(granted) == 1, "of those that ask together one has it"
    new = Lead(here, job.job_id, f"2/{granted[0]}")
    assert old.asks() == (409, DEPOSED) and old.finishes() == 409
    assert not here.console.jobs.find(job.job_id).state.over, "what it says changes nothing"
    assert new.asks() == (200, "") and nobody.claims(2, granted[0], 1), "the answer may have been lost"


def test_what_waits_while_another_takes_the_lead_changes_nothing(here: ConsoleHere) -> None:
    """It came in time, and its turn comes too late."""
    job = JobHere(here.console, "nodes").register()
    live, workers = here.console.jobs.find(job.job_id), [f"W{pipeline}_1" for pipeline in range(3)]
    old = Lead(here, job.job_id, "1/0")
    assert old.asks() == (200, "")
    posts: dict[str, dict[str, Any]] = {
        "failures": {
            "failures": [{"worker": "W0_1", "incarnation": "W0_1-a", "cause": "exit", "reporter": "launcher"}]
        },
        "finish": {"state": "stopped", "reason": "no worker is left"},
        "acknowledgements": {"acknowledgements": [ACKNOWLEDGED]},
        "iterations": {"iterations": [ITERATION]},
    }
    with ThreadPoolExecutor(len(posts)) as several:
        with live.lock:
            answers = [several.submit(old.posts, path, message) for path, message in posts.items()]
            until(lambda: _waiting(LeadTerm(1, 0)) == len(posts), "all of them to wait for their turn")
            live.heard_lead(LeadTerm(2, 1))
        assert [answer.result() for answer in answers] == [(409, DEPOSED)] * len(posts)
    state = live.state
    assert WorkerState.FAILED not in {state.members[name].state for name in workers}
    assert not state.over and state.generation == 1 and not here.store.committed_iterations(job.job_id)
    new = Lead(here, job.job_id, "2/1")
    assert new.posts("failures", posts["failures"])[0] == 200
    assert live.state.members["W0_1"].state is WorkerState.FAILED


def test_reports_of_two_leads_share_no_transaction() -> None:
    taken: list[tuple[int, LeadTerm | None]] = []

    def take(job_id: str, messages: Sequence[Acknowledgement], sender: LeadTerm | None) -> BatchReply:
        taken.append((len(messages), sender))
        if sender == LeadTerm(1, 0):
            raise ConsoleError(409, DEPOSED, "node 1 leads")
        return BatchReply(generation=1, taken=len(messages), refused=())

    async def all_at_once() -> list[BatchReply | BaseException]:
        together, one = ReportBatcher(take), Acknowledgement.model_validate(ACKNOWLEDGED)
        leads = [None, LeadTerm(2, 1), LeadTerm(2, 1), LeadTerm(1, 0), LeadTerm(2, 1)]
        return await asyncio.gather(*(together.post("job", [one], lead) for lead in leads), return_exceptions=True)

    answers = asyncio.run(all_at_once())
    assert [isinstance(answer, BatchReply) for answer in answers] == [True, True, True, False, True]
    assert taken == [(1, None), (2, LeadTerm(2, 1)), (1, LeadTerm(1, 0)), (1, LeadTerm(2, 1))]


def test_a_restarted_console_knows_who_leads(tmp_path: Path) -> None:
    before = ConsoleHere(tmp_path, TIMEOUTS)
    try:
        job = JobHere(before.console, "nodes").register()
        assert Lead(before, job.job_id, "1/0").asks()[0] == 200 and Lead(before, job.job_id, "3/2").asks()[0] == 200
    finally:
        before.close()
    after = ConsoleHere(tmp_path)
    try:
        old, lead, nobody = (Lead(after, job.job_id, who) for who in ("1/0", "3/2", ""))
        assert old.asks() == (409, DEPOSED)
        assert not nobody.claims(4, 1, 3), "it has only just begun to wait for it"
        assert lead.asks() == (200, "") and lead.finishes() == 204
        assert not nobody.claims(4, 1, 3), "nobody leads a job that is over"
    finally:
        after.close()


def test_who_may_only_look_has_no_word_in_it(here: ConsoleHere) -> None:
    job = JobHere(here.console, "nodes").register()
    here.console.security.access = Access("a token of more than sixteen letters", here.console.security.tokens)
    lead, later = Lead(here, job.job_id, "1/0", Role.AGENT), Lead(here, job.job_id, "9/1", Role.VIEW)
    assert lead.asks() == (200, "") and later.asks() == (200, "") and lead.asks() == (200, "")


def test_the_database_gives_a_term_once(here: ConsoleHere) -> None:
    job = JobHere(here.console, "nodes")
    store = Store(here.database)
    assert store.take_lead(job.job_id, 1, 0, 0) and not store.take_lead(job.job_id, 1, 1, 0)
    row = store.job(job.job_id)
    assert row is not None and (row["lead_term"], row["lead_node"]) == (1, 0)
