"""One Chromium for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.watching import CHROMIUM, WAIT_MS


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """No longer than its module: for as long as it is there, `asyncio.run` finds Playwright's loop in this thread."""
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-gpu"]
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    """One page for the tests of a module, one after the other: see `watched`."""
    page = browser.new_page()
    yield page
    page.close()
