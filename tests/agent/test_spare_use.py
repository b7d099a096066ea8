"""When a launcher makes workers of spare ranks, and what happens where none can be started."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest

from openrecycle.agent.config.devices import Platform
from openrecycle.agent.config.options import ALIVE_SECONDS, Checkpoints, Faults, Timeouts
from openrecycle.agent.coordination.launcher import Coordination
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.coordination.membership import CHECKPOINT
from openrecycle.agent.launcher import processes
from openrecycle.agent.launcher.launch import JobFailed, Stopped, Takeover
from openrecycle.agent.launcher.processes import SpareRank, SpareRanks, Spares
from openrecycle.agent.launcher.restarts import RestartPolicy
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from tests.agent.pretended import PretendedWorker, PretendedWorkers, launcher, run

Told = dict[str, Any]
WRITES: dict[str, Any] = {
    "checkpoints": Checkpoints(directory="/nowhere"),
    "decides": partial(LocalCoordination, back_to=CHECKPOINT, checkpoint=lambda: "a checkpoint"),
}
"""Of a job that writes checkpoints."""


class TwoRanks(PretendedWorkers):
    """A job whose workers have two ranks each. It runs until a worker made of spare ranks has its place.

    dies: called when all train, with each by its name. unstartable: how many workers of spare ranks can't be started
    first. late: that is known only later, as of another node. made: where one was made of spare ranks, and what it was
    told. copy, told: what another launcher would go on from.
    """

    def __init__(
        self,
        job: Job,
        dies: Callable[[dict[str, PretendedWorker]], object] = lambda workers: None,
        unstartable: int = 0,
        late: bool = False,
        **about: Any,
    ) -> None:
        super().__init__(self._started, self._heard)
        self.job, self.dies, self._unstartable, self._late = job, dies, unstartable, late
        self.lines: list[dict[str, Any]] = []
        self.made: dict[str, Told] = {}
        self.copy: dict[str, Any] = {}
        self.told: list[dict[str, Any]] = []
        self.launcher = launcher(job, self, self.lines.append, **about, platform=Platform(ranks_per_worker=2))

    def run(self) -> None:
        with pytest.raises(Stopped):
            run(self.launcher)

    def hand_out(self, run: Any, saved: Callable[[], dict[str, Any] | None], *, last: bool = False) -> str:
        self.copy = saved() or self.copy
        self.told = [{**entry.told(), "node": 0} for entry in self.workers.values()] or self.told
        return ""

    @property
    def workers(self) -> dict[str, PretendedWorker]:
        return {str(w): entry for w, entry in self.running.items() if isinstance(entry, PretendedWorker)}

    def _started(self, entry: PretendedWorker) -> None:
        if entry.made_of and self._unstartable:
            self._unstartable -= 1
            if not self._late:
                raise OSError("no room")
            entry.die()
        else:
            entry.ready()

    def _heard(self, entry: PretendedWorker, message: Told) -> None:
        if message["kind"] != "deployment":
            return
        for kind in ("adopted", "formed", "resumed"):
            entry.say(kind, generation=message["deployment"]["generation"], iteration=0)
        if entry.made_of:
            self.made[entry.name] = message
            self.launcher.stop(15)
        elif all(one.member for one in self.workers.values()) and (dies := self.dies):
            self.dies = lambda workers: None
            dies(self.workers)


def after_the_lead_is_lost(
    job: Job, lost: Collection[str], spare: Collection[str], living: Collection[str]
) -> TwoRanks:
    """One that goes on where another launcher led. lost: ended with it; spare: each has left a rank."""
    catalog = Catalog(job, Technique.STAGGERED, MemoryLimit("uniform"))
    before = TwoRanks(job, lambda workers: before.launcher.stop(15))
    before.run()
    takeover = Takeover(
        document=json.loads(json.dumps(before.copy)) | {"workers": before.told},
        ahead=0,
        plan=catalog.plan_for(())[0],
        recorded=(),
        lost={Worker.parse(name): f"{name}-1" for name in lost},
        lost_at=time.monotonic_ns(),
        unheard=(),
        others_tell=lambda: False,
        text="the node that led is lost",
    )
    after = TwoRanks(job, takeover=takeover, decides=lambda catalog: went_on(catalog, before.copy["decides"]))
    after.started += lost
    for about in before.told:
        if about["worker"] in living:
            cell = Worker.parse(about["worker"])
            after.start(cell).restore(about)
    after.spares.add(0, [SpareRank((f"{name}-1", 0), slot) for slot, name in enumerate(spare)])
    return after


def went_on(catalog: Catalog, decides: dict[str, Any]) -> Coordination:
    coordination = LocalCoordination(catalog)
    coordination.restore(json.loads(json.dumps(decides)))
    return coordination


def test_what_became_spare_while_nobody_led_is_used_at_once() -> None:
    """And not only when another worker ends: one had died before the lead was lost, and one has after it."""
    job = after_the_lead_is_lost(Job.uniform(2, 2, 2), ["W1_0"], ["W1_0", "earlier"], ["W0_0", "W0_1", "W1_1"])
    job.run()
    assert [*job.made] == ["W1_0"] and not job.spares.all()


def test_two_that_die_one_after_the_other_go_back_to_the_checkpoint_as_one() -> None:
    """Nobody is left, and what is left of both is a worker."""

    def die(workers: dict[str, PretendedWorker]) -> None:
        workers["W0_0"].die(1)
        workers["W1_0"].die(0)

    job = TwoRanks(Job.uniform(2, 1, 2), die, **WRITES)
    job.run()
    ((_, told),) = job.made.items()
    assert told["restore"] == "a checkpoint" and not job.spares.all()


def test_without_a_checkpoint_they_have_nothing_to_go_on_from() -> None:
    def die(workers: dict[str, PretendedWorker]) -> None:
        workers["W0_0"].die(1)
        workers["W1_0"].die(0)

    job = TwoRanks(Job.uniform(2, 1, 2), die)
    with pytest.raises(JobFailed):
        run(job.launcher)
    assert not job.made and len(job.started) == 2


def test_a_silent_one_that_is_still_ending_may_leave_what_is_lacking() -> None:
    """The last one that lived has a rank that hangs: which one, its launcher knows only when the other has ended."""

    def die(workers: dict[str, PretendedWorker]) -> None:
        workers["W0_0"].die(1)
        workers["W1_0"].left = (0,)

    job = TwoRanks(Job.uniform(2, 1, 2), die, **WRITES, faults=Faults(timeouts=Timeouts(silence=4 * ALIVE_SECONDS)))
    job.run()
    ((_, told),) = job.made.items()
    assert told["restore"] == "a checkpoint" and not job.spares.all()


def test_a_job_that_waits_for_nobody_else_gives_up_where_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SPARES_TRIED", RestartPolicy(3, 0.01))

    def die(workers: dict[str, PretendedWorker]) -> None:
        workers["W0_0"].die(1)
        workers["W1_0"].die(0)

    job = TwoRanks(Job.uniform(2, 1, 2), die, unstartable=100, **WRITES)
    with pytest.raises(JobFailed, match="W1_0"):
        run(job.launcher)
    assert sum("no room" in line.get("warning", "") for line in job.lines) == 3


def test_spare_ranks_that_could_not_be_started_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing else happens."""
    monkeypatch.setattr(processes, "SPARES_TRIED", RestartPolicy(5, 0.01))

    def die(workers: dict[str, PretendedWorker]) -> None:
        workers["W1_1"].die(1)
        workers["W2_1"].die(0)

    job = TwoRanks(Job.uniform(3, 2, 2), die, unstartable=2)
    job.run()
    assert len(job.made) == 1 and not job.spares.all()


