"""The pages of a console that does not lead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from streamlit.testing.v1 import AppTest
from ui_console import MAIN

from openrecycle.app.console.leadership import ConsoleHost, LeaderStatus, set_host
from openrecycle.app.console.service import ConsoleService
from tests.golden import golden

pytestmark = pytest.mark.processes


class Waiting(ConsoleHost):
    """A host that says what the test wants it to, about a real console or none."""

    def __init__(self) -> None:
        self.up: ConsoleService | None = None
        self.stands = LeaderStatus(None, "http://a:8501", "http://a:8501 leads (term 2); it was heard 0.4 s ago")

    @property
    def console(self) -> ConsoleService | None:
        return self.up

    @property
    def status(self) -> LeaderStatus:
        return self.stands


@pytest.fixture
def host() -> Iterator[Waiting]:
    host = Waiting()
    set_host(host)
    yield host
    set_host(None)


def test_it_names_the_leader_and_links_to_it(host: Waiting) -> None:
    page = AppTest.from_file(MAIN, default_timeout=60).run()
    assert not page.exception
    assert page.title[0].value == golden("this-console-is-a-standby")
    expected = "The leader is [http://a:8501](http://a:8501): it leads (term 2); it was heard 0.4 s ago."
    assert page.markdown[0].value == expected


def test_it_says_why_nobody_leads(host: Waiting) -> None:
    host.stands = LeaderStatus(None, "", "the database does not answer; nobody is known to lead")
    page = AppTest.from_file(MAIN, default_timeout=60).run()
    assert page.markdown[0].value == golden("the-database-does-not-answer")


def test_a_lead_in_doubt_is_no_standby(host: Waiting) -> None:
    host.stands = LeaderStatus(2, "", "the database has not confirmed it for 5.2 s", True, 1.0)
    page = AppTest.from_file(MAIN, default_timeout=60).run()
    assert not page.exception
    assert page.title[0].value == golden("this-consoles-lead-is-in-doubt-2")
    expected = "This console may no longer lead: the database has not confirmed it for 5.2 s; it tries again every 1 s."
    assert page.markdown[0].value == expected
    assert "standby" not in page.caption[0].value.lower()
    host.stands = LeaderStatus(None, "http://b:8501", "http://b:8501 leads (term 3); it was heard 0.1 s ago")
    assert page.run().title[0].value == golden("this-console-is-a-standby")


def test_an_open_page_says_that_the_lead_is_in_doubt(host: Waiting) -> None:
    def script() -> None:
        from openrecycle.app.ui.standby import on_open_page

        on_open_page()

    host.stands = LeaderStatus(2, "", "the database has not confirmed it for 5.2 s", True, 1.0)
    (said,) = AppTest.from_function(script).run().warning
    assert said.value.startswith(golden("this-consoles-lead-is-in-doubt-the-database"))


def test_the_pages_are_there_when_this_console_leads(host: Waiting, console: ConsoleService) -> None:
    page = AppTest.from_file(MAIN, default_timeout=60).run()
    assert page.title[0].value == golden("this-console-is-a-standby")
    host.up = console
    page.run()
    assert not page.exception
    assert not page.title
