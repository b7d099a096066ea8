"""Real jobs, run inside the test process: tests see and disturb them as they go. Without a console, or with one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from openrecycle.agent.checkpoints import Identity, Origin
from openrecycle.agent.config.devices import Platform
from openrecycle.agent.config.options import (
    Checkpoints,
    Faults,
    HandOver,
    Optimization,
    Planning,
    Timeouts,
    TrainingOptions,
)
from openrecycle.agent.coordination.launcher import Coordination
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.coordination.membership import CHECKPOINT
from openrecycle.agent.launcher.launch import Launcher, Stopped
from openrecycle.agent.launcher.processes import ProcessPool, preload
from openrecycle.agent.messages.channel import misformed
from openrecycle.agent.messages.protocol import Command
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.workers import worker as worker_process
from openrecycle.agent.workers.spec import RunSpec
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from tests.agent.launches import warm

Message = dict[str, Any]
TINY = {"width": 32, "heads": 2, "sequence": 16, "batch": 2}
ENDLESS = 100_000


class LocalJob:
    """One job. on_line: called with the job and each line of the record. on_message: with the job, the
    worker's name and each message that counts, before the launcher acts on it. on_generation: with the job
    and each deployment, when it has been sent. decides: makes who decides on generations."""

    def __init__(
        self,
        *,
        pipelines: int = 2,
        stages: int = 3,
        micro_batches: int = 4,
        iterations: int = ENDLESS,
        kills: tuple[str, ...] = (),
        pace: float = 0.0,
        hang_seconds: float = 60.0,
        grace: float = 0.3,
        optimization: Optimization | None = None,
        faults: Faults | None = None,
        checkpoints: Checkpoints | None = None,
        platform: Platform | None = None,
        workload: NamedWorkload | None = None,
        divided: bool = False,
        timeouts: Timeouts | None = None,
        hand_over: HandOver | None = None,
        partition: tuple[int, ...] = (),
        evaluate_every: int = 0,
        decides: Callable[..., Coordination] = LocalCoordination,
        plans: type[Catalog] = Catalog,
        on_line: Callable[[LocalJob, Message], None] = lambda job, line: None,
        on_message: Callable[[LocalJob, str, Message], None] = lambda job, worker, message: None,
        on_generation: Callable[[LocalJob, Any], None] = lambda job, deployment: None,
        **coordination: Any,
    ) -> None:
        warm()
        if "checkpoint" in coordination:
            coordination.setdefault("back_to", CHECKPOINT)
        computes_on = platform or Platform()
        workload = workload or NamedWorkload("openrecycle.agent.examples.gpt:Gpt", TINY)
        layers = int(workload.options.get("layers", 0))
        job = Job.uniform(pipelines, stages, micro_batches, layers=layers, partition=partition if layers else ())
        self.lines: list[Message] = []
        self.messages: list[tuple[str, Message]] = []
        self.void: list[Message] = []
        self._on_line, self.on_message, self.on_generation = on_line, on_message, on_generation
        catalog = plans(job, Technique.STAGGERED, MemoryLimit("uniform"))
        spec = RunSpec(
            TrainingOptions(
                job=job,
                iterations=iterations,
                evaluate_every=evaluate_every,
                planning=Planning(pace=",".join(f"{kind}={1000 * pace:g}ms" for kind in "FIW") if pace else None),
                optimization=optimization or Optimization(),
                platform=computes_on,
                checkpoints=checkpoints or Checkpoints(),
                faults=replace(
                    faults or Faults(),
                    kill=kills,
                    timeouts=replace(timeouts or Timeouts(), silence=hang_seconds),
                    hand_over=hand_over or HandOver(),
                ),
            ),
            workload,
            job.partition or partition,
            origin=None
            if checkpoints is None
            else Origin(Identity("tiny", stages, stages, pipelines, micro_batches, 0)),
            divided=divided,
            shared_gpus=bool(computes_on.check(pipelines * stages * computes_on.ranks_per_worker)),
        )
        self.pool = ProcessPool(worker_process.main, preload(workload))
        self.coordination = decides(catalog, grace=grace, **coordination)
        self.launcher = _WatchedLauncher(spec, self.coordination, self._hear_line, catalog, self.pool)
        self.launcher.job = self
        self.moves: tuple[tuple[Worker, Worker], ...] = ()
        """Into the newest generation."""

    def run(self) -> LocalJob:
        """To its end, or until `stop`."""
        with contextlib.suppress(Stopped):
            self.launcher.run()
        return self

    def stop(self) -> None:
        self.launcher.stop(signal.SIGTERM)

    def signal(self, name: str, number: int) -> None:
        os.kill(self.launcher.pids[name], number)

    def start(self, name: str) -> None:
        """A new process for a cell whose process is gone; elsewhere, if another worker has moved in."""
        self.launcher.obey(Command(seq=1, kind="restart", worker=name))

    @property
    def iterations(self) -> list[Message]:
        return [line for line in self.lines if "iteration" in line]

    @property
    def losses(self) -> list[str]:
        return [line["loss"] for line in self.iterations]

    @property
    def dead(self) -> list[str]:
        return sorted(line["failure"]["worker"] for line in self.lines if "failure" in line)

    def said(self, kind: str, **fields: Any) -> list[str]:
        """Who said so, in order."""
        return [w for w, m in self.messages if m["kind"] == kind and fields.items() <= m.items()]

    def _hear_line(self, line: Message) -> None:
        self.lines.append(line)
        self._on_line(self, line)


class _WatchedLauncher(Launcher):
    job: LocalJob

    def _hear(self, entry: Any, message: Message) -> None:
        assert not misformed(message, ENDLESS)  # as of what comes from another node
        if entry.fenced:
            self.job.void.append(message)
        else:
            self.job.messages.append((str(entry.worker), message))
            self.job.on_message(self.job, str(entry.worker), message)
        super()._hear(entry, message)

    def _send_deployments(self, after: int | None) -> None:
        super()._send_deployments(after)
        assert self.deployed is not None
        number = self.deployed.deployment.generation
        moves = [line["move"] for line in self.job.lines if "move" in line and line["move"]["generation"] == number]
        self.job.moves = tuple((Worker.parse(move["worker"]), Worker.parse(move["to"])) for move in moves)
        self.job.on_generation(self.job, self.deployed.deployment)


_references: dict[str, list[str]] = {}


def fault_free_losses(iterations: int, **grid: Any) -> list[str]:
    """What a job of that many iterations computes when nothing happens to it. One run serves every test of this
    process that asks for the same grid (of plain values) and no more iterations."""
    question = repr(sorted(grid.items()))
    if len(_references.get(question, ())) < iterations:
        _references[question] = uncut(iterations=-(-iterations // 10) * 10, **grid).losses
    return _references[question][:iterations]


def uncut(*, workload: NamedWorkload | None = None, **grid: Any) -> LocalJob:
    """The job of that grid when nothing happens to it, and no pipeline is cut into stages: the same bits, from a
    third of the processes."""
    given = workload or NamedWorkload("openrecycle.agent.examples.gpt:Gpt", TINY)
    layers = int(given.options.get("layers") or grid.pop("stages", 3))
    whole = NamedWorkload(given.path, {**given.options, "layers": layers})
    return LocalJob(**(grid | {"stages": 1}), workload=whole, partition=(layers,)).run()
