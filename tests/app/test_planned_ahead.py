"""What a job has planned ahead is counted by what happens; what was made for other speeds does not count."""

from __future__ import annotations

import threading
from dataclasses import replace

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.jobs.job_plans import Ahead, JobPlans
from openrecycle.app.plans.service import LEAST_GAIN, worth_changing
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Problem, Worker
from openrecycle.planner.solvers.portfolio import make_plan

SPEC = JobSpec(name="job", pipelines=3, stages=2, micro_batches=3, iterations=50)
FIRST, SECOND = frozenset({Worker(0, 0)}), frozenset({Worker(0, 1)})


def plans(store: Store) -> JobPlans:
    return JobPlans("j", SPEC, store, threading.RLock(), lambda *_: None, lambda *_: None, lambda: None)


def test_what_is_there_already_is_not_made(store: Store) -> None:
    of = plans(store)
    of.plan_now(("W0_0",))
    assert of.want_ahead([FIRST, SECOND]) == [SECOND]
    assert of.ahead == Ahead(1, 2, frozenset({FIRST, SECOND}))
    of.made_ahead(of.job)
    assert (of.ahead.made, of.ahead.wanted) == (2, 2)
    of.want_none_ahead()
    assert of.ahead == Ahead(patterns=frozenset({FIRST, SECOND})), "they are not asked for a second time"


def test_a_plan_for_speeds_of_before_counts_no_more(store: Store) -> None:
    of = plans(store)
    asked = of.job
    of.want_ahead([FIRST])
    slow = replace(asked, speeds=((Worker(1, 1), 0.5),))
    problem = Problem(slow, technique=of.catalog.technique, memory=of.catalog.memory)
    of.plan_with(slow, make_plan(problem, solver="list"))
    of.want_ahead([FIRST])
    of.made_ahead(asked)
    assert of.ahead.made == 0
    of.made_ahead(of.job)
    assert of.ahead == Ahead(1, 1, frozenset({FIRST}))


def test_who_makes_a_plan_elsewhere_and_gives_up_is_asked_again(store: Store) -> None:
    of = plans(store)
    of.asks_for(("W0_0",))
    assert of.asked_for == ("W0_0",)
    of.give_up()
    assert of.asked_for is None


def test_a_plan_for_other_speeds_is_worth_a_generation_if_it_is_much_shorter() -> None:
    slow = replace(SPEC.job(), speeds=((Worker(1, 1), 0.5),))
    assert worth_changing(None, slow).better, "nothing is known of the one in force"
    assert worth_changing(LEAST_GAIN, slow).better and not worth_changing(LEAST_GAIN - 1e-9, slow).better
    assert not worth_changing(-0.5, slow).better
