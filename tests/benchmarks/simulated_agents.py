"""A job's agents without their training: they speak to a console as real ones do, thousands in one process.

Each worker has a connection of its own: it registers, sends a heartbeat per interval, and takes a generation
up in three acknowledgements, as agent.heartbeat does. On a second connection
it long-polls for generations, as agent.reporter does; of a launcher's job only the launcher would. The
launcher reports ends of processes and, once a second, iterations.

A heartbeat's latency counts from the time it was due, so that a generator that falls behind does not
make the console look quick; how far it fell behind is counted apart.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import time
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvloop

from openrecycle.app.process import prepare
from tests.benchmarks.wire import PATIENCE_SECONDS, Wire

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
    processes in that time, evenly spread; each is followed by the worker's return. polls: workers that
    long-poll for generations."""

    port: int
    pipelines: int
    stages: int
    micro_batches: int
    seconds: float
    failures: int
    polls: int
    heartbeat: float = 1.0


@dataclass
class Told:
    """What came of it. Seconds. latency: of heartbeats, from when they were due. late: of sending them. answered:
    from then on.
    in_recovery: those latencies in which a generation was being taken up. errors: by what went wrong.
    detected: from a reported end to the new generation at the last worker that waits for one."""

    latency: array[float] = field(default_factory=lambda: array("d"))
    in_recovery: array[float] = field(default_factory=lambda: array("d"))
    late: array[float] = field(default_factory=lambda: array("d"))
    answered: array[float] = field(default_factory=lambda: array("d"))
    errors: Counter[str] = field(default_factory=Counter)
    started: float = 0.0
    detected: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    requests: int = 0
    processor: float = 0.0


class Worker:
    """One simulated worker process."""

    def __init__(self, crowd: Crowd, name: str, number: int) -> None:
        self.crowd, self.name, self.number = crowd, name, number
        self.incarnation = f"{name}-1"
        self.generation = 0
        self.alive = True
        self.polls = number < crowd.load.polls
        self._seq = 0
        self._due = 0.0
        self._wire, self._polling = crowd.wire(number), crowd.wire(number)
        self._head = b""

    async def run(self, registered: asyncio.Event) -> None:
        self._head = self.crowd.head("POST", "/heartbeats")
        body = {"worker": self.name, "incarnation": self.incarnation, "host": f"node{self.number // 8}", "pid": 4242}
        async with self.crowd.gate:
            await self.crowd.post(self._wire, "/workers", body, expected=201)
        registered.set()
        if self.polls:
            self.crowd.spawn(self.poll_on())
        # At this worker's own moment of the interval.
        self._due = self.crowd.loop.time() + self.crowd.load.heartbeat * random.random()
        self.crowd.loop.call_at(self._due, self._beat)

    def _beat(self) -> None:
        """The heartbeat of this interval; it waits for what the connection is busy with."""
        crowd, due = self.crowd, self._due
        if not self.alive or crowd.over.is_set():
            return
        self._due = due + crowd.load.heartbeat
        crowd.loop.call_at(self._due, self._beat)
        if self._wire.waits_since() < due - PATIENCE_SECONDS:
            self._wire.give_up("no answer")
        self._seq += 1
        body = (
            f'{{"worker":"{self.name}","incarnation":"{self.incarnation}","seq":{self._seq},'
            f'"generation":{self.generation},"iteration":{crowd.iteration},"phase":"training","op_milliseconds":'
            f'{{"F":{random.uniform(39, 41)},"I":{random.uniform(39, 41)},"W":{random.uniform(39, 41)}}},'
            f'"resident_bytes":{300_000_000 + self._seq * 4096}}}'
        ).encode()
        sent, told, recovering = crowd.loop.time(), crowd.told, crowd.recovering
        told.requests += 1

        def answered(status: int, answer: bytes) -> None:
            if status != 200:
                crowd.failed("/heartbeats", status, answer)
            elif due >= crowd.measured_since:
                now = crowd.loop.time()
                told.late.append(sent - due)
                told.answered.append(now - sent)
                told.latency.append(now - due)
                if recovering:
                    told.in_recovery.append(now - due)

        self._wire.send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body), answered)

    async def poll_on(self) -> None:
        while self.alive and not self.crowd.over.is_set():
            status, body = await self.crowd.get(
                self._polling, f"/deployment?after={self.generation}&wait={LONG_POLL_SECONDS:g}", (200, 204)
            )
            found = _GENERATION.search(_start(body)) if status == 200 else None
            if status not in (200, 204):
                await asyncio.sleep(1.0)
            elif found and self.alive:
                await self.take_up(int(found[1]))

    async def take_up(self, generation: int) -> None:
        self.generation = generation
        self.crowd.reached(generation)
        for state, seconds in (("adopted", 0.0), ("formed", FORM_SECONDS), ("resumed", RESUME_SECONDS)):
            await asyncio.sleep(seconds * random.uniform(0.8, 1.2))
            if self.generation != generation or not self.alive:
                return
            body = {"worker": self.name, "incarnation": self.incarnation, "generation": generation, "state": state}
            await self.crowd.post(self._wire, "/acknowledgements", body)
        self.crowd.has_resumed(generation)

    def die(self) -> None:
        self.alive = False
        self._wire.close()
        self._polling.close()

    def reborn(self) -> Worker:
        twin = Worker(self.crowd, self.name, self.number)
        twin.incarnation = f"{self.name}-{int(self.incarnation.rpartition('-')[2]) + 1}"
        return twin


