"""References to plans: an exact round trip, and what stands behind each kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ui_console import ConsoleHere, JobHere, until
from ui_factory import plan as made_plan

from openrecycle.app.plans.service import use_plan
from openrecycle.app.plans.sources import (
    MeasuredReference,
    OfJob,
    PendingPlan,
    PlanToMake,
    Reference,
    Saved,
    Source,
    parse_reference,
    techniques,
)
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.packed import packed
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.solvers.portfolio import make_plan
from tests.golden import golden

pytestmark = pytest.mark.processes

WORD = st.from_regex(r"[0-9A-Za-z_-]{1,64}", fullmatch=True)
WORKER = st.builds("W{}_{}".format, st.integers(0, 99), st.integers(0, 99))
MADE = st.builds(
    PlanToMake,
    st.sampled_from(Technique),
    st.sampled_from(["1f1b", "uniform", "none", "7"]),
    WORD,
    st.sets(WORKER, max_size=3).map(lambda s: tuple(sorted(s, key=lambda w: tuple(map(int, w[1:].split("_")))))),
)
REFERENCES = st.one_of(st.builds(OfJob, WORD, WORD), st.builds(Saved, WORD), st.builds(MeasuredReference, WORD), MADE)


@given(REFERENCES)
def test_round_trip(reference: Reference) -> None:
    assert parse_reference(str(reference)) == reference


@given(st.text(max_size=80))
def test_anything_else_is_refused_in_a_sentence(text: str) -> None:
    try:
        reference = parse_reference(text, field="plans")
    except InputError as error:
        assert str(error).startswith("plans: got ")
    else:
        assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text",
    [
        "job:a",
        "saved:",
        "measured:a:b",
        "made:magic:none:0a1b2c",
        "made:staggered:lots:0a1b2c",
        "made:staggered:none:0a1b2c:W1",
        "file:/etc/passwd",
    ],
)
def test_bad_references(text: str) -> None:
    with pytest.raises(InputError, match=r"^plan: got "):
        parse_reference(text)


def made(here: ConsoleHere, reference: Reference) -> Source:
    until(lambda: isinstance(here.console.sources.find(reference), Source), "the plan is made")
    found = here.console.sources.find(reference)
    assert isinstance(found, Source)
    return found


def test_plans_of_a_job(here: ConsoleHere) -> None:
    job = JobHere(here.console, "a job").register().die("W1_2").heal("W1_2", 2)
    listed = here.console.sources.names(job.job_id)
    assert next(iter(listed.values())) == "In force, generation 2: without W1_2"
    in_force = here.console.sources.find(OfJob(job.job_id))
    assert isinstance(in_force, Source) and in_force.plan.failed == ("W1_2",)
    for text in listed:
        found = here.console.sources.find(parse_reference(text))
        assert isinstance(found, Source) and found.job_id == job.job_id
    assert {r.technique for r in techniques(job.job_id, ("W1_2",), "none")} == set(Technique)


def test_a_plan_of_another_job_is_none_of_this_ones(here: ConsoleHere) -> None:
    jobs = [JobHere(here.console, f"{n} micro-batches", micro_batches=n).register() for n in (3, 5)]
    runs = [here.console.jobs.find(job.job_id).plan_run for job in jobs]
    assert runs[0] is not None and runs[1] is not None
    for job, own, other in ((jobs[0], *runs), (jobs[1], *runs[::-1])):
        found = here.console.sources.find(OfJob(job.job_id, own.fingerprint))
        assert isinstance(found, Source) and found.job_id == job.job_id
        with pytest.raises(ConsoleError) as refused:
            here.console.sources.find(OfJob(job.job_id, other.fingerprint))
        assert (refused.value.status, refused.value.code) == (404, "unknown_plan")
    # One that is no more than in a generation of a job that has gone on since.
    jobs[0].die("W1_2").heal("W1_2", 2)
    found = here.console.sources.find(OfJob(jobs[0].job_id, runs[0].fingerprint))
    assert isinstance(found, Source) and found.plan.failed == ()


def test_saved_plans(here: ConsoleHere) -> None:
    fingerprint = here.console.plans.library.save(made_plan(("W0_1",)), "worth keeping")
    assert here.console.sources.saved_names() == {f"saved:{fingerprint}": "Saved: worth keeping"}
    found = here.console.sources.find(Saved(fingerprint))
    assert isinstance(found, Source) and (found.name, found.plan.failed) == ("worth keeping", ("W0_1",))


def test_the_plans_of_a_jobs_techniques_are_made_on_the_spot(here: ConsoleHere) -> None:
    job = JobHere(here.console, "in slots", durations={}, paced=False).job_id
    questions = {
        f"made:fault-free:1f1b:{job}": 27,
        f"made:adaptive:1f1b:{job}:W1_2": 36,
        f"made:decoupled:none:{job}:W1_2": 29,
        f"made:staggered:none:{job}:W1_2": 27,
    }
    first = here.console.sources.find(parse_reference(f"made:staggered:none:{job}:W1_2"))
    assert isinstance(first, PendingPlan), "nobody waits for a solver"
    for text, period in questions.items():
        plan = made(here, parse_reference(text)).plan
        assert (plan.metrics.period, plan.solver.status) == (period, "optimal"), text


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("job:nobody:in-force", 404, "job: got 'nobody'"),
        ("saved:nothing", 404, "plan: got 'nothing'"),
        ("measured:nobody", 404, "job: got 'nobody'"),
        ("made:staggered:none:nobody", 404, "job: got 'nobody'"),
        ("made:staggered:none:JOB:W7_0", 422, "failed: got 'W7_0'"),
        ("made:staggered:none:JOB:W0_0+W1_0", 422, golden("stage-0-has-no-living")),
    ],
)
def test_what_nothing_stands_behind(here: ConsoleHere, text: str, status: int, words: str) -> None:
    if "JOB" in text:
        text = text.replace("JOB", JobHere(here.console, "small", pipelines=2, stages=2, micro_batches=2).job_id)

    def refused() -> ConsoleError | None:
        try:
            here.console.sources.find(parse_reference(text))
        except ConsoleError as error:
            return error
        return None

    until(lambda: refused() is not None, "it is refused")
    error = refused()
    assert error is not None and error.status == status and words in str(error)


def test_plans_for_the_same_workers_are_told_apart(here: ConsoleHere) -> None:
    job = JobHere(here.console, "many plans").register().die("W1_2").heal("W1_2", 2)
    live = here.console.jobs.find(job.job_id)
    problem = Problem(live.plans.job, frozenset({Worker(1, 2)}), Technique.ADAPTIVE, MemoryLimit.parse("uniform"))
    mine = make_plan(problem, solver="list")
    use_plan(here.console.jobs.find(job.job_id), mine, "ada")
    listed = here.console.sources.names(job.job_id, lambda at: "12:34:56")
    alike = [name for name in listed.values() if name.startswith("without W1_2")]
    assert len(set(listed.values())) == len(listed)
    assert f"without W1_2 · adaptive · {mine.metrics.period:,.6g} ms · generation 3 · made 12:34:56" in alike
    assert any("· staggered · " in name and "· generation 2 ·" in name for name in alike)
    assert "fault-free" in listed.values(), "one of its kind needs no more"


def test_plans_for_other_layers_say_so(here: ConsoleHere) -> None:
    layered = Job.uniform(3, 4, 6, time_unit="ms", layers=8)
    job = JobHere(here.console, "layers", durations={}, profile=job_doc(layered), paced=False, demo=False).register()
    moved = make_plan(Problem(layered.with_partition((3, 2, 2, 1))), solver="list")
    here.store.put_plan(job.job_id, moved.fingerprint, packed(moved), moved.failed, True)
    named = here.console.sources.names(job.job_id)
    told = [reference for reference, name in named.items() if "3, 2, 2, 1" in name]
    assert told == [str(OfJob(job.job_id, moved.fingerprint))] and not any("2, 2, 2, 2" in n for n in named.values())
