"""The guards, one by one, around an application that answers everything."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.errors import ConsoleError
from app.security.access import Access, caller_of
from app.security.bodies import BodyLimit
from app.security.callers import Caller, Role, from_header
from app.security.guard import AccessGuard
from app.security.hosts import HostGuard
from app.security.limits import AGENTS, PEOPLE, UNKNOWN, WRONG_IN_ALL, WRONG_PER_ADDRESS, Limits, WrongTokens
from app.security.login import COOKIE
from app.security.tokens import REFRESH, Tokens
from db.session import Database
from db.store import Store
from db.tokens import TokenStore

TOKEN = "correct horse battery"
JOB = "0123456789ab"


async def answer(request: Request) -> Response:
    return PlainTextResponse(f"{request.url.path} {len(await request.body())}")


async def headers(request: Request) -> Response:
    return JSONResponse(dict(request.headers))


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)


INNER = Starlette(
    routes=[
        Route("/headers", headers),
        WebSocketRoute("/_stcore/stream", echo),
        Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
)


def client(app: ASGIApp, base: str = "http://localhost:8501", address: str = "127.0.0.1") -> TestClient:
    return TestClient(app, base_url=base, follow_redirects=False, client=(address, 50000))


def guarded(access: Access | None = None, address: str = "127.0.0.1") -> TestClient:
    return client(AccessGuard(INNER, access or Access(TOKEN)), address=address)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('tokens') / 'console.db'}")
    database.upgrade()
    row = {"name": "job", "spec": "{}", "state": "running", "created_at": 1.0, "idempotency_key": None}
    Store(database).create_job(JOB, workers=[], **row)
    yield database
    database.close()


@pytest.fixture
def tokens(database: Database) -> Tokens:
    return Tokens(TokenStore(database))


# -- hosts and bodies ------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost:8501", "127.0.0.1:8501", "[::1]:8501", "LOCALHOST"])
def test_names_of_loopback_are_taken(host: str) -> None:
    app = HostGuard(INNER, ("localhost", "127.0.0.1", "[::1]"))
    assert client(app).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:8501", "", "[::2]:1"])
def test_any_other_name_is_refused(host: str) -> None:
    app = HostGuard(INNER, ("localhost", "127.0.0.1", "[::1]"))
    refused = client(app).get("/", headers={"Host": host})
    assert (refused.status_code, refused.json()["code"]) == (421, "wrong_host")


@pytest.mark.parametrize(
    "sent",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
)
def test_a_foreign_page_can_change_nothing(sent: dict[str, str]) -> None:
    app = client(HostGuard(INNER))
    refused = app.post("/api/v1/jobs/1/workers/W0_0/kill", headers=sent)
    assert (refused.status_code, refused.json()["code"]) == (403, "wrong_origin")
    assert app.get("/", headers=sent).status_code == 200
    assert app.post("/", headers={"Origin": "http://localhost:8501"}).status_code == 200
    assert app.post("/").status_code == 200


def test_answers_are_hardened() -> None:
    found = client(HostGuard(INNER)).get("/").headers
    assert found["X-Frame-Options"] == "SAMEORIGIN"
    assert found["X-Content-Type-Options"] == "nosniff"


def test_cookies_that_were_set_over_tls_stay_there() -> None:
    async def app(request: Request) -> Response:
        response = PlainTextResponse("")
        response.set_cookie("a", "1")
        response.set_cookie("b", "2", secure=True)
        return response

    site = HostGuard(Starlette(routes=[Route("/", app)]))
    over_tls = client(site, "https://localhost").get("/").headers.get_list("set-cookie")
    assert [cookie.lower().count("secure") for cookie in over_tls] == [1, 1]
    plain = client(site).get("/").headers.get_list("set-cookie")
    assert [cookie.lower().count("secure") for cookie in plain] == [0, 1]


def test_bodies_arrive_whole_and_others_are_left_alone() -> None:
    limited = client(BodyLimit(INNER))
    assert limited.post("/api/v1/jobs/1/heartbeats", content=b"x" * 65536).text.endswith(" 65536")
    assert limited.post("/api/v1/jobs/1/heartbeats", content=b"x" * 65537).status_code == 413
    assert limited.put("/_stcore/upload_file/x", content=b"x" * 100_000).text.endswith(" 100000")
    assert limited.get("/api/v1/jobs").status_code == 200
    assert guarded().post("/login", content=b"x" * 5000).status_code == 413


# -- the console's own token -----------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xe9"],
)
def test_without_the_token_nothing_goes(authorization: str) -> None:
    sent = {"Authorization": authorization.encode("latin-1")} if authorization else {}
    refused = guarded().get("/api/v1/jobs", headers=sent)
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
    assert refused.headers["WWW-Authenticate"].startswith("Bearer")
    assert TOKEN not in refused.text
    with pytest.raises(WebSocketDisconnect), guarded().websocket_connect("/_stcore/stream", headers=sent):
        pass


def test_with_the_token_all_goes() -> None:
    app = guarded()
    assert app.get("/x", headers=bearer(TOKEN)).text == "/x 0"
    assert app.get("/x", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200
    assert app.delete("/api/v1/tokens/1", headers=bearer(TOKEN)).status_code == 200


def test_signing_in_sets_a_cookie_that_is_not_the_token() -> None:
    app = guarded()
    done = app.post("/login?next=%2Fschedule", data={"token": TOKEN})
    assert (done.status_code, done.headers["Location"]) == (303, "/schedule")
    cookie = done.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert app.get("/x").status_code == 200
    assert app.get("/logout").headers["Location"] == "/login"
    assert app.get("/x").status_code == 401


def test_a_cookie_ends_and_can_not_be_made_up() -> None:
    access = Access(TOKEN)
    app = guarded(access)
    me = Caller("console", "administrator", Role.ADMINISTER)

    def status(value: str) -> int:
        return app.get("/x", headers={"Cookie": f"{COOKIE}={value}"}).status_code

    later, earlier = int(time.time()) + 60, int(time.time()) - 1
    assert status(access.session(me, later)) == 200
    assert status(access.session(me, earlier)) == 401
    assert status(f"{later + 1}.{access.session(me, later).partition('.')[2]}") == 401
    assert status(Access("another token altogether").session(me, later)) == 401
    for made_up in ("", "x", ".", "9" * 40, f"{later}", f"-1.{'0' * 64}", f"{later}.console.{'0' * 64}"):
        assert status(made_up) == 401


def test_a_wrong_token_says_so_and_many_are_slowed_down() -> None:
    access = Access(TOKEN)
    app, elsewhere = guarded(access), guarded(access, "10.0.0.2")
    for _ in range(WRONG_PER_ADDRESS):
        refused = app.post("/login", data={"token": "guess"})
        assert refused.status_code == 401
        assert "not a token of this console" in refused.text
        assert "Set-Cookie" not in refused.headers
    slowed = app.post("/login", data={"token": TOKEN})
    assert (slowed.status_code, slowed.headers["Retry-After"]) == (429, "60")
    refused = app.get("/x", headers=bearer(TOKEN))
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many")
    assert elsewhere.post("/login", data={"token": TOKEN}).status_code == 303


def test_wrong_tokens_are_counted_in_all_but_lock_out_nobody_who_had_a_right_one() -> None:
    now = 0.0
    wrong = WrongTokens(lambda: now)
    wrong.right("10.0.0.1")
    for i in range(WRONG_IN_ALL):
        wrong.note(f"10.1.{i}.1")
    assert (wrong.wait("10.9.9.9"), wrong.wait("10.0.0.1")) == (60, 0)
    now = 60.0
    assert wrong.wait("10.9.9.9") == 0


@pytest.mark.parametrize("there", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:1", ""])
def test_after_signing_in_one_stays_on_this_site(there: str) -> None:
    done = guarded().post("/login", params={"next": there}, data={"token": TOKEN})
    assert done.headers["Location"] == "/"


def test_the_login_page_repeats_nothing_unescaped() -> None:
    page = guarded().get("/login", params={"next": '/"><script>alert(1)</script>'})
    assert page.status_code == 200
    assert "<script>" not in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


def test_who_it_is_can_not_be_claimed() -> None:
    forged = {"X-OpenRecycle-Caller": '["console","eve","administer",null,null]', "X-Actor": "ada"}
    seen = guarded().get("/headers", headers={**forged, **bearer(TOKEN)}).json()
    assert from_header(seen["x-openrecycle-caller"]).name == "administrator"
    assert seen["x-actor"] == "administrator for ada"
    seen = guarded(Access()).get("/headers", headers=forged).json()
    assert from_header(seen["x-openrecycle-caller"]).key == "local"
    assert seen["x-actor"] == "ada"


def test_without_a_token_only_this_machine_is_answered() -> None:
    assert guarded(Access()).get("/x").status_code == 200
    refused = guarded(Access(), "10.0.0.2").get("/x")
    assert (refused.status_code, refused.json()["code"]) == (403, "token_needed")


# -- tokens with roles -----------------------------------------------------------------------


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
    with pytest.raises(ConsoleError, match="was revoked before"):
        tokens.revoke(made.id)
    with pytest.raises(ConsoleError, match="expected the id of a token"):
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
        ({"role": "administer"}, "role: got 'administer', expected view, operate or agent"),
        ({"role": "view", "job_id": JOB}, "job: got '0123456789ab', expected none with role view"),
        ({"role": "view", "days": 0}, "days: got 0, expected more than 0, at most 3650"),
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
    assert refused.json()["detail"] == f"token: it is good for job {JOB} alone"


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
    assert "It opens no pages" in refused.text


def test_a_page_without_the_guards_word_gets_no_name(tokens: Tokens) -> None:
    access = Access(TOKEN, tokens)
    with pytest.raises(ConsoleError, match="sign in"):
        caller_of(access, {})
    viewer = Caller("console", "ada", Role.VIEW).to_header().decode()
    with pytest.raises(ConsoleError, match="ada may look at everything, and change nothing"):
        access.operator(viewer)
    assert Access().operator(None) == "operator in the browser"


# -- how often -------------------------------------------------------------------------------


def test_a_bucket_empties_and_fills_again() -> None:
    now = 0.0
    limits = Limits(lambda: now)
    assert [limits.take(UNKNOWN, "a") for _ in range(int(UNKNOWN.burst))] == [0] * int(UNKNOWN.burst)
    assert limits.take(UNKNOWN, "a") == 1
    assert limits.take(UNKNOWN, "b") == 0
    now = 1.0
    assert [limits.take(UNKNOWN, "a") for _ in range(11)] == [0] * 10 + [1]


def test_8192_agents_of_one_token_at_1_hz_are_never_limited() -> None:
    """With four requests of each at once whenever an epoch opens, every ten seconds."""
    now = 0.0
    limits = Limits(lambda: now)
    for second in range(30):
        now = float(second)
        for _ in range(8_192 * (5 if second % 10 == 0 else 1)):
            assert limits.take(AGENTS, "token:1") == 0


@pytest.mark.parametrize(("path", "rate"), [("/api/v1/jobs", PEOPLE), (f"/api/v1/jobs/{JOB}/commands", AGENTS)])
def test_who_asks_too_often_is_told_when_to_come_back(
    path: str, rate: object, tokens: Tokens, by_letter: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, str]] = []

    def take(self: Limits, asked: object, key: str) -> int:
        seen.append((asked, key))
        return 7

    monkeypatch.setattr(Limits, "take", take)
    refused = guarded(Access(TOKEN, tokens)).get(path, headers=bearer(by_letter["o"]))
    assert (refused.status_code, refused.headers["Retry-After"], refused.json()["code"]) == (429, "7", "too_many")
    assert seen == [(rate, "token:" + by_letter["o"].split("_")[1])]


def test_strangers_run_into_their_own_limit() -> None:
    access = Access(TOKEN)
    app = guarded(access)
    answers = [app.get("/x").status_code for _ in range(int(UNKNOWN.burst) + 60)]
    assert answers[0] == 401
    assert 429 in answers[int(UNKNOWN.burst) :]
    assert app.get("/x", headers=bearer(TOKEN)).status_code == 200
    assert guarded(access, "10.0.0.2").get("/x").status_code == 401
