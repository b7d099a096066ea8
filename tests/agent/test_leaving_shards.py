"""Who is asked to leave a job with a sharded optimizer stays until others have what it holds, whatever happens: a
launcher without processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import pytest

from openrecycle.agent.config.options import Faults, Optimization, TrainingOptions
from openrecycle.agent.coordination.launcher import Coordination, Deploy, Failure
from openrecycle.agent.launcher.launch import Launcher
from openrecycle.agent.launcher.processes import WorkerProcess
from openrecycle.agent.messages import channel
from openrecycle.agent.messages.protocol import Deployment
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.nodes.pool import RemoteProcess
from openrecycle.agent.workers.spec import RunSpec
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker

JOB = Job.uniform(3, 2, 2)
CELLS = [str(worker) for worker in JOB.workers()]


@dataclass
class _Pool:
    """has: is the node there, so that processes can be started? saved: what another lead would go on from."""

    running: dict[Worker, WorkerProcess] = field(default_factory=dict)
    fenced: list[str] = field(default_factory=list)
    started: list[Worker] = field(default_factory=list)
    host: str = "127.0.0.1"
    has: bool = False
    saved: Callable[[], dict[str, Any] | None] = dict

    def recorded(self, line: dict[str, Any]) -> str:
        return ""

    @property
    def context(self) -> Any:
        return multiprocessing.get_context("spawn")

    @property
    def entries(self) -> list[WorkerProcess]:
        return list(self.running.values())

    def fence(self, entry: WorkerProcess, reason: str, *, silent: bool = False) -> None:
        entry.fenced = True
        del self.running[entry.worker]
        self.fenced.append(str(entry.worker))

    def start(self, worker: Worker, *_: Any) -> WorkerProcess:
        self.started.append(worker)
        raise OSError("there is no process here")

    def forget(self, entry: WorkerProcess) -> None:
        self.running.pop(entry.worker, None)

    def place(self, places: dict[str, Worker], generation: int) -> tuple[dict[Worker, Worker], list[WorkerProcess]]:
        return {}, []

    def spare(self, entry: WorkerProcess) -> None: ...

    def node_of(self, entry: WorkerProcess) -> int:
        return 0

    def has_node(self, node: int) -> bool:
        return self.has

    def hand_out(self, run: RunSpec, saved: Callable[[], dict[str, Any] | None], *, last: bool = False) -> str:
        self.saved = saved
        return ""


class _Decides(Coordination):
    """Keeps what it is told. asked: for another generation, and of which."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.gone: list[str] = []

    def failed(self, failure: Failure) -> None:
        if failure.cause == "exception":
            self.asked.append(failure.generation)
        elif failure.cause == "exit":
            self.gone.append(str(failure.worker))


class _Job:
    """All train in generation 1. lines: of the record."""

    def __init__(self, sharding: Any) -> None:
        self.catalog = Catalog(JOB, Technique.STAGGERED, MemoryLimit("uniform"))
        self.pool, self.decides, self.lines = _Pool(), _Decides(), list[dict[str, Any]]()
        sharded, faults = Optimization(sharding=sharding), Faults(max_restarts=1, restart_delay=0.0)
        options = TrainingOptions(job=JOB, iterations=1000, optimization=sharded, faults=faults)
        spec = RunSpec(options, NamedWorkload("openrecycle.agent.examples.gpt:Gpt", {}), ())
        self.launcher = Launcher(spec, self.decides, self.lines.append, self.catalog, self.pool)  # type: ignore[arg-type]
        self.told = list[dict[str, Any]]()
        """Deployments, as W2_1 is told of them."""
        self.pipes = dict[str, Connection]()
        """Of the workers' ends."""
        for number, name in enumerate(CELLS):
            pipe, self.pipes[name] = multiprocessing.Pipe()
            process = RemoteProcess(lambda: None)
            entry = WorkerProcess(Worker.parse(name), f"i{number}", process, pipe, time.monotonic())
            entry.send = lambda message, name=name: self._sent(name, message)
            self.pool.running[entry.worker] = entry
        self.deploy(1)
        self.form()

    def end(self, entry: WorkerProcess) -> None:
        """Its process does."""
        assert isinstance(entry.process, RemoteProcess)
        entry.process.ended(-9)
        self.launcher.turn(0.0)

    def _sent(self, name: str, message: dict[str, Any]) -> None:
        if name == "W2_1" and message["kind"] == "deployment":
            self.told.append(message)

    def deploy(self, generation: int, leaving: tuple[str, ...] = (), dead: tuple[str, ...] = ()) -> None:
        """As the coordination opens it: without those that are to leave."""
        failed = [name for name in CELLS if name in {*leaving, *dead}]
        plan, _ = self.catalog.plan_for(map(Worker.parse, failed))
        deployment = Deployment(
            generation=generation,
            plan_fingerprint=plan.fingerprint,
            living=tuple(name for name in CELLS if name not in failed),
            failed=tuple(failed),
            leaving=leaving,
        )
        self.decides.poll = lambda now: [Deploy(deployment, plan)]
        self.launcher.turn(0.0)
        self.decides.poll = lambda now: []

    def hear(self, name: str, kind: str, **fields: Any) -> None:
        channel.send(self.pipes[name], kind, generation=self.generation, **fields)
        self.launcher.turn(0.0)

    @property
    def restarted(self) -> list[str]:
        """Who is to be started again by itself."""
        return [line["restart"]["worker"] for line in self.lines if "restart" in line]

    @property
    def deployment(self) -> Deployment:
        assert self.launcher.deployed is not None
        return self.launcher.deployed.deployment

    @property
    def generation(self) -> int:
        return self.deployment.generation

    def form(self, but: tuple[str, ...] = ()) -> None:
        for name in self.deployment.living:
            if name not in but:
                self.hear(name, "formed", iteration=0)

    def share(self, but: tuple[str, ...] = ()) -> None:
        for name in self.deployment.living:
            if name not in but:
                self.hear(name, "shared")

    @property
    def left(self) -> list[str]:
        return [line["left"]["worker"] for line in self.lines if "left" in line]


