"""The console stands still or dies under an open page, and comes back on the same port and database."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, expect

from tests.app.console_server import Agents, ConsoleServer, ForkedConsole
from tests.browser.watching import NEEDS_CHROMIUM, WAIT_MS, settle

pytestmark = [*NEEDS_CHROMIUM, pytest.mark.processes, pytest.mark.timeout(300)]
# Nobody sends heartbeats here.
PATIENT = ("--suspect", "80000", "--dead", "86400")
SAID = "getComputedStyle(document.querySelector('.stApp'), '::after').content"


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    server = ForkedConsole(f"sqlite:///{tmp_path_factory.mktemp('comes_back') / 'console.db'}", *PATIENT)
    yield server
    server.close()


def commit(agents: Agents, iteration: int) -> None:
    row: dict[str, Any] = {"loss": 2.5, "loss_hex": (2.5).hex(), "seconds": 0.25, "generation": 1, "living": 12}
    answer = agents.server.post(agents.path("/iterations"), {"iterations": [{"iteration": iteration, **row}]})
    assert answer.ok, answer.text


def test_an_open_page_comes_back_with_a_killed_console(tab: Page, server: ConsoleServer) -> None:
    agents = Agents(server)
    agents.register_all()
    agents.resume(agents.names, 1)
    commit(agents, 0)
    # Not watched: its console says that the connection is lost.
    page, broken = tab, list[str]()

    def failed(error: Error) -> None:
        broken.append(str(error))

    page.set_default_timeout(WAIT_MS)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.emulate_media(color_scheme="light")
    page.on("pageerror", failed)
    page.goto(f"{server.root}/?events=plan")
    done = page.locator(".or-card", has_text="Iterations done").locator(".or-value")
    expect(done).to_have_text("1 of 100")
    expect(page.get_by_role("button", name="W2_3")).to_be_visible()
    settle(page)

    # It stands still without a word: the connection holds, and the page says that nothing comes.
    page.add_style_tag(content=".or-fresh::after { animation-delay: 3s !important; }")
    stale = "getComputedStyle(document.querySelector('.or-fresh'), '::after').visibility"
    page.wait_for_function(f"{stale} === 'hidden'")
    server.process.send_signal(signal.SIGSTOP)
    page.wait_for_function(f"{stale} === 'visible'")
    server.process.send_signal(signal.SIGCONT)
    page.wait_for_function(f"{stale} === 'hidden'")

    server.stop(signal.SIGKILL)
    page.wait_for_function(f"{SAID}.includes('The console does not answer. Training goes on, unless a worker dies')")
    expect(done).to_be_visible()
    expect(page.get_by_role("dialog")).to_be_hidden()
    server.start(server.port)
    commit(agents, 1)

    # By itself, with what it showed before, and with what has happened since.
    expect(done).to_have_text("2 of 100")
    page.wait_for_function(f"{SAID} === 'none'")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("radio", name="Plans")).to_be_checked()
    page.get_by_role("radio", name="All").click()
    expect(page.locator(".or-events")).to_contain_text("the console was restarted and took the job up again")
    commit(agents, 2)
    expect(done).to_have_text("3 of 100")
    page.goto("about:blank")
    page.remove_listener("pageerror", failed)
    assert broken == []


@pytest.mark.chaos
def test_a_page_that_followed_the_job_goes_on_doing_so(browser: Browser, server: ConsoleServer) -> None:
    """Though it missed the change; its link shows what was seen."""
    agents = Agents(server)
    agents.register_all()
    agents.resume(agents.names, 1)
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{server.root}/schedule")
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    settle(page)
    link = page.url

    server.stop(signal.SIGKILL)
    page.context.set_offline(True)
    server.start(server.port)
    assert agents.exit("W1_2").ok
    agents.deployment(after=1)
    page.context.set_offline(False)
    gone = "failed – its micro-batches run on"
    expect(page.get_by_text(gone).first).to_be_visible()
    assert page.url != link and "follow=1" in page.url
    page.goto(link)
    expect(page.get_by_text("This is the plan that was in force when the link was made")).to_be_visible()
    expect(page.get_by_text(gone)).to_have_count(0)
    page.close()
