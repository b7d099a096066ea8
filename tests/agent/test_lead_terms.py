"""Which node leads, as a console has it: one at a time, and never one that has lost the lead."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.coordination.membership import LeadTerm, may_speak_as_lead, may_take_lead
from openrecycle.agent.messages.protocol import LEAD
from openrecycle.agent.nodes import succession
from openrecycle.agent.nodes.pool import NodeHub
from openrecycle.agent.nodes.succession import (
    Arbiter,
    Copy,
    Lead,
    LeadStatus,
    Search,
    may_ask_console,
    may_go_on,
    may_lead,
)
from tests.agent.consoles import console, until
from tests.agent.node_runs import free_port

BORNE = 5.0
terms = st.builds(LeadTerm, st.integers(1, 6), st.integers(0, 3))
moves = st.lists(
    st.one_of(
        st.tuples(st.just("says"), terms),
        st.tuples(st.just("claims"), terms, st.integers(0, 6)),
        st.tuples(st.just("waits"), st.sampled_from([1.0, BORNE])),
    ),
    max_size=30,
)


@given(moves)
def test_one_leads_at_a_time_and_terms_only_rise(history: list[tuple[str, LeadTerm, int]]) -> None:
    newest, unheard, led = LeadTerm(), 0.0, dict[int, int]()
    for kind, who, *about in history:
        before = newest
        if kind == "waits":
            unheard += float(who)  # type: ignore[arg-type]
        elif kind == "says" and may_speak_as_lead(newest, who)[0]:
            newest, unheard = who, 0.0
        elif kind == "claims" and may_take_lead(newest, who, about[0], unheard, BORNE)[0]:
            heard_of = about[0] >= before.term or before.node == who.node
            assert who == before or (heard_of and (unheard >= BORNE or before.node == who.node))
            newest, unheard = who, 0.0 if who != before else unheard
        assert newest.term >= before.term
        assert led.setdefault(newest.term, newest.node) == newest.node, "a term is of one node"
        assert all(
            not may_speak_as_lead(newest, LeadTerm(term, node))[0] for term, node in led.items() if term < newest.term
        )


@given(terms, st.integers(0, 3), st.floats(0, 60))
def test_a_claim_whose_answer_was_lost_is_granted_again(held: LeadTerm, node: int, unheard: float) -> None:
    wanted = LeadTerm(held.term + 1, node)
    if may_take_lead(held, wanted, held.term, unheard, BORNE)[0]:
        assert may_take_lead(wanted, wanted, held.term, 0.0, BORNE)[0]
        assert may_take_lead(wanted, LeadTerm(wanted.term + 1, node), held.term, 0.0, BORNE)[0]
        assert not may_take_lead(wanted, LeadTerm(wanted.term + 1, node + 1), held.term, 60.0, BORNE)[0]


@given(st.integers(1, 9), st.integers(0, 9))
def test_the_console_is_asked_by_halves_and_whoever_asks_could_go_on_as_the_lead(voters: int, others: int) -> None:
    nodes = voters + others
    asks, _ = may_ask_console(voters, nodes)
    assert asks == may_go_on(voters, nodes)[0]
    assert asks or may_lead(others, nodes)[0], "else nobody could"


@given(terms)
def test_a_term_is_read_as_it_was_written(lead: LeadTerm) -> None:
    assert LeadTerm.parse(str(lead)) == lead


@pytest.mark.parametrize("text", ["", "1", "1/", "/1", "-1/0", "1/0/2", "1 /0", "\u0661/0", "9" * 30 + "/1"])
def test_what_is_no_term_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="TERM/NODE"):
        LeadTerm.parse(text)


def test_a_console_that_is_away_decides_nothing() -> None:
    granted, why = Arbiter(f"http://127.0.0.1:{free_port()}", None, "job").decide(LeadTerm(2, 1), 1)
    assert not granted and why


class HeardMeanwhile(Arbiter):
    """A console that would give the lead away, and when it is to do so has heard the one that leads. refused: how often
    it has not."""

    refused = 0

    def decide(self, wanted: LeadTerm, after: int, *, ask: bool = False) -> tuple[bool, str]:
        self.refused += not ask
        return ask, "the lead was heard meanwhile" if not ask else "nobody was heard"


def test_half_of_the_nodes_go_on_hearing_their_lead_where_the_console_hears_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have promised nothing to each other by then."""
    monkeypatch.setattr(succession, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(succession, "STAND_SECONDS", 0.5)
    hubs = {rank: NodeHub("127.0.0.1", 0, 4, "", lambda _: None, LeadStatus(rank)) for rank in (2, 3)}
    searches: list[Search] = []
    arbiter = HeardMeanwhile("http://127.0.0.1:1", None, "job")
    with socket.create_server(("127.0.0.1", 0)) as lead, socket.create_server(("127.0.0.1", 0)) as other:
        nodes = {0: lead.getsockname(), 1: other.getsockname()}
        nodes |= {rank: (hub.host, hub.port) for rank, hub in hubs.items()}
        copy = Copy("a run", 1, 1, 0, 0, nodes, {}, 0, "", "plan", {})
        try:
            for hub in hubs.values():
                hub.lead_status.follow(0, 0)
                assert hub.lead_status.take(copy)
                hub.lead_status.lose_lead()
            searches += [Search(hub.lead_status, copy, "", arbiter) for hub in hubs.values()]
            until(lambda: arbiter.refused >= 2, "the console to be asked for the lead", 30)
            assert all(hub.lead_status.lead == 0 and hub.lead_status.hear() for hub in hubs.values())
        finally:
            for search in searches:
                search.cancel()
            for hub in hubs.values():
                hub.close("")


@pytest.mark.processes
def test_of_two_nodes_the_other_leads_once_the_console_does_not_hear_the_lead_either(tmp_path: Path) -> None:
    spec = {"name": "nodes", "pipelines": 2, "stages": 1, "micro_batches": 2, "iterations": 9}
    hub = NodeHub("127.0.0.1", 0, 2, "", lambda _: None, LeadStatus(1))
    with (
        console(tmp_path, "--heartbeat", "0.5", "--suspect", "2", "--dead", "3") as server,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        job = requests.post(f"{server.base}/jobs", json=spec, timeout=30).json()["job_id"]
        commands = f"{server.base}/jobs/{job}/commands"
        old, new = ({"headers": {LEAD: lead}, "timeout": 30} for lead in ("1/0", "2/1"))
        nodes = {0: silent.getsockname(), 1: (hub.host, hub.port)}
        copy = Copy("a run", 1, 1, 0, 0, nodes, {}, 0, "", "plan", {})
        hub.lead_status.follow(0, 0)
        assert hub.lead_status.take(copy)
        hub.lead_status.lose_lead()
        try:
            assert requests.get(commands, **old).status_code == 200
            search = Search(hub.lead_status, copy, "", Arbiter(server.root, None, job))
            until(lambda: search.outcome is not None, "the search to end", 30)
            assert search.outcome == Lead(2, frozenset(), frozenset())
            assert [requests.get(commands, **who).status_code for who in (old, new)] == [409, 200]
        finally:
            search.cancel()
            hub.close("")
