"""A worker becomes slow: the console says so, plans with its speed, and takes it back when it is well again."""

from __future__ import annotations

from typing import Any

import pytest
from ui_console import until

from openrecycle.agent.messages.protocol import Acknowledgement, FailureReport, Heartbeat, JobSpec, Registration
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.service import Drifting
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.layers.drift import DriftLimits
from openrecycle.planner.plans.plan import Plan
from tests.golden import golden

pytestmark = pytest.mark.processes

NAMES = [f"W{p}_{s}" for p in range(2) for s in range(2)]
TIMES = {"F": 10.0, "I": 10.0, "W": 10.0}
SPEC = JobSpec(
    name="job", pipelines=2, stages=2, micro_batches=6, iterations=50, durations={**TIMES, "O": 2.0}, memory="none"
)
WINDOW = 5
SLOW = Worker(1, 1)


class Workers:
    """The workers of one job, as the console hears them."""

    def __init__(self, console: ConsoleService, job_id: str) -> None:
        self.job_id, self.seq = job_id, 0
        self.follow(console)

    def follow(self, console: ConsoleService) -> None:
        """From now on they speak to this one."""
        self.console = console
        self.untaken = set[str]()  # whose newest op times it has not looked at
        times = self.job.measurements.op_times
        take = times.take

        def taking() -> dict[str, Any]:
            taken = take()
            self.untaken.difference_update(taken)
            return taken

        times.take = taking  # type: ignore[method-assign, assignment]

    @property
    def job(self) -> LiveJob:
        return self.console.jobs.find(self.job_id)

    @property
    def plan(self) -> Plan:
        current = self.job.state.current
        assert current is not None
        return self.console.plans.cache.plan(current.plan_fingerprint)

    def texts(self) -> list[str]:
        return [event.text for event in self.console.queries.view(self.job_id).events]

    def heard(self) -> set[str]:
        """Whose newest heartbeat has been taken."""
        return {name for name, contact in self.job.measurements.contacts.items() if contact.beat.seq == self.seq}

    def resume(self, names: list[str] = NAMES) -> None:
        """Takes up the newest generation."""
        generation = self.job.state.generation
        for name in names:
            for state in ("adopted", "formed", "resumed"):
                message = Acknowledgement(worker=name, incarnation=f"{name}-a", generation=generation, state=state)  # type: ignore[arg-type]
                self.console.reports.acknowledge(self.job_id, [message])

    def beat(self, factors: dict[str, float], rounds: int = 1, names: list[str] = NAMES) -> None:
        """One heartbeat of each worker, and until the console has taken them; so many times."""
        for _ in range(rounds):
            self.seq += 1
            self.untaken.update(names)
            for name in names:
                took = {kind: ms * factors.get(name, 1.0) for kind, ms in TIMES.items()}
                beat = Heartbeat(
                    worker=name,
                    incarnation=f"{name}-a",
                    seq=self.seq,
                    generation=self.job.state.generation,
                    iteration=self.seq,
                    phase="training",
                    op_milliseconds=took,  # type: ignore[arg-type]
                )
                self.console.reports.heartbeats(self.job_id, [beat])
            until(lambda: set(names) <= self.heard() and not self.untaken)


def started(store: Store) -> ConsoleService:
    console = ConsoleService(store)
    console.plans.drifting = Drifting(
        console.plans.ahead, console.plans.cache.get, 1.0, limits=DriftLimits(window=WINDOW)
    )
    console.start()
    return console


def training(store: Store) -> tuple[ConsoleService, Workers]:
    """A job whose workers have all taken up the first generation."""
    console = started(store)
    created, _ = console.jobs.create(SPEC)
    workers = Workers(console, created.job_id)
    console.reports.register(
        created.job_id, [Registration(worker=name, incarnation=f"{name}-a", host="h", pid=7) for name in NAMES]
    )
    workers.resume()
    return console, workers


def test_a_slow_worker_gets_less_to_do_until_it_is_well(store: Store) -> None:
    console, workers = training(store)
    workers.beat({}, rounds=WINDOW)
    assert workers.job.state.generation == 1 and workers.job.measurements.slow == {}

    workers.beat({"W1_1": 2.0}, rounds=WINDOW + 1)
    until(lambda: workers.job.state.generation == 2)
    view = console.queries.view(workers.job_id)
    assert [w.slow for w in view.workers] == [0, 0, 0, 2]
    assert workers.plan.job.speeds == {"W1_1": 0.5} and workers.job.plans.job.speeds == ((SLOW, 0.5),)
    # Its peer takes work off it.
    assert forwards(workers.plan, "W1_1") < 6 < forwards(workers.plan, "W0_1")
    slow, generation = (
        "W1_1 is slow: its ops take 2.00 times the others'",
        "a plan for W1_1 at speed 0.5: an iteration takes",
    )
    assert any(slow in text for text in workers.texts()) and any(generation in text for text in workers.texts())
    # What fails next is planned with that speed, too.
    workers.resume()
    failed = FailureReport(worker="W0_0", incarnation="W0_0-a", cause="exit", reporter="launcher", detail="gone")
    console.reports.failures(workers.job_id, [failed])
    assert workers.plan.job.speeds == {"W1_1": 0.5} and workers.plan.failed == ("W0_0",)

    # A console that starts anew knows it from the plan in force.
    console.close()
    console = started(store)
    left = NAMES[1:]
    workers.follow(console)
    workers.resume(left)
    until(lambda: workers.job.plans.job.speeds == ((SLOW, 0.5),))
    before = workers.job.state.generation
    workers.beat({}, rounds=WINDOW + 1, names=left)
    until(lambda: workers.job.plans.job.speeds == ())
    until(lambda: workers.job.state.generation > before or any("the plan in force stays" in t for t in workers.texts()))
    assert golden("w1-1-is-as-fast") in workers.texts() and workers.job.measurements.slow == {}
    console.close()


def test_while_the_plan_is_frozen_a_better_one_waits(store: Store) -> None:
    console, workers = training(store)
    console.operators.freeze(workers.job_id, True, "ada")
    workers.beat({"W1_1": 2.0}, rounds=WINDOW + 1)
    until(lambda: any("it waits: ada has frozen the plan" in text for text in workers.texts()))
    assert workers.job.state.generation == 1
    assert workers.job.plans.job.speeds == ((SLOW, 0.5),), "what fails now is planned with that speed"
    console.operators.freeze(workers.job_id, False, "ada")
    workers.beat({"W1_1": 2.0}, rounds=1)
    until(lambda: workers.job.state.generation == 2)
    assert workers.plan.job.speeds == {"W1_1": 0.5}
    console.close()


def test_all_together_are_slow_and_no_plan_is_to_blame(store: Store) -> None:
    console, workers = training(store)
    workers.beat(dict.fromkeys(NAMES, 1.5), rounds=WINDOW + 1)
    said = "all workers' ops take 1.5 times what the profile says"
    until(lambda: any(said in text for text in workers.texts()))
    assert (
        workers.job.state.generation == 1 and workers.job.plans.job.speeds == () and workers.job.measurements.slow == {}
    )
    console.close()


def forwards(plan: Plan, worker: str) -> int:
    return sum(op.kind == "F" for op in plan.workers[worker])
