"""Generations without a console: a state machine without a clock."""

from __future__ import annotations

from typing import Any

from openrecycle.agent.coordination.launcher import Deploy, Halt, Remark
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.protocol import Deployment
from openrecycle.planner.catalog import Catalog
from openrecycle.planner.check import check
from openrecycle.planner.job import Job, MemoryLimit, Technique, Worker


def _started(pipelines: int = 2, stages: int = 2, **options: Any) -> LocalCoordination:
    catalog = Catalog(Job(pipelines, stages, 2), Technique.STAGGERED, MemoryLimit("uniform"))
    coordination = LocalCoordination(catalog, **options)
    for p in range(pipelines):
        for s in range(stages):
            assert not coordination.poll(0.0)
            coordination.ready(Worker(p, s), str(Worker(p, s)))
    return coordination


def _only(events: list[object]) -> Deploy:
    (event,) = (e for e in events if not isinstance(e, Remark))
    assert isinstance(event, Deploy)
    assert check(event.plan) == []
    assert event.deployment.plan_fingerprint == event.plan.fingerprint
    return event


def _all_form(coordination: LocalCoordination, deployment: Deployment, **processes: str) -> None:
    """processes: of workers whose process is not the one that they began with."""
    for name in deployment.living:
        coordination.formed(Worker.parse(name), processes.get(name, name), deployment.generation)


def test_the_first_generation_opens_when_all_are_ready() -> None:
    deployment = _only(_started().poll(0.0)).deployment
    assert deployment.generation == 1 and len(deployment.living) == 4 and deployment.failed == ()


def test_a_death_opens_a_generation_without_the_dead_and_a_return_one_with_it() -> None:
    coordination = _started()
    coordination.poll(0.0)
    coordination.exited(Worker(1, 0), "W1_0", "was killed by SIGKILL")
    deploy = _only(coordination.poll(1.0))
    assert deploy.deployment.generation == 2 and deploy.deployment.failed == ("W1_0",)
    assert "W1_0" not in deploy.plan.workers
    coordination.exited(Worker(1, 0), "W1_0", "again")
    assert coordination.poll(1.0) == []
    coordination.ready(Worker(1, 0), "b")
    assert coordination.poll(1.5) == [], "a newcomer waits until the others are through with generation 2"
    _all_form(coordination, deploy.deployment)
    deployment = _only(coordination.poll(2.0)).deployment
    assert deployment.generation == 3 and deployment.joining == ("W1_0",) and deployment.failed == ()


def test_a_newcomer_that_waits_enters_with_the_next_death() -> None:
    coordination = _started(3)
    _only(coordination.poll(0.0))
    coordination.exited(Worker(1, 0), "W1_0", "died")
    _only(coordination.poll(1.0))
    coordination.ready(Worker(1, 0), "b")
    coordination.exited(Worker(2, 1), "W2_1", "died")
    deployment = _only(coordination.poll(2.0)).deployment
    assert deployment.joining == ("W1_0",) and deployment.failed == ("W2_1",)


def test_a_newcomer_that_dies_while_it_waits_changes_nothing() -> None:
    coordination = _started()
    coordination.poll(0.0)
    coordination.exited(Worker(1, 0), "W1_0", "died")
    deploy = _only(coordination.poll(1.0))
    coordination.ready(Worker(1, 0), "b")
    coordination.exited(Worker(1, 0), "b", "died")
    _all_form(coordination, deploy.deployment)
    assert coordination.poll(2.0) == []


def test_a_stage_without_a_living_peer_halts_the_job() -> None:
    coordination = _started()
    coordination.poll(0.0)
    coordination.exited(Worker(0, 1), "W0_1", "died")
    coordination.exited(Worker(1, 1), "W1_1", "died")
    first, second = coordination.poll(0.0)
    assert isinstance(first, Deploy) and isinstance(second, Halt)
    assert "stage 1 has no living worker left" in second.reason and "--checkpoint" in second.reason


def test_a_broken_transfer_waits_for_its_explanation() -> None:
    coordination = _started()
    coordination.poll(0.0)
    coordination.broken(Worker(0, 0), "W0_0", 1, now=10.0)
    coordination.broken(Worker(0, 1), "W0_1", 1, now=10.1)
    assert coordination.poll(11.9) == []
    coordination.exited(Worker(1, 0), "W1_0", "died")
    assert _only(coordination.poll(12.1)).deployment.generation == 2
    # A report about a generation that is over changes nothing.
    coordination.broken(Worker(0, 0), "W0_0", 1, now=12.2)
    assert coordination.poll(20.0) == []
    # Without an explanation the same members form anew.
    coordination.broken(Worker(0, 0), "W0_0", 2, now=30.0)
    deployment = _only(coordination.poll(32.0)).deployment
    assert deployment.generation == 3 and len(deployment.living) == 3


def test_an_empty_stage_is_re_staffed_from_the_checkpoint() -> None:
    coordination = _started(2, 2, checkpoint=lambda: "point-7")
    coordination.poll(0.0)
    coordination.exited(Worker(0, 1), "W0_1", "died")
    _only(coordination.poll(0.0))
    coordination.exited(Worker(1, 1), "W1_1", "died")
    deploy = _only(coordination.poll(0.0))
    ((source, to),) = deploy.moves
    assert source.stage == 0 and to.stage == 1 and deploy.restore == "point-7"
    assert set(deploy.deployment.living) == {str(to), str(Worker(1 - source.pipeline, 0))}
    assert deploy.deployment.joining == (str(to),)
    # Superseded before all were back on the checkpoint: the next generation goes back to it too.
    coordination.broken(to, str(source), 3, now=1.0)
    again = _only(coordination.poll(9.0))
    assert again.restore == "point-7" and again.moves == ()
    _all_form(coordination, again.deployment, **{str(to): str(source)})
    coordination.broken(to, str(source), 4, now=10.0)
    assert _only(coordination.poll(19.0)).restore is None
    # The process that moved is known by its incarnation, not by the place that it began at.
    coordination.exited(source, str(source), "died")
    (halt,) = coordination.poll(20.0)
    assert isinstance(halt, Deploy | Halt) and str(to) in (
        halt.reason if isinstance(halt, Halt) else halt.deployment.reason
    )


def test_a_planned_move_shortens_the_plan_and_leaves_no_stage_to_a_newcomer() -> None:
    coordination = _started(3, 2, migrate=True)
    coordination.poll(0.0)
    coordination.exited(Worker(0, 0), "W0_0", "died")
    first = _only(coordination.poll(0.0))
    assert first.moves == (), "one failure costs as much wherever it is"
    _all_form(coordination, first.deployment)
    coordination.exited(Worker(1, 0), "W1_0", "died")
    second = _only(coordination.poll(0.0))
    ((source, to),) = second.moves
    assert source.stage == 1 and to.stage == 0 and second.restore is None
    stay, _ = Catalog(Job(3, 2, 2), Technique.STAGGERED, MemoryLimit("uniform")).plan_for([Worker(0, 0), Worker(1, 0)])
    assert second.plan.metrics.period < stay.metrics.period
