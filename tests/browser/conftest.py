"""One Chromium for all tests here, and one page in it, which has compiled the code of the console's pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.watching import CHROMIUM, WAIT_MS


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """No longer than these tests: for as long as it is there, `asyncio.run` finds Playwright's loop in this thread."""
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-gpu"]
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def tab(browser: Browser) -> Iterator[Page]:
    """One page for the tests that need no new one, one after the other: see `watched`."""
    page = browser.new_page()
    yield page
    page.close()
