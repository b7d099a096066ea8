"""Signing in with an account: a real console, Streamlit's own login in it, and an identity provider."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from console_server import Agents, ConsoleServer, ForkedConsole
from identity_provider import IdentityProvider
from joserfc.jwk import RSAKey

from openrecycle.app.runtime.errors import SettingsError
from openrecycle.app.runtime.settings import OidcSettings
from openrecycle.app.security.access import Role, read_oidc, role_of
from tests.golden import golden

TOKEN = "a-token-for-the-tests"
ADA = {"email": "ada@ops.example", "email_verified": True}
GRACE = {"email": "Grace@Company.example", "email_verified": True}

pytestmark = [pytest.mark.xdist_group("oidc"), pytest.mark.processes]


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    provider = IdentityProvider()
    yield provider
    provider.close()


@pytest.fixture(scope="module")
def console(provider: IdentityProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    folder = tmp_path_factory.mktemp("oidc")
    secrets = folder / "oidc.toml"
    secrets.write_text(provider.secrets_toml())
    secrets.chmod(0o600)
    server = ForkedConsole(
        f"sqlite:///{folder / 'console.db'}",
        *("--oidc", str(secrets), "--oidc-operators", "*@ops.example,group:sre", "--oidc-viewers", "*@company.example"),
        environment={"OPENRECYCLE_TOKEN": TOKEN},
    )
    server.session.headers["Authorization"] = f"Bearer {TOKEN}"
    yield server
    server.close()


@pytest.fixture
def browser(provider: IdentityProvider) -> Iterator[requests.Session]:
    provider.refuses, provider.age, provider.signs_with = False, 0.0, provider.key
    with requests.Session() as session:
        session.headers["Accept"] = "text/html"
        yield session


def sign_in(
    browser: requests.Session, console: ConsoleServer, provider: IdentityProvider, claims: dict[str, Any]
) -> requests.Response:
    """As a browser does: from the first page to the one it lands on."""
    provider.claims = claims
    page = browser.get(console.root, timeout=60)
    assert page.url.endswith("/login?next=%2F")
    assert 'href="/login/oidc?provider="' in page.text
    return browser.get(f"{console.root}/login/oidc?provider=", timeout=60)


def caller(browser: requests.Session, console: ConsoleServer) -> dict[str, Any]:
    answer = browser.get(f"{console.base}/caller", headers={"Accept": "application/json"}, timeout=60)
    return {**answer.json(), "status": answer.status_code}


def websocket_status(console: ConsoleServer, browser: requests.Session) -> int:
    cookie = "; ".join(f"{c.name}={c.value}" for c in browser.cookies)
    lines = (
        "GET /_stcore/stream HTTP/1.1",
        f"Host: 127.0.0.1:{console.port}",
        f"Origin: {console.root}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *([f"Cookie: {cookie}"] if cookie else []),
    )
    with socket.create_connection(("127.0.0.1", console.port), timeout=60) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return int(connection.recv(100).split()[1])


def test_an_operator_signs_in_acts_and_signs_out(
    browser: requests.Session, console: ConsoleServer, provider: IdentityProvider
) -> None:
    page = sign_in(browser, console, provider, ADA)
    assert (page.status_code, page.url) == (200, f"{console.root}/")
    assert "<html" in page.text
    assert caller(browser, console) == {"name": "ada@ops.example", "role": "operate", "job_id": None, "status": 200}
    assert websocket_status(console, browser) == 101
    agents = Agents(console)
    agents.register_all()
    paused = browser.post(console.base + agents.path("/pause"), headers={"X-Actor": "the night shift"}, timeout=60)
    assert paused.status_code == 202
    line = console.get("/audit", params={"job_id": agents.job_id}).json()["audit"][-1]
    assert (line["actor"], line["action"]) == ("ada@ops.example for the night shift", "pause")
    assert browser.get(f"{console.base}/tokens", timeout=60).status_code == 403
    assert browser.get(f"{console.root}/logout", timeout=60).url.endswith("/login?next=%2F")
    assert websocket_status(console, browser) == 403


@pytest.mark.parametrize(
    ("claims", "role"),
    [
        (GRACE, "view"),
        ({"email": "linus@elsewhere.example", "email_verified": True, "groups": ["dev", "sre"]}, "operate"),
    ],
)
def test_roles_by_address_and_by_group(
    browser: requests.Session, console: ConsoleServer, provider: IdentityProvider, claims: dict[str, Any], role: str
) -> None:
    assert sign_in(browser, console, provider, claims).status_code == 200
    assert caller(browser, console)["role"] == role
    refused = browser.post(f"{console.base}/solves", json={}, timeout=60)
    assert refused.status_code == (403 if role == "view" else 422)


@pytest.mark.parametrize(
    "claims",
    [
        {"email": "eve@evil.example", "email_verified": True},
        {"email": "eve@ops.example", "email_verified": False},
        {"email": "eve@ops.example.evil.example"},
        {"sub": "ada@ops.example"},
        {"email": "eve@evil.example", "groups": "sre"},
    ],
)
def test_an_account_without_a_role_sees_nothing(
    browser: requests.Session, console: ConsoleServer, provider: IdentityProvider, claims: dict[str, Any]
) -> None:
    page = sign_in(browser, console, provider, claims)
    assert page.status_code == 403
    assert golden("has-no-role-on-this") in page.text
    assert caller(browser, console)["status"] == 401
    assert websocket_status(console, browser) == 403


def test_who_the_provider_denies_or_did_not_vouch_for_is_nobody(
    browser: requests.Session, console: ConsoleServer, provider: IdentityProvider
) -> None:
    provider.refuses = True
    assert "/login" in sign_in(browser, console, provider, ADA).url
    provider.refuses, provider.signs_with = False, RSAKey.generate_key(2048, {"kid": "test"})
    assert "/login" in sign_in(browser, console, provider, ADA).url
    assert caller(browser, console)["status"] == 401


def test_a_sign_in_lasts_for_half_a_day(
    browser: requests.Session, console: ConsoleServer, provider: IdentityProvider
) -> None:
    provider.age = 12 * 3600 + 1
    assert "/login" in sign_in(browser, console, provider, ADA).url
    assert caller(browser, console)["status"] == 401


def test_the_cookie_can_not_be_made_up(browser: requests.Session, console: ConsoleServer) -> None:
    for value in (
        "",
        "x",
        '{"is_logged_in": true, "email": "ada@ops.example"}',
        "2|1:0|10:1|15:_streamlit_user|4:e30=|aa",
    ):
        browser.cookies.set("_streamlit_user", value.replace('"', "%22"))
        assert caller(browser, console)["status"] == 401
        assert websocket_status(console, browser) == 403


# -- what it is told -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[auth]", "[other]"), "[auth] is missing"),
        (("client_id", "client"), "[auth] client_id: missing"),
        (("/oauth2callback", "/"), "redirect_uri: got"),
        (("c" * 40, "short"), golden("cookie-secret-is-too-short")),
        (('server_metadata_url = "http', 'server_metadata_url = "ftp'), golden("expected-an-http-s-address")),
        (("[auth]", "[auth"), golden("is-not-toml")),
    ],
)
def test_what_is_wrong_with_the_file_is_said_without_its_secrets(
    provider: IdentityProvider, tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    file = tmp_path / "oidc.toml"
    text = provider.secrets_toml()
    assert change[0] in text
    file.write_text(text.replace(*change))
    file.chmod(0o600)
    with pytest.raises(SettingsError) as refused:
        read_oidc(file, ["a@b.example"], [])
    assert words in str(refused.value)
    assert "the-clients-secret" not in str(refused.value)


def test_the_file_is_for_one_pair_of_eyes_and_somebody_must_be_let_in(
    provider: IdentityProvider, tmp_path: Path
) -> None:
    file = tmp_path / "oidc.toml"
    file.write_text(provider.secrets_toml())
    file.chmod(0o644)
    with pytest.raises(SettingsError, match="mode 0644, expected 0600"):
        read_oidc(file, ["a@b.example"], [])
    with pytest.raises(SettingsError, match=golden("nobody-could-sign-in")):
        read_oidc(file, [], [])
    with pytest.raises(SettingsError, match="--oidc-viewers: got 'everybody'"):
        read_oidc(file, [], ["everybody"])


def test_several_providers_have_names(provider: IdentityProvider, tmp_path: Path) -> None:
    file = tmp_path / "oidc.toml"
    shared, _, own = provider.secrets_toml().partition("client_id")
    file.write_text(f"{shared}[auth.google]\nclient_id{own}[auth.okta]\nclient_id{own}")
    file.chmod(0o600)
    found = read_oidc(file, ["a@b.example"], [])
    assert found.providers == ("google", "okta")


def test_operators_win_over_viewers() -> None:
    settings = OidcSettings(Path(), ("",), "", ("ada@x.example",), ("*@x.example",))
    assert role_of(settings, {"email": "Ada@X.example"}) is Role.OPERATE
    assert role_of(settings, {"email": "grace@x.example"}) is Role.VIEW
    assert role_of(settings, {"email": "grace@y.example"}) is None
