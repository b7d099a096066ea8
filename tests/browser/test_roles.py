"""Whoever may only look on signs in with an account, sees every page, and is told why a button does nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.app.console_server import Agents, ConsoleServer, ForkedConsole
from tests.app.identity_provider import IdentityProvider
from tests.browser.watching import NEEDS_CHROMIUM, WAIT_MS, settle

pytestmark = NEEDS_CHROMIUM
TOKEN = "a-token-for-the-tests"


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    provider = IdentityProvider()
    provider.claims = {"email": "grace@company.example", "email_verified": True}
    yield provider
    provider.close()


@pytest.fixture(scope="module")
def server(provider: IdentityProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A console at which a job waits for its first iteration."""
    folder = tmp_path_factory.mktemp("roles")
    secrets = folder / "oidc.toml"
    secrets.write_text(provider.secrets_toml())
    secrets.chmod(0o600)
    options = ("--oidc", str(secrets), "--oidc-viewers", "*@company.example", "--suspect", "600", "--dead", "900")
    server = ForkedConsole(f"sqlite:///{folder / 'console.db'}", *options, environment={"OPENRECYCLE_TOKEN": TOKEN})
    server.session.headers["Authorization"] = f"Bearer {TOKEN}"
    Agents(server).register_all()
    yield server
    server.close()


@pytest.mark.chaos
def test_a_viewer_looks_on(browser: Browser, server: ConsoleServer) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(WAIT_MS)
    page.goto(server.root)
    page.get_by_role("link", name="Sign in with your account").click()
    expect(page.get_by_role("note")).to_contain_text("Signed in as grace@company.example: may look at everything")
    settle(page)
    page.get_by_role("button", name="Automatic").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("grace@company.example may look at everything, and change nothing")).to_be_visible()
    page.keyboard.press("Escape")
    audit = server.get("/audit").json()["audit"]
    assert [line["action"] for line in audit] == ["create job"]
    page.get_by_role("link", name="Sign out").click()
    expect(page.get_by_role("heading", name="OpenReCycle")).to_be_visible()
    expect(page.get_by_label("Token")).to_be_visible()
    page.goto(f"{server.root}/schedule")
    expect(page.get_by_label("Token")).to_be_visible()
    page.close()
