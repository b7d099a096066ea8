"""What is drawn of a catalog while it is filled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openrecycle.app.catalogs.contents import CatalogReport, CountLine, PlanLine, whole_counts
from openrecycle.app.ui import catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique
from openrecycle.planner.plans.packed import CatalogQuestion

pytestmark = pytest.mark.processes

QUESTION = CatalogQuestion(Job.uniform(3, 4, 6), Technique.STAGGERED, MemoryLimit("uniform"))


def line(failures: int, wanted: int, there: int, period: float = 27.0) -> CountLine:
    plan = PlanLine("plan", ((),) * 4, period, period, 0.0, True, 4, "list")
    return CountLine(failures, wanted, there, (plan,) * there, None)


def test_what_is_drawn_of_a_filling_changes_only_with_whole_counts() -> None:
    def lines(*there: int) -> CatalogReport:
        made = tuple(line(i, 2, n) for i, n in enumerate(there))
        return CatalogReport(QUESTION, "0123", len(there) - 1, made, True, 4, 27.0)

    def drawn(*there: int) -> list[int]:
        return [line.failures for line in whole_counts(lines(*there)).lines if line.plans]

    assert drawn(1, 0, 0) == []
    assert drawn(2, 1, 0) == drawn(2, 0, 0) == [0]
    assert drawn(2, 2, 2) == [0, 1, 2]
    assert len(whole_counts(lines(2, 1, 0)).lines) == 3
    many = drawn(*[2] * 35, *[0] * 29)
    assert many == list(range(32)) == drawn(*[2] * 38, *[0] * 26)


def test_plans_beyond_the_tolerance_cover_nothing() -> None:
    """A job that has lost two workers plans ahead for a third one, with those two."""
    beyond = replace(line(3, 0, 0), plans=line(3, 6, 6, period=20.0).plans)
    found = CatalogReport(QUESTION, "0123", 2, (line(0, 1, 1), line(1, 4, 4), line(2, 16, 16), beyond), True, 4, 27.0)
    assert (found.covered, found.missing) == (2, 0)
    assert [each.failures for each in whole_counts(found).lines if each.plans] == [0, 1, 2]
    labels = {card.label: card for card in catalog.cards(found)}
    assert labels["Covered"].value == "2 failures" and "With 2 failures" in labels
    assert catalog.counts_table(found)["missing"] == [0, 0, 0, None]
    assert replace(found, lines=(line(0, 1, 0), *found.lines[1:])).covered is None
