"""A list page by page, while rows come and go."""

from __future__ import annotations

import base64
import json

import pytest
from ui_console import console_refuses

from openrecycle.app.api.models import page


def place(row: tuple[float, str]) -> tuple[float, str]:
    return -row[0], row[1]


ROWS = sorted(((float(n // 2), f"row {n} ü") for n in range(7)), key=place)


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 8])
def test_pages_together_are_the_list(limit: int) -> None:
    seen, after, pages = list[tuple[float, str]](), None, 0
    while True:
        rows, after = page("rows", ROWS, place, after, limit)
        seen += rows
        pages += 1
        if after is None:
            break
        assert len(rows) == limit
        assert after.replace("-", "").replace("_", "").isalnum(), "it goes into an address as it is"
    assert seen == ROWS
    assert pages == -(-len(ROWS) // limit)


def test_without_a_limit_it_is_the_whole_list() -> None:
    assert page("rows", ROWS, place, None, None) == (ROWS, None)
    assert page("rows", [], place, None, 3) == ([], None)


def test_what_comes_and_goes_neither_repeats_nor_hides_the_rest() -> None:
    first, after = page("rows", ROWS, place, None, 3)
    newer, left = (99.0, "newer"), [row for row in ROWS if row != first[-1]]  # the very row that the page ended with
    rest, _ = page("rows", sorted([newer, *left], key=place), place, after, None)
    assert [*first, *rest] == ROWS
    assert page("rows", [], place, after, 3) == ([], None)


def cursor(*parts: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "after",
    [
        *("x", "bm9uZQ", "e30", "____", cursor(), cursor(1, 2), cursor(1.0, "row 1")),
        *(cursor("rows", *rest) for rest in ((), (1, 2), (1.0, True), (1.0, "a", 1), (1.0, ["a"]))),
    ],
)
def test_a_cursor_of_no_page_is_refused(after: str) -> None:
    with console_refuses("invalid", "after"):
        page("rows", ROWS, place, after, None)


def test_a_cursor_of_another_list_is_refused() -> None:
    _, after = page("rows", ROWS, place, None, 3)
    for rows in (ROWS, []):
        with console_refuses("invalid", "after"):
            page("others", rows, place, after, None)
