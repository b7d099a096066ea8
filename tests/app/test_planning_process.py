"""Plans out of the child process: order, errors, its death."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess

import pytest

from openrecycle.app.plans import solving
from openrecycle.app.plans.solving import Making, PlanAsked, plan_maker
from openrecycle.app.runtime.task_queue import AHEAD, URGENT, TaskQueue
from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, Technique
from openrecycle.planner.plans.plan import JobDoc, Plan, job_doc
from tests.golden import golden

pytestmark = pytest.mark.processes

JOB = job_doc(Job.uniform(2, 2, 2))


class Answers:
    """Collects what the maker calls back with."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Plan | None, str]] = []
        self._changed = threading.Condition()

    def taker(self, name: str):  # type: ignore[no-untyped-def]
        def done(plan: Plan | None, why: str) -> None:
            with self._changed:
                self.got.append((name, plan, why))
                self._changed.notify_all()

        return done

    def wait(self, count: int) -> list[tuple[str, Plan | None, str]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.got) >= count, 60)
        return self.got


def child() -> BaseProcess:
    (found,) = (process for process in active_children() if process.name == "planning")
    return found


def request(*failed: str, job: JobDoc = JOB) -> PlanAsked:
    return PlanAsked(job=job, failed=failed, solver="list")


@pytest.fixture
def maker() -> Iterator[TaskQueue[Plan]]:
    maker = plan_maker()
    maker.start()
    yield maker
    maker.close()


def test_a_plan_comes_back_valid(maker: TaskQueue[Plan]) -> None:
    answers = Answers()
    maker.submit("job", request("W1_0"), answers.taker("a"))
    [(_, plan, why)] = answers.wait(1)
    assert plan is not None
    assert (plan.failed, why) == (("W1_0",), "")
    assert check(plan) == []


def test_what_can_not_be_planned_is_a_sentence(maker: TaskQueue[Plan]) -> None:
    answers = Answers()
    maker.submit("job", request("W0_0", "W1_0"), answers.taker("a"))
    [(_, plan, why)] = answers.wait(1)
    assert plan is None
    assert why.startswith(golden("no-schedule-exists-stage-0"))


def test_the_urgent_overtake_the_others() -> None:
    maker, answers = plan_maker(), Answers()
    try:
        for name in ("a", "b"):
            maker.submit("job", request(), answers.taker(name), priority=AHEAD)
        maker.submit("job", request("W1_0"), answers.taker("urgent"), priority=URGENT)
        maker.start()
        assert [name for name, *_ in answers.wait(3)] == ["urgent", "a", "b"]
    finally:
        maker.close()


def test_what_was_cancelled_is_not_made() -> None:
    maker, answers = plan_maker(), Answers()
    try:
        maker.submit("gone", request(), answers.taker("a"))
        maker.submit("here", request(), answers.taker("b"))
        maker.cancel("gone")
        maker.start()
        assert [name for name, *_ in answers.wait(1)] == ["b"]
        # Nothing is kept of an owner who has no request: otherwise the console would keep all jobs that ever ended.
        maker.cancel("nobody")
        for owner in ("gone", "nobody"):
            maker.submit(owner, request(), answers.taker(owner))
        assert [name for name, *_ in answers.wait(3)] == ["b", "gone", "nobody"]
    finally:
        maker.close()


def test_the_death_of_the_child_costs_a_retry(maker: TaskQueue[Plan]) -> None:
    answers = Answers()
    maker.submit("job", request(), answers.taker("before"))
    answers.wait(1)
    child().kill()
    maker.submit("job", request("W1_1"), answers.taker("after"))
    name, plan, _ = answers.wait(2)[1]
    assert name == "after"
    assert plan is not None


def test_an_answer_that_can_not_be_read_is_said_and_stops_nothing() -> None:
    left, answers = ["the answer is damaged"], Answers()

    def read(document: bytes) -> Plan:
        if left:
            raise zlib.error(left.pop())
        return solving.read_plan(document)

    maker = TaskQueue(solving.serve_at_once, "planning", read)
    maker.start()
    try:
        maker.submit("job", request(), answers.taker("damaged"))
        maker.submit("job", request(), answers.taker("next"))
        (_, none, why), (name, plan, _) = answers.wait(2)
    finally:
        maker.close()
    assert none is None and "(error)" in why
    assert name == "next" and plan is not None


def test_an_error_in_a_callback_stops_nothing(maker: TaskQueue[Plan]) -> None:
    def fails(plan: Plan | None, why: str) -> None:
        raise RuntimeError("the callback is at fault")

    answers = Answers()
    maker.submit("job", request(), fails)
    maker.submit("job", request(), answers.taker("next"))
    assert answers.wait(1)[0][0] == "next"


def test_close_does_not_wait_for_a_long_solve() -> None:
    maker = plan_maker()
    maker.start()
    big = job_doc(Job.uniform(32, 32, 64))
    maker.submit("job", request(job=big), lambda plan, why: None)
    process = child()
    maker.close()
    assert not process.is_alive()
    assert not any(thread.name == "planning" for thread in threading.enumerate())


def test_an_answer_without_a_plan_does_not_stand_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may have died, and does not die again."""
    job = job_doc(Job.uniform(1, 1, 1))
    none = job.model_copy(update={"profiles": (job.profiles[0].model_copy(update={"forward": 0}),)})
    pages = Making()
    good, bad = ((document, (), Technique.FAULT_FREE, "1f1b") for document in (job, none))
    made, failed = pages.get(*good), pages.get(*bad)
    assert made.plan is not None and failed.plan is None and failed.why
    assert pages.get(*bad) is failed
    monkeypatch.setattr(solving, "FAILED_SECONDS", -1.0)
    assert pages.get(*good) is made and pages.get(*bad) is not failed
    pages.close()


def test_large_answers_are_forgotten_sooner_than_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large job each may have a hundred megabytes, and weeks bring many."""
    for name, ops in (("ANSWERED_OPS", 30), ("LEAST_ANSWERED", 1), ("MOST_ANSWERED", 24)):
        monkeypatch.setattr(solving, name, ops)
    pages = Making()
    small, large, another = (
        (job_doc(Job.uniform(*grid)), (), Technique.FAULT_FREE, "1f1b") for grid in ((1, 1, 1), (2, 2, 2), (1, 4, 2))
    )
    first, made = pages.get(*large), pages.get(*small)
    assert pages.get(*large) is first and pages.get(*small) is made
    pages.get(*another)
    assert pages.get(*small) is made and pages.get(*large) is not first
    pages.close()
