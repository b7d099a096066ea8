"""How long transfers and reductions take between real processes, over the groups that training uses."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from openrecycle.agent.config.timeouts import Timeouts
from openrecycle.agent.launcher.processes import ProcessPool, WorkerProcess
from openrecycle.agent.messages import channel
from openrecycle.agent.profiling.profiler import timing_of
from openrecycle.agent.transport.communicator import Groups
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.profiles import Clock, Reductions, Timing

dist: Any = torch.distributed

MAX_REDUCED_BYTES = 1 << 26
"""Larger sums are measured with this much, and take longer in proportion."""
_TIMEOUT_SECONDS = 300.0
_QUICKEST = 4


class MeasuringError(RuntimeError):
    """A process that was to be measured ended early, took too long, or could not run what it was given."""


def hear(entry: WorkerProcess, kind: str, seconds: float) -> channel.Message:
    """What a process that measures says next, which is to be of that kind. Raises MeasuringError."""
    try:
        if not entry.pipe.poll(seconds):
            raise MeasuringError(f"measuring did not end within {seconds:.0f} s")
        message = channel.receive(entry.pipe)
    except (EOFError, OSError):
        raise MeasuringError("a process that measures ended early") from None
    if message["kind"] != kind:
        raise MeasuringError(f"stage can't be run: {message['text']}")
    return message


@dataclass(frozen=True)
class _PeerSpec:
    """sizes: bytes of the tensors to pass on between peers 0 and 1. reduced: bytes to sum among the
    first 2, 3, ... peers; 0 for none."""

    number: int
    peers: int
    port: int
    sizes: tuple[int, ...]
    reduced: int
    repeats: int
    warm_up: int


def measure_traffic(
    sizes: tuple[int, ...], reduced_bytes: int, peers: int, *, repeats: int, warm_up: int, clock: Clock = "wall"
) -> tuple[tuple[Timing, ...], Reductions | None]:
    """One-way transfers of `sizes` bytes, and reductions of `reduced_bytes` among 2 to `peers` peers.

    Every peer is a process of this machine. Waiting for each other is no processor's time, so with
    `cpu` the quickest quarter of four times as many rounds stands for a machine that nobody else uses.
    Raises MeasuringError.
    """
    if clock == "cpu":
        repeats *= _QUICKEST
    reduced = min(reduced_bytes, MAX_REDUCED_BYTES) if peers > 1 else 0
    processes = max(2 if sizes else 1, peers if reduced else 1)
    if processes < 2:
        return (), None
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool = ProcessPool(_peer, ["openrecycle.agent.profiling.traffic"])
    try:
        for number in range(processes):
            spec = _PeerSpec(number, processes, store.port, sizes, reduced, repeats, warm_up)
            pool.start(Worker(number, 0), lambda _incarnation, spec=spec: spec, time.monotonic())  # type: ignore[misc]
        first = pool.running[Worker(0, 0)]
        seconds = hear(first, "measured", _TIMEOUT_SECONDS)
    finally:
        pool.kill_all()

    def timing(taken: list[float]) -> Timing:
        return timing_of(sorted(taken)[: -(-len(taken) // _QUICKEST)] if clock == "cpu" else taken)

    transfers = tuple(timing([s / 2 for s in taken]) for taken in seconds["transfers"])
    reductions = Reductions(bytes=reduced, by_peers=tuple(map(timing, seconds["reductions"]))) if reduced else None
    return transfers, reductions


def _peer(spec: _PeerSpec, pipe: Connection) -> None:
    """The process. Peer 0 measures and says what it found."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", spec.port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_SECONDS))
    rounds = range(spec.warm_up + spec.repeats)
    everybody = [Worker(n, 0) for n in range(spec.peers)]
    transfers, reductions = [], []
    if spec.number < 2 and spec.sizes:
        groups = Groups(store, 1, everybody[spec.number], everybody[:2], Timeouts())
        transfers = [_pass_on(groups, spec, size, rounds) for size in spec.sizes]
    for size in range(2, spec.peers + 1) if spec.reduced else ():
        if spec.number < size:
            groups = Groups(store, size, everybody[spec.number], everybody[:size], Timeouts())
            reductions.append(_reduce(groups, spec.reduced, rounds))
    drop = spec.warm_up
    if spec.number == 0:
        channel.send(
            pipe, "measured", transfers=[t[drop:] for t in transfers], reductions=[t[drop:] for t in reductions]
        )
    # Until it is ended from outside: a group that closes breaks what others still receive.
    pipe.poll(_TIMEOUT_SECONDS)


def _pass_on(groups: Groups, spec: _PeerSpec, size: int, rounds: range) -> list[float]:
    """Seconds there and back, by round."""
    tensor, taken = torch.zeros(size, dtype=torch.uint8), []
    other = Worker(1 - spec.number, 0)
    for number in rounds:
        started = time.perf_counter()
        if spec.number == 0:
            groups.send(other, tensor, number).wait()
            groups.receive(other, tensor, number).wait()
        else:
            groups.receive(other, tensor, number).wait()
            groups.send(other, tensor, number).wait()
        taken.append(time.perf_counter() - started)
    return taken


def _reduce(groups: Groups, size: int, rounds: range) -> list[float]:
    tensor, taken = torch.zeros(max(1, size // 8), dtype=torch.int64), []
    together = torch.zeros(1, dtype=torch.int64)
    for _ in rounds:
        groups.reduce(together)
        started = time.perf_counter()
        groups.reduce(tensor)
        taken.append(time.perf_counter() - started)
    return taken
