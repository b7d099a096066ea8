"""The guards, one by one, around an application that answers everything."""

from __future__ import annotations

import time

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from app.security import COOKIE, MAX_FAILURES, BodyLimit, HostGuard, TokenGuard

TOKEN = "correct horse battery"


async def answer(request: Request) -> Response:
    return PlainTextResponse(f"{request.url.path} {len(await request.body())}")


INNER = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "DELETE"])])


def client(app: ASGIApp, base: str = "http://localhost:8501") -> TestClient:
    return TestClient(app, base_url=base, follow_redirects=False)


@pytest.mark.parametrize("host", ["localhost:8501", "127.0.0.1:8501", "[::1]:8501", "LOCALHOST"])
def test_names_of_loopback_are_taken(host: str) -> None:
    guarded = HostGuard(INNER, ("localhost", "127.0.0.1", "[::1]"))
    assert client(guarded).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:8501", "", "[::2]:1"])
def test_any_other_name_is_refused(host: str) -> None:
    guarded = HostGuard(INNER, ("localhost", "127.0.0.1", "[::1]"))
    refused = client(guarded).get("/", headers={"Host": host})
    assert (refused.status_code, refused.json()["code"]) == (421, "wrong_host")


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
)
def test_a_foreign_page_can_change_nothing(headers: dict[str, str]) -> None:
    guarded = client(HostGuard(INNER))
    refused = guarded.post("/api/v1/jobs/1/workers/W0_0/kill", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "wrong_origin")
    assert guarded.get("/", headers=headers).status_code == 200
    assert guarded.post("/", headers={"Origin": "http://localhost:8501"}).status_code == 200
    assert guarded.post("/").status_code == 200


def test_answers_are_hardened() -> None:
    headers = client(HostGuard(INNER)).get("/").headers
    assert headers["X-Frame-Options"] == "SAMEORIGIN"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_bodies_arrive_whole_and_others_are_left_alone() -> None:
    limited = client(BodyLimit(INNER))
    assert limited.post("/api/v1/jobs/1/heartbeats", content=b"x" * 65536).text.endswith(" 65536")
    assert limited.post("/api/v1/jobs/1/heartbeats", content=b"x" * 65537).status_code == 413
    assert limited.post("/login", content=b"x" * 5000).status_code == 413
    assert limited.put("/_stcore/upload_file/x", content=b"x" * 100_000).text.endswith(" 100000")
    assert limited.get("/api/v1/jobs").status_code == 200


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xe9"],
)
def test_without_the_token_nothing_goes(authorization: str) -> None:
    guarded = client(TokenGuard(INNER, TOKEN))
    headers = {"Authorization": authorization.encode("latin-1")} if authorization else {}
    refused = guarded.get("/api/v1/jobs", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
    assert refused.headers["WWW-Authenticate"].startswith("Bearer")
    assert TOKEN not in refused.text


def test_with_the_token_all_goes() -> None:
    guarded = client(TokenGuard(INNER, TOKEN))
    assert guarded.get("/x", headers={"Authorization": f"Bearer {TOKEN}"}).text == "/x 0"
    assert guarded.get("/x", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


def test_signing_in_sets_a_cookie_that_is_not_the_token() -> None:
    guarded = client(TokenGuard(INNER, TOKEN))
    done = guarded.post("/login?next=%2Fschedule", data={"token": TOKEN})
    assert (done.status_code, done.headers["Location"]) == (303, "/schedule")
    cookie = done.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert guarded.get("/x").status_code == 200


def test_a_cookie_ends_and_can_not_be_made_up() -> None:
    guard = TokenGuard(INNER, TOKEN)
    guarded = client(guard)

    def status(value: str) -> int:
        return guarded.get("/x", headers={"Cookie": f"{COOKIE}={value}"}).status_code

    later, earlier = int(time.time()) + 60, int(time.time()) - 1
    assert status(guard.session(later)) == 200
    assert status(guard.session(earlier)) == 401
    assert status(f"{later + 1}.{guard.session(later).partition('.')[2]}") == 401
    assert status(TokenGuard(INNER, "another token altogether").session(later)) == 401
    for made_up in ("", "x", ".", "9" * 40, f"{later}", f"-1.{'0' * 64}"):
        assert status(made_up) == 401


def test_a_wrong_token_says_so_and_many_are_slowed_down() -> None:
    guarded = client(TokenGuard(INNER, TOKEN))
    for _ in range(MAX_FAILURES):
        refused = guarded.post("/login", data={"token": "guess"})
        assert refused.status_code == 401
        assert "not this console" in refused.text
        assert "Set-Cookie" not in refused.headers
    slowed = guarded.post("/login", data={"token": TOKEN})
    assert (slowed.status_code, slowed.headers["Retry-After"]) == (429, "60")


@pytest.mark.parametrize("there", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:1", ""])
def test_after_signing_in_one_stays_on_this_site(there: str) -> None:
    guarded = client(TokenGuard(INNER, TOKEN))
    done = guarded.post("/login", params={"next": there}, data={"token": TOKEN})
    assert done.headers["Location"] == "/"


def test_the_login_page_repeats_nothing_unescaped() -> None:
    page = client(TokenGuard(INNER, TOKEN)).get("/login", params={"next": '/"><script>alert(1)</script>'})
    assert page.status_code == 200
    assert "<script>" not in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
