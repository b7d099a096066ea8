"""The plan that a launcher makes for the time in which a worker takes its state is checked beside the training."""

from __future__ import annotations

from typing import Any

import pytest

from openrecycle.agent.coordination.launcher import Coordination, Deploy, Event, Halt
from openrecycle.agent.launcher.launch import JobFailed
from openrecycle.agent.messages.protocol import Command, Deployment
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.plan import Plan
from tests.agent.pretended import PretendedWorker, PretendedWorkers, WrongPlans, launcher, run
from tests.golden import golden

FIRST, BACK = ("W0_0", "W0_1", "W1_0"), "W1_1"


class Returns(Coordination):
    """W1_1 is started again after the first generation, and comes in the second. lost: who is out from then on. enough:
    whether the job ends once a worker has formed in it."""

    def __init__(self, catalog: Catalog, *, lost: tuple[str, ...], enough: bool) -> None:
        self._catalog, self._lost, self._enough = catalog, lost, enough
        self.first: Plan | None = None
        self._formed, self._opened, self._restarted = set[tuple[str, int]](), 0, False
        self.reported: list[tuple[int, Plan]] = []

    def meanwhile(self, generation: int, plan: Plan) -> None:
        self.reported.append((generation, plan))

    def acknowledged(self, state: str, worker: Worker, incarnation: str, generation: int, iteration: int = 0) -> None:
        if state == "formed":
            self._formed.add((str(worker), generation))

    def poll(self, now: float) -> list[Event]:
        if any(generation == 2 for _, generation in self._formed):
            return [Halt("enough")] if self._enough else []
        if self._opened == 2 or (self._opened == 1 and len(self._formed) < len(FIRST)):
            return []
        if self._opened == 1 and not self._restarted:
            self._restarted = True
            return [Command(seq=1, kind="restart", worker=BACK)]
        self._opened += 1
        failed = (BACK,) if self._opened == 1 else self._lost
        living = tuple(name for name in (*FIRST, BACK) if name not in failed)
        plan, _ = Catalog(self._catalog.job, self._catalog.technique, self._catalog.memory).plan_for(
            map(Worker.parse, failed)
        )
        about = {
            "plan_fingerprint": plan.fingerprint,
            "failed": failed,
            "joining": (BACK,) if self._opened == 2 else (),
        }
        self.first = self.first or plan
        return [Deploy(Deployment(generation=self._opened, living=living, **about), plan)]  # type: ignore[arg-type]


def trained(kind: type[Catalog], *, lost: tuple[str, ...] = (), enough: bool) -> tuple[Returns, str]:
    """What decides, and why the job ended."""

    def hear(entry: PretendedWorker, message: dict[str, Any]) -> None:
        if message["kind"] == "deployment" and entry.name in FIRST:
            entry.say("formed", generation=message["deployment"]["generation"], iteration=0)

    made: list[Returns] = []

    def decides(catalog: Catalog) -> Returns:
        made.append(Returns(catalog, lost=lost, enough=enough))
        return made[0]

    def begin(entry: PretendedWorker) -> None:
        if (entry.name, entry.number) == (BACK, 1):
            entry.kill()
        else:
            entry.ready()

    pool = PretendedWorkers(begin, hear)
    one = launcher(Job.uniform(2, 2, 2), pool, lambda line: None, decides, kind=kind)
    with pytest.raises(JobFailed) as error:
        run(one)
    return made[0], str(error.value)


def test_an_interim_plan_that_breaks_a_rule_ends_the_job_whoever_decides() -> None:
    decides, why = trained(WrongPlans, lost=("W0_0",), enough=False)
    assert golden("the-plan-of-list-is") in why
    ((generation, plan),) = decides.reported
    assert generation == 2 and plan.failed == ("W0_0", BACK) and check(plan), "nobody waited for the check"


def test_a_valid_one_is_run() -> None:
    decides, why = trained(Catalog, lost=("W0_0",), enough=True)
    ((generation, plan),) = decides.reported
    assert why == "enough" and (generation, plan.failed, check(plan)) == (2, ("W0_0", BACK), [])


def test_where_the_same_workers_lack_the_plan_in_force_stays() -> None:
    """One was made anew at each return of a worker: 1 to 12 s for 2,048 workers, in which no death was handled."""
    decides, why = trained(WrongPlans, enough=True)
    ((_, plan),) = decides.reported
    assert why == "enough" and plan is decides.first
