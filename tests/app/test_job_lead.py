"""Two launchers of a job on several nodes both would lead: its console takes what one of them says, and no more of the
other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.coordination.membership import FailureTimeouts
from openrecycle.agent.messages.protocol import DEPOSED, LEAD
from openrecycle.app.security.access import Access
from openrecycle.app.security.callers import CALLER, Caller, Role
from openrecycle.app.server import create_api
from openrecycle.db.store import Store

pytestmark = pytest.mark.processes

TIMEOUTS = FailureTimeouts(0.05, 0.5, 1.0, 0.5)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[ConsoleHere]:
    made = ConsoleHere(tmp_path, TIMEOUTS)
    yield made
    made.close()


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
    assert old.asks() == (200, "") and not nobody.claims(2, 1, 1)

    def might() -> bool:
        return nobody.claims(2, 1, 1, ask=True)

    until(might, "the lead to be silent for too long")
    assert old.asks() == (200, "") and not nobody.claims(2, 1, 1), "it is heard again"
    until(might, "the lead to be silent for too long")
    with ThreadPoolExecutor(4) as several:
        claims = [several.submit(nobody.claims, 2, node, 1) for node in (1, 2, 3, 4)]
    granted = [node for node, claim in enumerate(claims, 1) if claim.result()]
    assert len(granted) == 1, "of those that ask together one has it"
    new = Lead(here, job.job_id, f"2/{granted[0]}")
    assert old.asks() == (409, DEPOSED) and old.finishes() == 409
    assert not here.console.jobs.find(job.job_id).state.over, "what it says changes nothing"
    assert new.asks() == (200, "") and nobody.claims(2, granted[0], 1), "the answer may have been lost"


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
