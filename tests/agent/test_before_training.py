"""Workers that end before training began: whether the job waits for somebody in their place, or ends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from openrecycle.agent.config.options import Faults
from openrecycle.agent.coordination.launcher import Coordination, Event, Halt
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.launcher.launch import JobFailed, Launcher, Stopped
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job
from tests.agent.pretended import PretendedWorker, PretendedWorkers, launcher, run
from tests.golden import golden


class Run:
    """A job of two stages, until it begins to train, when it is stopped. dies: by (worker, number), those that end at
    once. unstartable: those that can't be started. on_restart: called with the launcher when a restart is announced."""

    def __init__(
        self,
        dies: Collection[tuple[str, int]],
        unstartable: Collection[tuple[str, int]] = (),
        on_restart: Callable[[Launcher], object] = lambda one: None,
        decides: Callable[[Catalog], Coordination] = LocalCoordination,
        delay: float = 0.05,
    ) -> None:
        self._dies, self._unstartable, self._on_restart = dies, unstartable, on_restart
        self.lines: list[dict[str, Any]] = []
        self.pool = PretendedWorkers(self._started, self._told)
        faults = Faults(max_restarts=1, restart_delay=delay)
        self.launcher = launcher(Job.uniform(1, 2, 2), self.pool, self._heard, decides, faults)
        self.trains = False

    def _started(self, entry: PretendedWorker) -> None:
        one = entry.name, entry.number
        if one in self._unstartable:
            raise OSError("no room")
        if one in self._dies:
            entry.process.ended(1)  # type: ignore[attr-defined]
        else:
            entry.ready()

    def _told(self, entry: PretendedWorker, message: dict[str, Any]) -> None:
        if message["kind"] == "deployment":
            self.trains = True
            self.launcher.stop(15)

    def _heard(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if "restart" in line:
            self._on_restart(self.launcher)


def test_all_that_end_once_come_back() -> None:
    job = Run([("W0_0", 1), ("W0_1", 1)])
    with pytest.raises(Stopped):
        run(job.launcher)
    assert job.trains and job.pool.started == ["W0_0", "W0_1"] * 2


def test_one_that_is_out_of_tries_ends_the_job_though_another_one_comes_back() -> None:
    """Its last end is seen while that one waits to be started."""
    pool = PretendedWorkers(lambda entry: start(entry))

    def start(entry: PretendedWorker) -> None:
        if entry.name == "W0_0" and entry.number == 2:
            for one in (entry, *pool.running.values()):
                one.process.ended(1)  # type: ignore[attr-defined]
        elif entry.name == "W0_0":
            entry.process.ended(1)  # type: ignore[attr-defined]
        else:
            entry.ready()

    lines = list[dict[str, Any]]()
    one = launcher(Job.uniform(1, 2, 2), pool, lines.append, faults=Faults(max_restarts=1, restart_delay=0.05))
    with pytest.raises(JobFailed) as raised:
        run(one)
    assert str(raised.value).startswith("W0_0 ") and golden("before-training-began") in str(raised.value)
    assert [(line["restart"]["worker"], line["restart"]["number"]) for line in lines if "restart" in line] == [
        ("W0_0", 1),
        ("W0_1", 1),
        ("W0_0", 2),
    ]


def test_one_that_can_not_be_started_again_ends_the_job() -> None:
    job = Run([("W0_0", 1), ("W0_1", 1)], unstartable=[("W0_0", 2)])
    with pytest.raises(JobFailed) as raised:
        run(job.launcher)
    assert str(raised.value).startswith("W0_0 ") and golden("before-training-began") in str(raised.value)


@pytest.mark.parametrize("decides", [LocalCoordination, lambda catalog: Coordination()], ids=["alone", "console"])
def test_a_job_that_is_to_end_waits_for_nobody_to_be_started(decides: Callable[[Catalog], Coordination]) -> None:
    job = Run([("W0_1", 1)], on_restart=lambda one: one.end_soon(), decides=decides, delay=600.0)
    with pytest.raises(JobFailed) as raised:
        run(job.launcher)
    assert str(raised.value).startswith("W0_1 ") and golden("before-training-began") in str(raised.value)


class _Refused(Coordination):
    """By a console, once somebody waits to be started."""

    refused = False

    def restarts(self, *about: Any) -> None:
        self.refused = True

    def poll(self, now: float) -> list[Event]:
        return [Halt("the console refused")] if self.refused else []


def test_what_no_restart_can_change_ends_the_job_at_once() -> None:
    job = Run([("W0_1", 1)], decides=lambda catalog: _Refused(), delay=600.0)
    with pytest.raises(JobFailed, match=golden("the-console-refused")):
        run(job.launcher)


def test_a_console_s_job_says_that_it_waits_for_a_person() -> None:
    """Alone it would end, and say why."""

    def start(entry: PretendedWorker) -> None:
        if entry.name == "W0_1":
            entry.process.ended(1)  # type: ignore[attr-defined]
        else:
            entry.ready()

    def heard(line: dict[str, Any]) -> None:
        lines.append(line)
        one.stop(15)

    lines = list[dict[str, Any]]()
    workers = PretendedWorkers(start)
    one = launcher(Job.uniform(1, 2, 2), workers, heard, lambda catalog: Coordination(), heartbeat_seconds=1.0)
    with pytest.raises(Stopped):
        run(one)
    assert [line["warning"].split(" ")[0] for line in lines] == ["W0_1"]
    assert golden("restarted-on-the-console") in lines[0]["warning"]


class _Stopping(Coordination):
    """Somebody stops the job, whose workers get the signal too."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def ready(self, *about: Any) -> None:
        self._stop()


@pytest.mark.parametrize("stopped", [True, False])
def test_a_console_s_job_that_ends_does_not_say_that_it_waits(stopped: bool) -> None:
    """All fail at their start, or somebody stops it."""

    def start(entry: PretendedWorker) -> None:
        if entry.name == "W0_0" and stopped:
            entry.ready()
        else:
            entry.process.ended(-15 if stopped else 1)  # type: ignore[attr-defined]

    lines = list[dict[str, Any]]()
    decides = _Stopping(lambda: one.stop(15)) if stopped else Coordination()
    job, workers = Job.uniform(1, 2, 2), PretendedWorkers(start)
    one = launcher(job, workers, lines.append, lambda catalog: decides, heartbeat_seconds=1.0)
    with pytest.raises(Stopped if stopped else JobFailed):
        run(one)
    assert not lines
