"""A job's launchers without their training: they speak to a console as real ones do, thousands of workers in a process.

Each launcher has a connection for its workers: it registers them, sends one batch of heartbeats per interval, and takes
a generation up in three acknowledgements, as agent.monitoring.heartbeat does. On a second connection it long-polls for
generations. The first one also reports ends of processes and, once a second, iterations.

A batch's latency counts from the time it was due, so that a generator that falls behind does not
make the console look quick; how far it fell behind is counted apart.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvloop

from openrecycle.app.runtime.patches import tune_process
from tests.benchmarks.wire import TIMEOUT_SECONDS, Wire

OVERTIME_SECONDS = 900.0
LONG_POLL_SECONDS = 20.0
FORM_SECONDS, RESUME_SECONDS = 0.5, 1.0
_AT_ONCE = 128
_GENERATION = re.compile(rb'"generation":(\d+)')
# Loopback has 28,000 ports per address of the client's.
_CONNECTIONS_PER_ADDRESS = 20_000


@dataclass(frozen=True)
class Load:
    """What to simulate. seconds: of heartbeats, from when all have resumed the first generation. failures: ends of
    processes in that time, evenly spread; each is followed by the worker's return. launcher: workers of each one."""

    port: int
    pipelines: int
    stages: int
    micro_batches: int
    seconds: float
    failures: int
    launcher: int = 8
    heartbeat: float = 1.0


@dataclass
class Told:
    """What came of it. Seconds. latency: of batches of heartbeats, from when they were due. late: of sending them.
    answered: from then on. heartbeats: in them.
    in_recovery: those latencies in which a generation was being taken up. errors: by what went wrong.
    detected: from a reported end to the new generation at the last launcher."""

    latency: array[float] = field(default_factory=lambda: array("d"))
    in_recovery: array[float] = field(default_factory=lambda: array("d"))
    late: array[float] = field(default_factory=lambda: array("d"))
    answered: array[float] = field(default_factory=lambda: array("d"))
    errors: Counter[str] = field(default_factory=Counter)
    started: float = 0.0
    detected: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    requests: int = 0
    heartbeats: int = 0
    processor: float = 0.0


@dataclass
class Worker:
    """One simulated worker process."""

    name: str
    incarnation: str
    alive: bool = True
    seq: int = 0


class Launcher:
    """Of some workers of a job, as if it were all of a node's."""

    def __init__(self, crowd: Crowd, number: int, names: Sequence[str]) -> None:
        self.crowd, self.number = crowd, number
        self.workers = {name: Worker(name, f"{name}-1") for name in names}
        self.generation = 0
        self._due = 0.0
        self._wire, self._polling = crowd.wire(number), crowd.wire(number)
        self._head = b""

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    async def run(self) -> None:
        self._head = self.crowd.head("POST", "/heartbeats")
        await self.register(self.living)
        self.crowd.spawn(self._poll())
        # At this launcher's own moment of the interval.
        self._due = self.crowd.loop.time() + self.crowd.load.heartbeat * random.random()
        self.crowd.loop.call_at(self._due, self._beat)

    async def register(self, workers: Sequence[Worker]) -> None:
        process = {"host": f"node{self.number}", "pid": 4242}
        said = [{"worker": worker.name, "incarnation": worker.incarnation, **process} for worker in workers]
        async with self.crowd.gate:
            await self.crowd.post(self._wire, "/workers", {"registrations": said})

    async def replace(self, name: str) -> None:
        """A new process in the place of one that has ended."""
        number = int(self.workers[name].incarnation.rpartition("-")[2]) + 1
        worker = Worker(name, f"{name}-{number}")
        await self.register([worker])
        self.workers[name] = worker

    def _beat(self) -> None:
        """The heartbeats of this interval; they wait for what the connection is busy with."""
        crowd, due = self.crowd, self._due
        if crowd.over.is_set():
            return
        self._due = due + crowd.load.heartbeat
        crowd.loop.call_at(self._due, self._beat)
        living = self.living
        if not living:
            return
        if self._wire.waits_since() < due - TIMEOUT_SECONDS:
            self._wire.give_up("no answer")
        body = ('{"heartbeats":[' + ",".join(map(self._said, living)) + "]}").encode()
        sent, told, recovering, count = crowd.loop.time(), crowd.told, crowd.recovering, len(living)
        told.requests += 1

        def answered(status: int, answer: bytes) -> None:
            if status != 200 or b'"refused":[]' not in answer:
                crowd.failed("/heartbeats", status, answer)
            elif due >= crowd.measured_since:
                now = crowd.loop.time()
                told.heartbeats += count
                told.late.append(sent - due)
                told.answered.append(now - sent)
                told.latency.append(now - due)
                if recovering:
                    told.in_recovery.append(now - due)

        self._wire.send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body), answered)

    def _said(self, worker: Worker) -> str:
        worker.seq += 1
        return (
            f'{{"worker":"{worker.name}","incarnation":"{worker.incarnation}","seq":{worker.seq},'
            f'"generation":{self.generation},"iteration":{self.crowd.iteration},"phase":"training","op_milliseconds":'
            f'{{"F":{random.uniform(39, 41)},"I":{random.uniform(39, 41)},"W":{random.uniform(39, 41)}}},'
            f'"resident_bytes":{300_000_000 + worker.seq * 4096}}}'
        )

    async def _poll(self) -> None:
        while not self.crowd.over.is_set():
            status, body = await self.crowd.get(
                self._polling, f"/deployment?after={self.generation}&wait={LONG_POLL_SECONDS:g}", (200, 204)
            )
            found = _GENERATION.search(body) if status == 200 else None
            if status not in (200, 204):
                await asyncio.sleep(1.0)
            elif found:
                self.generation = int(found[1])
                self.crowd.reached(self.generation)
                self.crowd.spawn(self._take_up(self.generation))

    async def _take_up(self, generation: int) -> None:
        for state, seconds in (("adopted", 0.0), ("formed", FORM_SECONDS), ("resumed", RESUME_SECONDS)):
            await asyncio.sleep(seconds * random.uniform(0.8, 1.2))
            if self.generation != generation:
                return
            said = [{"worker": w.name, "incarnation": w.incarnation} for w in self.living]
            body = {"acknowledgements": [{**who, "generation": generation, "state": state} for who in said]}
            if said:
                await self.crowd.post(self._wire, "/acknowledgements", body)
        self.crowd.has_resumed(generation)


