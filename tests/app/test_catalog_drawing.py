"""What is drawn of a catalog while it is filled."""

from __future__ import annotations

from app.catalogs.report import CatalogReport, CountLine, PlanLine, whole_counts
from planner.job import Job, MemoryLimit, Technique
from planner.plan_codec import Question


def test_what_is_drawn_of_a_filling_changes_only_with_whole_counts() -> None:
    def lines(*there: int) -> CatalogReport:
        question = Question(Job.uniform(3, 4, 6), Technique.STAGGERED, MemoryLimit("uniform"))
        plan = PlanLine("plan", ((),) * 4, 27.0, 27.0, 0.0, True, 4, "list")
        made = tuple(CountLine(i, 2, n, (plan,) * n, None) for i, n in enumerate(there))
        return CatalogReport(question, "0123", len(there) - 1, made, True, 4, 27.0)

    def drawn(*there: int) -> list[int]:
        return [line.failures for line in whole_counts(lines(*there)).lines if line.plans]

    assert drawn(1, 0, 0) == []
    assert drawn(2, 1, 0) == drawn(2, 0, 0) == [0]
    assert drawn(2, 2, 2) == [0, 1, 2]
    assert len(whole_counts(lines(2, 1, 0)).lines) == 3
    many = drawn(*[2] * 35, *[0] * 29)
    assert many == list(range(32)) == drawn(*[2] * 38, *[0] * 26)
