"""Tokens with roles: kept as hashes, good for what their role may ask for, and ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flaky_database import FlakyDatabase
from guarded_app import JOB, TOKEN, bearer, guarded
from starlette.websockets import WebSocketDisconnect
from ui_console import console_refuses

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.security.access import (
    AGENTS,
    PEOPLE,
    REFRESH,
    WRONG_PER_ADDRESS,
    Access,
    Caller,
    RateLimits,
    Role,
    Tokens,
    caller_of,
    from_header,
)
from openrecycle.db.access import TokenStore
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from tests.databases import sqlite_in
from tests.golden import golden


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = sqlite_in(tmp_path_factory.mktemp("tokens"))
    row = {"name": "job", "spec": "{}", "state": "running", "created_at": 1.0, "idempotency_key": None}
    Store(database).create_job(JOB, workers=[], **row)
    yield database
    database.close()


@pytest.fixture
def tokens(database: Database) -> Tokens:
    return Tokens(TokenStore(database))


def test_a_token_is_known_again_and_kept_as_a_hash(tokens: Tokens, database: Database) -> None:
    made, text = tokens.create("operate", created_by="ada", name="night shift", days=1)
    secret = text.split("_", 2)[2]
    assert tokens.check(text) == made
    row = TokenStore(database).get(made.id)
    assert row is not None
    assert secret not in repr(row)
    assert secret not in repr(made)
    assert made.secret_hash not in repr(made)
    wrong = text[:-1] + ("A" if text[-1] != "A" else "B")
    assert [tokens.check(other) for other in (wrong, text + "x", text[:-1], "", "orc_", secret, "é")] == [None] * 7


def test_a_token_ends_and_can_be_revoked(database: Database) -> None:
    now = 1_000_000.0
    tokens = Tokens(TokenStore(database), lambda: now)
    _, short = tokens.create("view", created_by="ada", days=1)
    made, long = tokens.create("view", created_by="ada")
    now += 86_399
    assert tokens.check(short)
    now += 1
    assert tokens.check(short) is None
    assert tokens.check(long)
    tokens.revoke(made.id)
    assert tokens.check(long) is None
    with console_refuses("revoked"):
        tokens.revoke(made.id)
    with console_refuses("unknown_token"):
        tokens.revoke("none")


def test_what_another_process_makes_or_revokes_counts_here(database: Database) -> None:
    here, elsewhere = Tokens(TokenStore(database)), Tokens(TokenStore(database))
    made, text = elsewhere.create("view", created_by="ada")
    assert here.check(text) is None
    assert here.look_up(text) == made
    elsewhere.revoke(made.id)
    here.refresh()
    assert here.check(text) is None
    assert here.look_up(text) is None
    assert REFRESH <= 2


def test_when_a_token_was_used_is_written_later(tokens: Tokens, database: Database) -> None:
    made, text = tokens.create("view", created_by="ada")
    tokens.check(text)
    stored = TokenStore(database)
    assert (stored.get(made.id) or {})["last_used_at"] is None
    tokens.refresh(write=True)
    assert time.time() - (stored.get(made.id) or {})["last_used_at"] < 60


def test_when_a_token_was_used_is_written_once_the_database_is_back(tmp_path: Path) -> None:
    database = sqlite_in(tmp_path, FlakyDatabase)
    stored = TokenStore(database)
    tokens = Tokens(stored)
    made, text = tokens.create("view", created_by="ada")
    tokens.check(text)
    database.away = True
    tokens.refresh(write=True)
    database.heal()
    tokens.refresh(write=True)
    assert (stored.get(made.id) or {})["last_used_at"]
    database.close()


def test_the_tokens_of_a_job_end_after_it(database: Database) -> None:
    now = time.time()
    tokens = Tokens(TokenStore(database), lambda: now)
    _, text = tokens.create("agent", created_by="ada", job_id=JOB)
    tokens.end_job(JOB)
    tokens.refresh()
    assert tokens.check(text)
    now += 3601
    assert tokens.check(text) is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"role": "administer"}, "role: got 'administer',"),
        ({"role": "view", "job_id": JOB}, "job: got '0123456789ab',"),
        ({"role": "view", "days": 0}, "days: got 0,"),
        ({"role": "view", "name": "a\nb"}, "name: got 'a\\nb', expected 1 to 80 printable"),
    ],
)
def test_tokens_that_are_not_made(tokens: Tokens, values: dict[str, object], words: str) -> None:
    with pytest.raises(ConsoleError) as refused:
        tokens.create(created_by="ada", **values)  # type: ignore[arg-type]
    assert words in str(refused.value)


# Method, path, and which of view, operate, agent and an agent's of JOB may ask for it.
ASKED = [
    ("GET", "/", "vo"),
    ("GET", "/metrics", "vo"),
    ("GET", "/api/v1/jobs", "vo"),
    ("GET", f"/api/v1/jobs/{JOB}", "voaj"),
    ("GET", "/api/v1/jobs/another", "voa"),
    ("DELETE", f"/api/v1/jobs/{JOB}", "o"),
    ("GET", f"/api/v1/jobs/{JOB}/commands", "voaj"),
    ("GET", f"/api/v1/jobs/{JOB}/history.zip", "vo"),
    ("GET", f"/api/v1/jobs/{JOB}/events", "vo"),
    ("GET", f"/api/v1/jobs/{JOB}/deployment", "voaj"),
    ("GET", "/api/v1/jobs/another/deployment", "voa"),
    ("GET", f"/api/v1/jobs/{JOB}/plans/0123", "voaj"),
    ("GET", f"/api/v1/jobs/{JOB}/plans", "vo"),
    ("GET", "/api/v1/clock", "voaj"),
    ("GET", "/api/v1/caller", "voaj"),
    ("GET", "/api/v1/audit", "o"),
    ("GET", "/api/v1/tokens", ""),
    ("POST", "/api/v1/tokens", ""),
    ("DELETE", "/api/v1/tokens/abc", ""),
    ("POST", "/api/v1/jobs", "oa"),
    ("POST", f"/api/v1/jobs/{JOB}/heartbeats", "oaj"),
    ("POST", "/api/v1/jobs/another/heartbeats", "oa"),
    ("POST", f"/api/v1/jobs/{JOB}/workers/W0_0/kill", "o"),
    ("POST", f"/api/v1/jobs/{JOB}/pause", "o"),
    ("PUT", f"/api/v1/jobs/{JOB}/mode", "o"),
    ("POST", "/api/v1/solves", "o"),
    ("DELETE", "/api/v1/plans/0123", "o"),
    ("GET", "/api/v1/profiles/gpt-3-medium", "vo"),
    ("PUT", "/api/v1/profiles/mine", "o"),
    ("DELETE", "/api/v1/profiles/mine", "o"),
    ("POST", "/_stcore/upload_file/1", "o"),
    ("POST", f"/api/v1/jobs/{JOB}/heartbeats/../pause", "o"),
    ("GET", f"/api/v1/jobs/{JOB}%2f..%2fx/deployment", "vo"),
]


@pytest.fixture
def by_letter(tokens: Tokens) -> dict[str, str]:
    return {
        letter: tokens.create(role, created_by="ada", job_id=job_id)[1]
        for letter, role, job_id in (
            ("v", "view", None),
            ("o", "operate", None),
            ("a", "agent", None),
            ("j", "agent", JOB),
        )
    }


def test_each_role_may_ask_for_its_own(tokens: Tokens, by_letter: dict[str, str]) -> None:
    app = guarded(Access(TOKEN, tokens))
    for method, path, allowed in ASKED:
        may = ""
        for letter, token in by_letter.items():
            answered = app.request(method, path, headers=bearer(token))
            assert answered.status_code in (200, 403), (method, path, letter, answered.text)
            may += letter if answered.status_code == 200 else ""
        assert may == allowed, (method, path)
        assert app.request(method, path, headers=bearer(TOKEN)).status_code == 200
        assert app.request(method, path).status_code == 401


def test_a_refusal_says_what_it_takes(tokens: Tokens, by_letter: dict[str, str]) -> None:
    app = guarded(Access(TOKEN, tokens))
    refused = app.post(f"/api/v1/jobs/{JOB}/pause", headers=bearer(by_letter["v"]))
    assert refused.json()["code"] == "forbidden"
    assert refused.json()["detail"].startswith("role: got view, expected operate for POST")
    refused = app.post("/api/v1/jobs/another/heartbeats", headers=bearer(by_letter["j"]))
    assert refused.json()["code"] == "forbidden" and refused.json()["detail"].startswith("token: ")


def test_signing_in_with_a_token_gives_its_role_until_it_is_revoked(tokens: Tokens) -> None:
    app = guarded(Access(TOKEN, tokens))
    made, text = tokens.create("view", created_by="ada", name="wall screen")
    assert app.post("/login", data={"token": text}).status_code == 303
    assert from_header(app.get("/headers").json()["x-openrecycle-caller"]).name == "wall screen"
    assert app.post("/api/v1/solves").status_code == 403
    with app.websocket_connect("ws://localhost:8501/_stcore/stream") as page:
        page.send_text("one")
        assert page.receive_text() == "one"
        tokens.revoke(made.id)
        page.send_text("two")
        with pytest.raises(WebSocketDisconnect) as closed:
            page.receive_text()
    assert closed.value.code == 4401
    assert app.get("/x").status_code == 401


def test_a_token_that_has_ended_is_no_guess(tokens: Tokens) -> None:
    """Else a forgotten worker would lock out its whole network."""
    app = guarded(Access(TOKEN, tokens))
    made, text = tokens.create("agent", created_by="ada")
    tokens.revoke(made.id)
    for _ in range(WRONG_PER_ADDRESS + 1):
        assert app.get("/x", headers=bearer(text)).status_code == 401
    assert app.get("/x", headers=bearer(TOKEN)).status_code == 200


def test_an_agents_token_opens_no_pages(tokens: Tokens, by_letter: dict[str, str]) -> None:
    refused = guarded(Access(TOKEN, tokens)).post("/login", data={"token": by_letter["a"]})
    assert refused.status_code == 403
    assert golden("it-opens-no-pages") in refused.text


def test_a_page_without_the_guards_word_gets_no_name(tokens: Tokens) -> None:
    access = Access(TOKEN, tokens)
    with console_refuses("unauthorized"):
        caller_of(access, {})
    viewer = Caller("console", "ada", Role.VIEW).to_header().decode()
    with console_refuses("forbidden") as refused:
        access.operator(viewer)
    assert refused.value.detail.startswith("ada ")
    assert Access().operator(None) == golden("operator-in-the-browser")


@pytest.mark.parametrize(
    ("path", "whose", "rate"),
    [
        ("/api/v1/jobs", "o", PEOPLE),
        (f"/api/v1/jobs/{JOB}/commands", "o", AGENTS),
        (f"/api/v1/jobs/{JOB}/commands", "v", PEOPLE),
    ],
)
def test_who_asks_too_often_is_told_when_to_come_back(
    path: str, whose: str, rate: object, tokens: Tokens, by_letter: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, str]] = []

    def take(self: RateLimits, asked: object, key: str) -> int:
        seen.append((asked, key))
        return 7

    monkeypatch.setattr(RateLimits, "take", take)
    refused = guarded(Access(TOKEN, tokens)).get(path, headers=bearer(by_letter[whose]))
    assert (refused.status_code, refused.headers["Retry-After"], refused.json()["code"]) == (429, "7", "too_many")
    assert seen == [(rate, "token:" + by_letter[whose].split("_")[1])]