class Crowd:
    """All launchers of a job."""

    def __init__(self, load: Load) -> None:
        self.load, self.told = load, Told()
        self.loop = asyncio.get_running_loop()
        self.gate = asyncio.Semaphore(_AT_ONCE)
        self.over = asyncio.Event()
        self.measured_since = float("inf")
        self.iteration = 0
        self.job = ""
        self._generation, self._to_reach, self._to_resume = 0, 0, 0
        self._settled = asyncio.Event()
        self._there = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._first = self.wire(0)
        names = [f"W{p}_{s}" for p in range(load.pipelines) for s in range(load.stages)]
        nodes = [names[at : at + load.launcher] for at in range(0, len(names), load.launcher)]
        self.launchers = [Launcher(self, number, node) for number, node in enumerate(nodes)]
        self.launcher_of = {name: launcher for launcher in self.launchers for name in launcher.workers}

    def wire(self, number: int) -> Wire:
        return Wire(self.load.port, f"127.0.0.{2 + 2 * number // _CONNECTIONS_PER_ADDRESS}")

    # -- HTTP ---------------------------------------------------------------------------------

    def head(self, method: str, path: str) -> bytes:
        """Of a request, up to the value of Content-Length where there is a body."""
        head = (
            f"{method} /api/v1/jobs{self.job}{path} HTTP/1.1\r\nHost: 127.0.0.1:{self.load.port}\r\n"
            "User-Agent: python-requests/2.34.0\r\nAccept-Encoding: gzip, deflate\r\nAccept: */*\r\n"
            "Connection: keep-alive\r\n"
        )
        return (head + ("Content-Type: application/json\r\nContent-Length: " if method == "POST" else "\r\n")).encode()

    async def post(self, wire: Wire, path: str, body: dict[str, Any], expected: int = 200) -> bool:
        data = json.dumps(body).encode()
        request = b"%b%d\r\n\r\n%b" % (self.head("POST", path), len(data), data)
        status, answer = await self._ask(wire, path, request, (expected,))
        if path == "" and status == expected:
            self.job = "/" + json.loads(answer)["job_id"]
        return status == expected

    async def get(self, wire: Wire, path: str, expected: tuple[int, ...] = (200,)) -> tuple[int, bytes]:
        return await self._ask(wire, path, self.head("GET", path), expected)

    async def _ask(self, wire: Wire, path: str, request: bytes, expected: tuple[int, ...]) -> tuple[int, bytes]:
        self.told.requests += 1
        status, body = 0, b""
        try:
            status, body = await wire.ask(request)
        except OSError as error:
            body = str(error).encode()
        if status not in expected and not wire.closed:
            self.failed(path.partition("?")[0] or "/jobs", status, body)
        return status, body

    def failed(self, what: str, status: int, answer: bytes) -> None:
        if not self.over.is_set():
            self.told.errors[f"{what}: {status or ''} {answer[:200].decode(errors='replace')}"] += 1

    # -- the job's life -----------------------------------------------------------------------

    async def live(self, pipe: Pipe) -> Told:
        load, told = self.load, self.told
        began = self.loop.time()
        spec = {
            "name": f"{len(self.launcher_of)} simulated workers",
            "pipelines": load.pipelines,
            "stages": load.stages,
            "micro_batches": load.micro_batches,
            "iterations": 10**9,
            "durations": {"F": 40, "I": 40, "W": 40},
            "paced": True,
        }
        if not await self.post(self._first, "", spec, expected=201):
            return told
        self._expect(1)
        await asyncio.gather(*(launcher.run() for launcher in self.launchers))
        pipe.send(("registered", self.job[1:], self.loop.time() - began))
        await self._settled.wait()
        told.started = self.loop.time() - began
        pipe.send(("started", self.job[1:], told.started))
        self.spawn(self._commit())
        self.measured_since = self.loop.time()
        requests, processor = told.requests, time.process_time()
        await self._fail(self.loop.time())
        self.measured_since = float("inf")
        self.over.set()
        told.requests -= requests
        told.processor = time.process_time() - processor
        return told

    async def _commit(self) -> None:
        wire, first = self.wire(0), 0
        while not self.over.is_set():
            await asyncio.sleep(1.0)
            if self.recovering:
                continue
            loss = 2.5
            row = {
                "iteration": first,
                "loss": loss,
                "loss_hex": loss.hex(),
                "seconds": 1.0,
                "generation": self._generation,
            }
            body = {"iterations": [{**row, "living": sum(len(launcher.living) for launcher in self.launchers)}]}
            if await self.post(wire, "/iterations", body, expected=204):
                first += 1
                self.iteration = first

    async def _fail(self, begin: float) -> None:
        load = self.load
        victims = random.Random(7).sample(list(self.launcher_of), load.failures)
        for number, name in enumerate(victims):
            due = begin + load.seconds * (number + 0.5) / load.failures
            await asyncio.sleep(max(0.0, due - self.loop.time()))
            await self._settled.wait()
            await self._lose(name)
        await asyncio.sleep(max(0.0, begin + load.seconds - self.loop.time()))
        await self._settled.wait()

    async def _lose(self, name: str) -> None:
        """A worker dies, and comes back when the others train again."""
        launcher = self.launcher_of[name]
        worker = launcher.workers[name]
        worker.alive = False
        self._expect(self._generation + 1)
        began = self.loop.time()
        body = {
            "worker": name,
            "incarnation": worker.incarnation,
            "cause": "exit",
            "reporter": "launcher",
            "detail": "was killed by SIGKILL",
        }
        await self.post(self._first, "/failures", {"failures": [body]})
        await self._there.wait()
        self.told.detected.append(self.loop.time() - began)
        await self._settled.wait()
        self.told.resumed.append(self.loop.time() - began)
        self._expect(self._generation + 1)
        await launcher.replace(name)
        await self._there.wait()

    # -- generations -------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        return not self._settled.is_set()

    def _expect(self, generation: int) -> None:
        """That all launchers will take up `generation`."""
        self._generation = generation
        self._to_reach = self._to_resume = len(self.launchers)
        self._settled.clear()
        self._there.clear()

    def reached(self, generation: int) -> None:
        if generation == self._generation:
            self._to_reach -= 1
            if self._to_reach == 0:
                self._there.set()

    def has_resumed(self, generation: int) -> None:
        if generation == self._generation:
            self._to_resume -= 1
            if self._to_resume == 0:
                self._settled.set()

    def spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def simulate(load: Load, pipe: Pipe) -> None:
    """In a process of its own. Sends (stage, job, seconds) on the way, and at the end ("told", Told, "")."""

    async def run() -> Told:
        crowd = Crowd(load)
        try:
            return await asyncio.wait_for(crowd.live(pipe), load.seconds + OVERTIME_SECONDS)
        except TimeoutError:
            crowd.told.errors["the job did not come to rest in time"] += 1
            return crowd.told

    tune_process()  # as many files as the console asks for
    gc.disable()  # real agents do not all stand still at once, for a quarter of a second, while one looks for cycles
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(("told", runner.run(run()), 0.0))
