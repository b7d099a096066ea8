"""Sentences of the product stand in tests/golden/wording.json, once, and in no test."""

from __future__ import annotations

import re

from tests.golden import ROOT, quoted, wording


def test_no_assert_quotes_a_sentence() -> None:
    """`python -m tests.golden` moves those that do."""
    found = {
        str(path.relative_to(ROOT)): [node.lineno for node in nodes]
        for path in (ROOT / "tests").rglob("*.py")
        if (nodes := list(quoted(path.read_text())))
    }
    assert found == {}


def test_each_sentence_is_expected_by_a_test() -> None:
    used: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path.parent.name != "golden":
            used.update(re.findall(r'\bgolden\(\s*"([^"]+)"', path.read_text()))
    assert used == set(wording())
