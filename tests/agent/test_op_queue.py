"""How far the host runs ahead of a device, with stand-ins for a GPU's events."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrecycle.agent.config.faults import PacedDevice
from openrecycle.agent.monitoring.liveness import WAITING, OpProgress
from openrecycle.agent.workers import executor
from openrecycle.agent.workers.executor import DeviceOpQueue, OpCount, OpQueue, op_queue
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique
from tests.agent.virtual_wires import Round, train

F0, F1, F2 = ("F", (0, 0)), ("F", (0, 1)), ("F", (0, 2))


class Device:
    """Its ops take a second each, from when they are given to it or the one before has ended; time passes for who
    waits."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0
        self.waits: list[tuple[str, tuple[int, int] | None]] = []
        self.progress = OpProgress()

    def op(self) -> None:
        self.busy_until = max(self.busy_until, self.now) + 1.0

    def at(self) -> tuple[str, tuple[int, int] | None]:
        current = self.progress.current()
        index = None if current.micro_batch is None else (current.pipeline or 0, current.micro_batch)
        return current.kind, index


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, max(device.busy_until, device.now)

    def synchronize(self) -> None:
        if self.device.now < self.at:
            self.device.waits.append(self.device.at())
        self.device.now = max(self.device.now, self.at)

    def query(self) -> bool:
        self.device.now += 0.1
        return self.device.now >= self.at

    def elapsed_time(self, later: Event) -> float:
        assert self.device.now >= later.at, "asked before its end"
        return 1000 * (later.at - self.at)


class Worker:
    """What it was told of ops: kind, end, seconds."""

    def __init__(self, pace: dict[str, float] | None = None, count: OpCount | None = None) -> None:
        self.device = Device()
        self.ended: list[tuple[str, float, float]] = []
        device = PacedDevice(pace or {}, now=lambda: self.device.now, sleep=self._sleep)
        self.queue = DeviceOpQueue(
            *(device, self._hear, self.device.progress, lambda: Event(self.device)),
            now=lambda: self.device.now,
            count=count,
        )

    def _sleep(self, seconds: float) -> None:
        self.device.now += seconds

    def _hear(self, kind: str, at: float, seconds: float) -> None:
        self.ended.append((kind, at, round(seconds, 6)))

    def run(self, op: tuple[str, tuple[int, int]]) -> None:
        started = self.queue.begin()
        self.device.op()
        self.queue.end(*op, started)


def test_the_host_runs_one_op_ahead() -> None:
    worker = Worker()
    worker.run(F0)
    assert worker.device.now == 0 and not worker.ended, "there is nothing before it"
    worker.run(F1)
    assert worker.device.now == 1 and worker.device.waits == [F0], "it waits for the op before, and says so"
    worker.run(F2)
    assert worker.device.now == 2 and worker.device.busy_until == 3, "the device never waited for the host"
    worker.queue.drain()
    assert worker.device.waits == [F0, F1, F2] and worker.device.now == 3
    assert [(kind, seconds) for kind, _, seconds in worker.ended] == [("F", 1.0)] * 3
    assert all(math.isnan(at) for _, at, _ in worker.ended)


@pytest.mark.parametrize(
    ("arrives", "ended"), [pytest.param(0.5, 0, id="while it computes"), pytest.param(9.0, 1, id="later")]
)
def test_a_wait_for_a_message_is_one_for_the_device_as_long_as_that_computes(arrives: float, ended: int) -> None:
    """So that a worker whose device hangs is not taken for one that waits for a peer."""
    worker = Worker()
    worker.run(F0)
    seen = []

    def arrived() -> bool:
        seen.append(worker.device.at())
        return worker.device.now >= arrives

    worker.queue.wait_for(arrived)
    assert len(worker.ended) == ended
    assert set(seen[1:]) == {F0}
    assert worker.device.now < 2, "it has waited for more than the device"
    worker.device.progress.at(WAITING)
    if ended:
        worker.queue.wait_for(lambda: False)
        assert worker.device.at()[0] == WAITING, "nothing is queued any more"


def test_what_is_given_up_is_waited_for_and_not_counted() -> None:
    worker = Worker()
    worker.run(F0)
    worker.run(F1)
    worker.queue.forget()
    assert worker.device.now == 2 and len(worker.ended) == 1
    worker.queue.drain()
    assert len(worker.ended) == 1


def test_a_step_s_end_is_waited_for_and_so_is_that_of_an_op_that_is_stretched() -> None:
    worker = Worker({"W": 5.0})
    worker.run(F0)
    worker.run(("W", (0, 0)))
    assert worker.device.now == 6 and [kind for kind, *_ in worker.ended] == ["F", "W"], "in their order"
    worker.device.op()
    worker.queue.finish("O", 6.0)
    assert worker.device.now == 7 and worker.ended[-1] == ("O", 7.0, 1.0)


class _Stuck:
    """A device's count that has stopped."""

    ended = 0

    def add(self) -> None: ...


def test_a_failure_is_of_the_op_that_the_device_was_at() -> None:
    """The host is told of it in whatever it does next."""
    count: Any = _Stuck()
    worker = Worker(count=count)
    assert worker.queue.failed(*F1) == F1, "nothing is queued"
    for op in (F0, F1, F2):
        worker.run(op)
    count.ended = 3
    assert worker.queue.failed("W", (0, 0)) == ("W", (0, 0)), "all of them have ended"
    count.ended = 2
    assert worker.queue.failed("W", (0, 0)) == F2


def test_a_device_counts_its_ops() -> None:
    count = OpCount(torch.device("cpu"))
    count.add()
    count.add()
    assert count.ended == 2


def test_where_it_was_asked_when_ops_end_it_is_told() -> None:
    worker = Worker()
    worker.device.now = 100.0
    worker.queue.clock()
    worker.run(F0)
    worker.run(F1)
    worker.queue.drain()
    assert [at for _, at, _ in worker.ended] == [101, 102]


def test_on_the_cpu_an_op_has_ended_when_it_returns() -> None:
    ended = []
    queue = op_queue(torch.device("cpu"), PacedDevice({}), lambda *op: ended.append(op[0]), OpProgress())
    for kind in "FW":
        queue.end(kind, (0, 0), queue.begin())
    queue.finish("O", queue.begin())
    assert ended == ["F", "W", "O"]


def test_what_is_read_is_no_part_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first stage, which reads inputs, nor in the last, which reads targets: their times are compared."""
    happened: list[str] = []

    class Queue(OpQueue):
        def begin(self) -> float:
            happened.append("an op begins")
            return super().begin()

    monkeypatch.setattr(executor, "op_queue", lambda device, pace, ended, progress: Queue(pace, ended))
    reads = {name: lambda *place, name=name: happened.append(name) for name in ("inputs", "targets")}
    plan, _ = Catalog(Job(1, 1, 1), Technique.STAGGERED, MemoryLimit("uniform")).plan_for(set())
    train(plan.schedule(), [Round()], width=1, seed=0, workload=SimpleNamespace(**reads))
    assert happened[:3] == ["inputs", "targets", "an op begins"]
