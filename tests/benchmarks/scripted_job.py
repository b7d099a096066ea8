"""A real paced job whose workers die and return at the times of a script, and what each of these cost it.

The launcher obeys a script as it obeys an operator: SIGKILL for a worker's process, a new process for
a dead one. Time zero is the commit of the iteration that ends the warm-up.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from openrecycle.agent.config.options import Planning, TrainingOptions
from openrecycle.agent.coordination.launcher import Deploy, Event
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.launcher.launch import Launcher, Stopped
from openrecycle.agent.messages.protocol import Command, Iteration
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.workers.spec import RunSpec
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker

TINY = {"width": 32, "heads": 2, "sequence": 16, "batch": 2}
WARM_UP = 3
"""Iterations before time zero."""
_ENDLESS = 1_000_000
_HEARD = 0.5
"""Seconds after the end in which commits from before it are still heard of."""


class TooBusyError(RuntimeError):
    """A step of the script came before the job had taken in the one before."""


@dataclass(frozen=True)
class Step:
    """at: seconds after time zero. kills, returns: cells, whose workers die or come back at once."""

    at: float
    kills: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Commit:
    """An iteration that all living workers have committed. at: seconds after time zero."""

    at: float
    seconds: float
    generation: int


@dataclass(frozen=True)
class Generation:
    """failed: workers that are out. planned: milliseconds of the period of the plan in force. moved: some took a place
    on another stage as it began."""

    failed: int
    planned: float
    moved: bool


@dataclass(frozen=True)
class Pause:
    """What a step of the script cost. Seconds.

    failed: workers that are out after it. moved: somebody took a place on another stage for it. delay: from a return
    to the last commit without it, 0 for a loss. lost: beyond the iterations' own time, from the death, or from that
    last commit, to the first commit with the new members.
    """

    step: Step
    failed: int
    moved: bool
    delay: float
    lost: float


@dataclass
class ScriptedRun:
    """What a scripted job did. commits: those of time zero and later. issued: when each step happened.

    detected: seconds from each death to when the launcher saw it.
    """

    script: tuple[Step, ...]
    commits: list[Commit] = field(default_factory=list)
    issued: list[float] = field(default_factory=list)
    generations: dict[int, Generation] = field(default_factory=dict)
    detected: list[float] = field(default_factory=list)

    def steady(self) -> list[Commit]:
        """Commits that follow one of their own generation: nothing but training lies between."""
        return [c for before, c in pairwise(self.commits) if before.generation == c.generation]

    def failed(self, commit: Commit) -> int:
        """Workers that were out of the job."""
        return self.generations[commit.generation].failed

    def pauses(self) -> list[Pause]:
        """Of every step. Raises TooBusyError."""
        failed, out = 0, []
        for step, issued in zip(self.script, self.issued, strict=True):
            before, failed = failed, failed + len(step.kills) - len(step.returns)
            try:
                settled = next(i for i, c in enumerate(self.commits) if c.at > issued and self.failed(c) == failed)
                commit = self.commits[settled]
                period = statistics.median(c.seconds for c in self.steady() if c.generation == commit.generation)
            except (StopIteration, statistics.StatisticsError):
                raise TooBusyError(
                    f"what happened at {step.at:g} s was not over when the next step of the script, or its end, "
                    "came: the machine is too busy for so short a run"
                ) from None
            moved = self.generations[commit.generation].moved
            if step.kills:
                out.append(Pause(step, failed, moved, 0.0, commit.at - issued - period))
            else:
                last = max(i for i, c in enumerate(self.commits[:settled]) if self.failed(c) == before)
                ended = self.commits[last].at
                lost = commit.at - ended - (settled - last) * period
                out.append(Pause(step, failed, moved, max(0.0, ended - issued), lost))
        return out


def run_script(job: Job, memory: MemoryLimit, pace: str, script: Iterable[Step], seconds: float) -> ScriptedRun:
    """Trains until `seconds` after time zero. pace: as of `--pace`. Raises TooBusyError."""
    steps = tuple(script)
    catalog = Catalog(job, Technique.STAGGERED, memory)
    for patterns in catalog.patterns(2):
        for failed in patterns:
            catalog.add(catalog.plan_for(failed)[0])
    run = ScriptedRun(steps)
    coordination = _Scripted(catalog, run, seconds, lambda: launcher.stop(signal.SIGTERM))
    launcher = Launcher(
        RunSpec(
            TrainingOptions(job=job, iterations=_ENDLESS, planning=Planning(pace=pace)),
            NamedWorkload("openrecycle.agent.examples.gpt:Gpt", TINY),
        ),
        coordination,
        coordination.hear,
        catalog,
    )
    with contextlib.suppress(Stopped):
        launcher.run()
    return run


class _Scripted(LocalCoordination):
    """Also hands out the script's steps, when they are due, as an operator's commands."""

    def __init__(self, catalog: Catalog, run: ScriptedRun, seconds: float, stop: Callable[[], None]) -> None:
        super().__init__(catalog, migrate=True)
        self._ticks = catalog.job.ticks_per_unit
        self._run, self._seconds, self._stop = run, seconds, stop
        self._zero: float | None = None
        self._living: set[str] = set()
        self._empty: set[str] = set()
        self._moved: dict[str, str] = {}
        self._places: dict[str, str] = {}

    def committed(self, iterations: Iterable[Iteration]) -> None:
        for line in iterations:
            if self._zero is None and line.iteration == WARM_UP - 1:
                self._zero = time.monotonic()
                self._run.commits.append(Commit(0.0, line.seconds, line.generation))
            elif self._zero is not None:
                at = self._run.commits[-1].at + line.seconds
                if at <= self._seconds:
                    self._run.commits.append(Commit(at, line.seconds, line.generation))

    def hear(self, line: dict[str, Any]) -> None:
        if "failure" in line:
            self._run.detected.append(line["failure"]["detected_ms"] / 1000)

    def poll(self, now: float) -> list[Event]:
        events = super().poll(now)
        for event in events:
            if isinstance(event, Deploy):
                deployment, period = event.deployment, event.plan.schedule().period / self._ticks
                places = {incarnation: str(worker) for incarnation, worker in event.places.items()}
                moves = {self._places[i]: to for i, to in places.items() if self._places.get(i, to) != to}
                self._places |= places
                opened = Generation(len(deployment.failed), period, bool(moves))
                self._run.generations[deployment.generation] = opened
                self._living = set(deployment.living)
                self._empty = set(deployment.failed)
                self._moved |= moves
        if self._zero is not None:
            events += self._due(now - self._zero)
            if now > self._zero + self._seconds + _HEARD:
                self._stop()
        return events

    def _due(self, elapsed: float) -> list[Command]:
        done = len(self._run.issued)
        if done == len(self._run.script) or elapsed < self._run.script[done].at:
            return []
        step = self._run.script[done]
        self._run.issued.append(elapsed)
        kills = [Command(seq=done, kind="kill", worker=str(self._home(name))) for name in step.kills]
        back = [self._vacant(name) for name in step.returns]
        return kills + [Command(seq=done, kind="restart", worker=name) for name in back]

    def _vacant(self, name: str) -> str:
        """That cell, or another empty one where somebody has moved in."""
        place = name if name in self._empty else min(self._empty, default=None)
        if place is None:
            raise TooBusyError(
                f"{name} is to come back and is not gone yet: the machine is too busy for so short a run"
            )
        self._empty.discard(place)
        return place

    def _home(self, name: str) -> Worker:
        """Where the worker of that cell is now: it may have moved to another stage."""
        while name not in self._living:
            if name not in self._moved:
                raise TooBusyError(f"{name} is to die and is not back yet: the machine is too busy for so short a run")
            name = self._moved.pop(name)
        return Worker.parse(name)
