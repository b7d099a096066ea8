"""The guards, one by one: names and bodies, the console's own token, and how often one may ask."""

from __future__ import annotations

import asyncio
import time

import pytest
from guarded_app import INNER, TOKEN, bearer, client, guarded
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message
from starlette.websockets import WebSocketDisconnect

from openrecycle.app.security import guard
from openrecycle.app.security.access import (
    AGENTS,
    COOKIE,
    UNKNOWN,
    WRONG_IN_ALL,
    WRONG_PER_ADDRESS,
    Access,
    Caller,
    RateLimits,
    Role,
    WrongTokens,
    from_header,
)
from openrecycle.app.security.guard import AccessGuard, BodyLimit, HostGuard
from tests.golden import golden

pytestmark = pytest.mark.processes

# -- hosts and bodies ------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost:8501", "127.0.0.1:8501", "[::1]:8501", "LOCALHOST"])
def test_names_of_loopback_are_taken(host: str) -> None:
    app = HostGuard(INNER, ("localhost", "127.0.0.1", "[::1]"))
    assert client(app).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:8501", "", "[::2]:1"])
def test_any_other_name_is_refused(host: str) -> None:
    app = HostGuard(INNER, ("localhost", "127.0.0.1", "[::1]"))
    refused = client(app).get("/", headers={"Host": host})
    assert (refused.status_code, *map(refused.json().get, ("code", "field"))) == (421, "wrong_host", "Host")


@pytest.mark.parametrize(
    "sent",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
)
def test_a_foreign_page_can_change_nothing(sent: dict[str, str]) -> None:
    app = client(HostGuard(INNER))
    refused = app.post("/api/v1/jobs/1/workers/W0_0/kill", headers=sent)
    assert (refused.status_code, *map(refused.json().get, ("code", "field"))) == (403, "wrong_origin", "Origin")
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
    assert limited.post("/api/v1/jobs/1/finish", content=b"x" * 65536).text.endswith(" 65536")
    assert limited.post("/api/v1/jobs/1/finish", content=b"x" * 65537).status_code == 413
    assert limited.put("/_stcore/upload_file/x", content=b"x" * 100_000).text.endswith(" 100000")
    assert limited.get("/api/v1/jobs").status_code == 200
    assert guarded().post("/login", content=b"x" * 5000).status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(guard, "DRAIN_SECONDS", 0.05)
    sent: list[Message] = []

    async def half() -> Message:
        if received:
            await asyncio.Event().wait()
        received.append(1)
        return {"type": "http.request", "body": b"{", "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    received: list[int] = []
    scope = {"type": "http", "method": "POST", "path": "/api/v1/jobs", "headers": []}
    asyncio.run(BodyLimit(INNER)(scope, half, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert b"the body: not all of it came within 0.05 s" in sent[1]["body"]


# -- the console's own token -----------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xe9"],
)
def test_without_the_token_nothing_goes(authorization: str) -> None:
    sent = {"Authorization": authorization.encode("latin-1")} if authorization else {}
    refused = guarded().get("/api/v1/jobs", headers=sent)
    assert (refused.status_code, *map(refused.json().get, ("code", "field"))) == (401, "unauthorized", "Authorization")
    assert refused.headers["WWW-Authenticate"].startswith("Bearer")
    assert TOKEN not in refused.text
    said = golden("a-token-that-is-unknown-here") in refused.text
    assert said == authorization.startswith("Bearer"), "a token without that word may be right"
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

    def me(until: float) -> Caller:
        return Caller("console", "administrator", Role.ADMINISTER, until=until)

    def status(value: str) -> int:
        return app.get("/x", headers={"Cookie": f"{COOKIE}={value}"}).status_code

    later, earlier = int(time.time()) + 60, int(time.time()) - 1
    assert status(access.session(me(later))) == 200
    assert status(access.session(me(earlier))) == 401
    assert status(f"{later + 1}.{access.session(me(later)).partition('.')[2]}") == 401
    assert status(Access("another token altogether").session(me(later))) == 401
    for made_up in ("", "x", ".", "9" * 40, f"{later}", f"-1.{'0' * 64}", f"{later}.console.{'0' * 64}"):
        assert status(made_up) == 401


def test_a_wrong_token_says_so_and_many_are_slowed_down() -> None:
    access = Access(TOKEN)
    app, elsewhere = guarded(access), guarded(access, "10.0.0.2")
    for _ in range(WRONG_PER_ADDRESS):
        refused = app.post("/login", data={"token": "guess"})
        assert refused.status_code == 401
        assert golden("not-a-token-of-this") in refused.text
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
    # Its empty icon, which keeps browsers from asking for one, is allowed: else each says so in its console.
    assert 'href="data:,"' in page.text and "img-src data:;" in page.headers["Content-Security-Policy"]


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


# -- how often -------------------------------------------------------------------------------


def test_a_bucket_empties_and_fills_again() -> None:
    now = 0.0
    limits = RateLimits(lambda: now)
    assert [limits.take(UNKNOWN, "a") for _ in range(int(UNKNOWN.burst))] == [0] * int(UNKNOWN.burst)
    assert limits.take(UNKNOWN, "a") == 1
    assert limits.take(UNKNOWN, "b") == 0
    now = 1.0
    assert [limits.take(UNKNOWN, "a") for _ in range(11)] == [0] * 10 + [1]


def test_2048_launchers_of_one_token_at_1_hz_are_never_limited() -> None:
    """With seven more requests of each at once whenever a generation opens, every ten seconds."""
    now = 0.0
    limits = RateLimits(lambda: now)
    for second in range(30):
        now = float(second)
        for _ in range(2_048 * (8 if second % 10 == 0 else 1)):
            assert limits.take(AGENTS, "token:1") == 0


def test_strangers_run_into_their_own_limit() -> None:
    access = Access(TOKEN)
    guard = AccessGuard(INNER, access)
    guard.limits = RateLimits(lambda: 0.0)  # a second, in which a busy machine does not get to send ten
    app = client(guard)
    answers = [app.get("/x").status_code for _ in range(int(UNKNOWN.burst) + 1)]
    assert (set(answers[:-1]), answers[-1]) == ({401}, 429)
    assert app.get("/x", headers=bearer(TOKEN)).status_code == 200
    assert guarded(access, "10.0.0.2").get("/x").status_code == 401


# -- without a token, and what only looks like this machine ------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Forwarded-Host", "console.example.org"),
        ("X-Forwarded-Anything", "1"),
        ("Forwarded", "for=203.0.113.7"),
        ("X-Real-IP", "127.0.0.1"),
        ("Via", "1.1 proxy"),
        ("CF-Connecting-IP", "203.0.113.7"),
        ("Host", "console.example.org"),
        ("Host", "127.0.0.1.nip.io"),
    ],
)
def test_without_a_token_no_proxy_is_administrator(name: str, value: str) -> None:
    app = guarded(Access())
    assert app.get("/x").status_code == 200
    refused = app.get("/x", headers={name: value})
    assert (refused.status_code, refused.json()["code"]) == (403, "token_needed")
    assert name.lower() in refused.json()["detail"].lower()
    with pytest.raises(WebSocketDisconnect), app.websocket_connect("/_stcore/stream", headers={name: value}):
        pass


