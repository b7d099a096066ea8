"""Memory on the pages is in bytes where the profile says what a worker keeps, beside activations."""

from __future__ import annotations

from dataclasses import replace

from openrecycle.app.catalogs.contents import needed, report
from openrecycle.app.charts import text
from openrecycle.app.charts.gantt import gantt
from openrecycle.app.charts.theme import LIGHT
from openrecycle.app.ui import catalog, facts
from openrecycle.app.ui.tables import workers_table
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique
from openrecycle.planner.plans.drawing import Drawing
from openrecycle.planner.plans.packed import CatalogQuestion, Effort, decode_header, pack, plan_name
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan
from tests.golden import golden

GIB = 2**30


def planned(*, capacity: int = 0) -> Plan:
    """Weights and optimizer of 2 GiB, and 0.5 GiB per activation, half of it kept for W."""
    job = Job.uniform(2, 2, 4)
    profile = replace(
        job.profiles[0],
        activation_bytes=GIB // 2,
        weight_backward_bytes=GIB // 4,
        weight_bytes=GIB,
        optimizer_bytes=GIB,
    )
    job = replace(job, profiles=(profile, profile), capacity_bytes=(capacity,) * 2 if capacity else ())
    return make_plan(Problem(job, memory=MemoryLimit("1f1b"), technique=Technique.FAULT_FREE), solver="list")


def test_the_card_names_the_fullest_worker_and_its_capacity() -> None:
    plan = planned(capacity=8 * GIB)
    card = facts.plan_cards(plan, plan.schedule())[-1]
    assert (card.label, card.value, card.of) == ("Peak memory", "3 GiB", "of 8 GiB")
    assert card.note == golden("on-w0-0-2-activations")
    assert facts.plan_cards(planned(), planned().schedule())[-1].of == ""


def test_the_card_counts_the_activations_of_the_worker_that_it_names() -> None:
    job = Job.uniform(1, 2, 4)
    full, last = (replace(job.profiles[0], activation_bytes=n) for n in (1, 100))
    plan = make_plan(Problem(replace(job, profiles=(full, last)), technique=Technique.FAULT_FREE), solver="list")
    peaks, card = plan.metrics.peak_activations, facts.plan_cards(plan, plan.schedule())[-1]
    assert peaks == {"W0_0": 2, "W0_1": 1}
    assert card.note == golden("on-w0-0-2-activations").replace("W0_0; 2 activations", "W0_1; 1 activation")


def test_without_bytes_activations_are_counted() -> None:
    plan = make_plan(Problem(Job.uniform(2, 2, 4)), solver="list")
    assert facts.plan_cards(plan, plan.schedule())[-1].label == "Peak activations"
    assert not any("memory" in column for column in workers_table(plan.schedule(), list(plan.schedule().ops)))


def test_the_table_has_both_in_one_unit() -> None:
    schedule = planned().schedule()
    table = workers_table(schedule, list(schedule.ops))
    assert table["peak memory (GiB)"] == [3.0, 2.5, 3.0, 2.5]
    assert table["peak activations"] == [2, 1, 2, 1]


def test_the_chart_draws_bytes_against_the_capacity() -> None:
    figure = gantt(Drawing.of(planned(capacity=4 * GIB).schedule()), LIGHT, held=True)
    (held,) = [trace for trace in figure.data if (trace.meta or {}).get("kind") == "memory"]
    assert "<b>W0_0</b> holds 3 GiB of 4 GiB" in held.hovertext
    assert any((trace.meta or {}).get("kind") == "memory limit" for trace in figure.data)
    words = [annotation.text for annotation in figure.layout.annotations]
    assert any(golden("the-workers-capacity") in word for word in words)
    assert "3 GiB" in words
    unlimited = gantt(Drawing.of(planned().schedule()), LIGHT, held=True)
    assert not any((trace.meta or {}).get("kind") == "memory limit" for trace in unlimited.data)


def test_a_catalog_says_the_most_that_a_worker_may_hold() -> None:
    plan = planned()
    problem = plan.problem()
    question = CatalogQuestion(problem.job, problem.technique, problem.memory)
    headers = {plan_name(frozenset()): decode_header(pack(plan, Effort(solver="list")))}
    found = report(question, needed(question, 0), "0123", headers)
    assert found.lines[0].peak_bytes == 3 * GIB
    assert catalog.counts_table(found)["memory, at most (GiB)"] == [3.0]
    assert catalog.plans_table(found.lines[0], "slot")["memory, at most (GiB)"] == [3.0]


def test_a_column_of_bytes_has_the_unit_of_its_largest() -> None:
    assert text.size_unit(1023) == ("B", 1)
    assert text.size_unit(1024) == ("KiB", 1024)
    assert text.size_unit(5 * GIB) == ("GiB", GIB)
    assert text.size_unit(2**52) == ("TiB", 2**40)