def test_where_none_could_be_started_whom_the_place_waited_for_comes() -> None:
    """Once, and where that one ran before: not where none could be."""

    def die(workers: dict[str, PretendedWorker]) -> None:
        workers["W1_1"].die(1)
        workers["W2_1"].die(0)
        job.dies = whole

    def whole(workers: dict[str, PretendedWorker]) -> None:
        job.dies = whole
        if len(workers) == 6:
            job.launcher.stop(15)

    faults = Faults(max_restarts=1, restart_delay=0.3)
    job = TwoRanks(Job.uniform(3, 2, 2), die, unstartable=1, late=True, faults=faults)
    job.run()
    assert not job.made and job.started.count("W1_1") == 3 and job.started.count("W2_1") == 2
    assert sorted(line["restart"]["worker"] for line in job.lines if "restart" in line) == ["W1_1", "W2_1"]


def test_those_that_could_not_be_started_rest_until_something_ends_there() -> None:
    """Each time longer; those of other nodes do not wait for them."""
    books = SpareRanks()
    for node in (0, 1):
        books.add(node, spare(f"{node}", f"{node}+"))
    for now in (0.0, 10.0):
        first = books.take(2, now)
        assert first is not None and first.node == 0
        books.put_back(first, now)
    assert books.take(2, 29.0) == Spares(1, tuple(spare("1", "1+")))
    assert books.take(2, 29.0) is None
    books.add(0, ())
    assert books.take(2, 29.0) == first


def test_spare_ranks_of_a_node_that_does_not_answer_are_not_taken_before_those_of_another() -> None:
    books = SpareRanks()
    for node in (0, 1):
        books.add(node, spare(f"{node}", f"{node}+"))
    for _ in range(2):
        taken = books.take(2, 0.0, lambda node: node == 1)
        assert taken is None or taken.node == 1
    assert len(books.on(0)) == 2


def spare(*incarnations: str) -> list[SpareRank]:
    return [SpareRank((incarnation, 0), slot) for slot, incarnation in enumerate(incarnations)]