@pytest.fixture
def job() -> _Job:
    return _Job("zero1")


def test_without_shards_one_leaves_at_once() -> None:
    job = _Job("none")
    job.deploy(2, leaving=("W1_0",))
    assert "W1_0" not in job.deployment.living and job.left == ["W1_0"]


def test_one_that_dies_before_its_launcher_knew_that_it_was_to_leave_stays_out() -> None:
    job = _Job("none")
    job.end(job.pool.running[Worker(1, 0)])
    assert job.restarted == ["W1_0"]
    job.deploy(2, leaving=("W1_0",))
    assert job.told[-1]["after"] is None, "nobody can finish an iteration without it"
    job.form()
    job.pool.has = True
    job.launcher.turn(0.0)
    assert not job.pool.started and Worker(1, 0) not in job.pool.running


def test_one_stays_until_all_have_said_that_others_have_its_parts(job: _Job) -> None:
    job.share()
    job.deploy(2, leaving=("W1_0",))
    # The generation opens at once, at an iteration's end; the worker is in it, and known as one that is to go.
    assert "W1_0" in job.deployment.living and job.deployment.leaving == ("W1_0",)
    assert "W1_0" not in job.deployment.failed and job.told[-1]["after"] is not None
    job.form()
    job.share(but=("W2_1",))
    assert not job.decides.asked and not job.pool.fenced and not job.left
    job.hear("W2_1", "shared")
    assert job.decides.asked == [2]
    job.deploy(3, leaving=("W1_0",))
    assert "W1_0" not in job.deployment.living and job.left == ["W1_0"] and not job.pool.fenced
    job.form()
    assert job.pool.fenced == ["W1_0"] == job.decides.gone


def test_nobody_is_asked_before_all_have_formed(job: _Job) -> None:
    """Where nothing had to be taken they say so before: and no iteration has ended yet, after which to leave."""
    job.deploy(2, leaving=("W1_0",))
    job.share()
    job.form(but=("W0_1",))
    assert not job.decides.asked
    job.hear("W0_1", "formed", iteration=0)
    assert job.decides.asked == [2]


@pytest.mark.parametrize("shared", [False, True])
def test_a_death_meanwhile_puts_nobody_else_out(shared: bool, job: _Job) -> None:
    """What one that is to leave has alone would go with it; where others have it, it may go at once."""
    job.deploy(2, leaving=("W1_0",))
    job.form()
    if shared:
        job.share()
    dead = job.pool.running[Worker(2, 1)]
    job.end(dead)
    job.deploy(3, leaving=("W1_0",), dead=("W2_1",))
    assert ("W1_0" in job.deployment.living) is not shared
    assert job.pool.fenced == (["W1_0"] if shared else [])
    assert job.restarted == ["W2_1"]


def test_who_is_fenced_is_started_again_and_who_leaves_is_not(job: _Job) -> None:
    job.deploy(2, dead=("W2_1",))
    assert job.pool.fenced == ["W2_1"] and job.restarted == ["W2_1"]
    for generation in (3, 4):
        job.deploy(generation, leaving=("W1_0",), dead=("W2_1",))
        job.form()
        job.share()
    assert job.pool.fenced == ["W2_1", "W1_0"] and job.restarted == ["W2_1"]


def test_what_breaks_meanwhile_is_gone_on_from(job: _Job) -> None:
    """The coordination and the workers are in the same generation, so what they report of it counts."""
    job.deploy(2, leaving=("W1_0",))
    job.form()
    job.hear("W0_0", "broken", peer="W0_1", detail="")
    job.deploy(3, leaving=("W1_0",))
    assert job.generation == 3 and "W1_0" in job.deployment.living and not job.pool.fenced
    assert job.told[-1]["after"] is None  # nobody can finish the iteration
    job.form()
    job.share()
    assert job.decides.asked == [3]


def test_another_one_is_asked_meanwhile(job: _Job) -> None:
    """Each goes when what it holds has been taken: the second one later."""
    job.deploy(2, leaving=("W1_0",))
    job.form()
    job.share()
    job.deploy(3, leaving=("W1_0", "W2_0"))
    assert "W1_0" not in job.deployment.living and "W2_0" in job.deployment.living
    job.form()
    assert job.pool.fenced == ["W1_0"]
    job.share()
    assert job.decides.asked == [2, 3]


def test_one_that_dies_before_it_may_go_is_told_of(job: _Job) -> None:
    """Nobody waits for a generation without it: who decides takes it for out already."""
    job.deploy(2, leaving=("W1_0",))
    job.form()
    job.end(job.pool.running[Worker(1, 0)])
    assert job.decides.gone == ["W1_0"] and job.decides.asked == [2]
    assert job.restarted == [], "it was to leave"


def test_another_lead_knows_who_has_shared(job: _Job) -> None:
    job.share(but=("W2_1",))
    saved = job.pool.saved()
    assert saved is not None and sorted(saved["_shared"]) == [name for name in CELLS if name != "W2_1"]