class Crowd:
    """All workers of a job and their launcher."""

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
        self._launcher = self.wire(0)
        names = [f"W{p}_{s}" for p in range(load.pipelines) for s in range(load.stages)]
        self.workers = {name: Worker(self, name, number) for number, name in enumerate(names)}

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
            "name": f"{len(self.workers)} simulated workers",
            "pipelines": load.pipelines,
            "stages": load.stages,
            "micro_batches": load.micro_batches,
            "iterations": 10**9,
            "durations": {"F": 40, "I": 40, "W": 40},
            "paced": True,
        }
        if not await self.post(self._launcher, "", spec, expected=201):
            return told
        self._expect(1)
        for registered in [self._start(worker) for worker in self.workers.values()]:
            await registered.wait()
        pipe.send(("registered", self.job[1:], self.loop.time() - began))
        await self._take_up_without_poll()
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
            body = {"iterations": [{**row, "living": sum(w.alive for w in self.workers.values())}]}
            if await self.post(wire, "/iterations", body, expected=204):
                first += 1
                self.iteration = first

    async def _fail(self, begin: float) -> None:
        load = self.load
        victims = random.Random(7).sample(list(self.workers), load.failures)
        for number, name in enumerate(victims):
            due = begin + load.seconds * (number + 0.5) / load.failures
            await asyncio.sleep(max(0.0, due - self.loop.time()))
            await self._settled.wait()
            await self._lose(name)
        await asyncio.sleep(max(0.0, begin + load.seconds - self.loop.time()))
        await self._settled.wait()

    async def _lose(self, name: str) -> None:
        """A worker dies, and comes back when the others train again."""
        worker = self.workers[name]
        worker.die()
        self._expect(self._generation + 1)
        began = self.loop.time()
        body = {
            "worker": name,
            "incarnation": worker.incarnation,
            "cause": "exit",
            "reporter": "launcher",
            "detail": "was killed by SIGKILL",
        }
        await self.post(self._launcher, "/failures", body)
        await self._there.wait()
        self.told.detected.append(self.loop.time() - began)
        await self._take_up_without_poll()
        await self._settled.wait()
        self.told.resumed.append(self.loop.time() - began)
        twin = self.workers[name] = worker.reborn()
        self._expect(self._generation + 1)
        self._start(twin)
        await self._there.wait()
        await self._take_up_without_poll()

    async def _take_up_without_poll(self) -> None:
        """Those that do not long-poll are told by their launcher, which does."""
        told = [w for w in self.workers.values() if not w.polls and w.alive]
        if not told:
            return
        wire, after, generation = self.wire(0), self._generation - 1, 0
        while not generation:
            status, body = await self.get(wire, f"/deployment?after={after}&wait=20", (200, 204))
            found = _GENERATION.search(_start(body)) if status == 200 else None
            generation = int(found[1]) if found else 0
        wire.close()
        for worker in told:
            self.spawn(worker.take_up(generation))

    # -- generations -------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        return not self._settled.is_set()

    def _expect(self, generation: int) -> None:
        """That all who live now will take up `generation`."""
        self._generation = generation
        living = [worker for worker in self.workers.values() if worker.alive]
        self._to_reach, self._to_resume = sum(worker.polls for worker in living), len(living)
        self._settled.clear()
        self._there.clear()
        if not self._to_reach:
            self._there.set()

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

    def _start(self, worker: Worker) -> asyncio.Event:
        registered = asyncio.Event()
        self.spawn(worker.run(registered))
        return registered

    def spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _start(body: bytes) -> bytes:
    """Of an answer that may be compressed: the generator need not know the rest."""
    return zlib.decompressobj(31).decompress(body, 64) if body[:2] == b"\x1f\x8b" else body


def simulate(load: Load, pipe: Pipe) -> None:
    """In a process of its own. Sends (stage, job, seconds) on the way, and at the end ("told", Told, "")."""

    async def run() -> Told:
        crowd = Crowd(load)
        try:
            return await asyncio.wait_for(crowd.live(pipe), load.seconds + OVERTIME_SECONDS)
        except TimeoutError:
            crowd.told.errors["the job did not come to rest in time"] += 1
            return crowd.told

    prepare()  # as many files as the console asks for
    gc.disable()  # real agents do not all stand still at once, for a quarter of a second, while one looks for cycles
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(("told", runner.run(run()), 0.0))