@pytest.mark.parametrize("host", ["a b", "localhost:80:80", "[::1]x", "evil@localhost", "localhost/", "[", "b\xe9"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    for allowed in ((), ("localhost",)):
        refused = client(HostGuard(INNER, allowed)).get("/", headers={"Host": host.encode("latin-1")})
        assert refused.status_code == 400, host


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://]"])
def test_an_origin_that_is_none_is_a_problem_of_who_sends_it(origin: str) -> None:
    refused = client(HostGuard(INNER)).post("/", headers={"Origin": origin})
    assert refused.status_code in (400, 403)


@pytest.mark.parametrize(
    "sent",
    [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Referer": "http://evil.example/"}],
)
def test_a_foreign_page_signs_nobody_out(sent: dict[str, str]) -> None:
    refused = guarded().get("/logout", headers=sent)
    assert refused.status_code == 403 and "set-cookie" not in refused.headers
    for own in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        assert guarded().get("/logout", headers=own).status_code == 303


def test_an_address_that_was_right_before_has_an_allowance_of_its_own() -> None:
    app = guarded()
    assert app.get("/x", headers=bearer(TOKEN)).status_code == 200
    for n in range(2 * WRONG_PER_ADDRESS):
        assert app.get("/x", headers=bearer(f"wrong {n}")).status_code == 401
    assert app.get("/x", headers=bearer(TOKEN)).status_code == 200
    strange = guarded()
    answers = [strange.get("/x", headers=bearer(f"wrong {n}")).status_code for n in range(2 * WRONG_PER_ADDRESS)]
    assert answers[-1] == 429 and strange.get("/x", headers=bearer(TOKEN)).status_code == 429
