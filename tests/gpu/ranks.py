"""Processes that exchange tensors over the product's own groups: whether NCCL does what agent.transport.group relies
on.

They are started anew, not forked, and take their device as workers do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed

from openrecycle.agent.config.devices import Kind, Platform, Transport
from openrecycle.agent.config.options import LOOPBACK, Timeouts
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.group import (
    Devices,
    GlooGroup,
    Group,
    HostGroup,
    NcclGroup,
    TransferError,
    halt_all,
)
from openrecycle.planner.jobs.job import Worker

dist: Any = torch.distributed

TIMEOUTS = Timeouts(form=40.0, transfer=40.0, group=45.0, silence=20.0)
ELEMENTS = 1 << 20
ROUNDS = 5


class RanksError(RuntimeError):
    """A rank failed; the sentence says which one, and why."""


@dataclass(frozen=True)
class Rank:
    """What a process is told."""

    number: int
    members: tuple[Worker, ...]
    port: int
    device: Kind
    transport: Transport

    @property
    def store(self) -> Any:
        return dist.TCPStore(LOOPBACK, self.port, is_master=False)

    def take(self) -> torch.device:
        """This process's device."""
        torch.set_num_threads(1)
        chosen = Platform(device=self.device, transport=self.transport)
        return chosen.take(self.number, deterministic=False, shared=bool(chosen.check(len(self.members))))


Scenario = Callable[[Rank], dict[str, float]]


def run(scenario: Scenario, members: tuple[Worker, ...], device: str, transport: Transport) -> list[dict[str, float]]:
    """What each rank has measured, in their order; of one that ended by a signal, nothing. Raises RanksError."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for number in range(len(members)):
        ours, theirs = context.Pipe(duplex=False)
        rank = Rank(number, members, store.port, cast(Kind, device), transport)
        process = context.Process(target=_main, args=(scenario, rank, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    found: dict[int, dict[str, float]] = {}
    try:
        while len(found) < len(members):
            for ready in wait([pipe for number, pipe in enumerate(pipes) if number not in found]):
                number = pipes.index(cast(Any, ready))
                try:
                    said = pipes[number].recv()
                except EOFError:
                    processes[number].join(5.0)
                    if processes[number].exitcode != -signal.SIGKILL:
                        raise RanksError(f"rank {number} ended with {processes[number].exitcode}") from None
                    said = {}
                if isinstance(said, str):
                    raise RanksError(f"rank {number}: {said}")
                found[number] = said
    finally:
        for process in processes:
            process.kill()
    return [found[number] for number in range(len(members))]


def _main(scenario: Scenario, rank: Rank, pipe: Connection) -> None:
    try:
        pipe.send(scenario(rank))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}"[:500])
    time.sleep(60.0)  # whoever leaves first must not take its end of a connection from the others
    os._exit(0)


def _group(rank: Rank, name: str, device: torch.device) -> Group:
    if rank.transport == "ordered":
        messages = name != "stage"
        return NcclGroup(rank.store, name, rank.number, rank.members, TIMEOUTS, device, messages=messages)
    group = GlooGroup(rank.store, name, rank.number, rank.members, TIMEOUTS, Devices(LOOPBACK))
    return group if device.type == "cpu" else HostGroup(group)


def pair(rank: Rank) -> dict[str, float]:
    """Two ranks: a sum, then messages to and fro, in a group for each way; compared with what they must be."""
    device = rank.take()
    other = 1 - rank.number
    group, forward, backward = (_group(rank, name, device) for name in ("stage", "forward", "backward"))
    begun = time.monotonic()
    group.sum(torch.zeros(1, device=device, dtype=torch.int64))
    connected = time.monotonic() - begun
    mine = torch.arange(ELEMENTS, device=device, dtype=torch.float32) + rank.number
    sends, sums = [], []
    for _ in range(ROUNDS):
        begun = time.monotonic()
        theirs = torch.empty_like(mine)
        # The first message of each way connects, and waits for the other end.
        if rank.number == 0:
            under_way = [forward.send(other, mine, 0), backward.receive(other, theirs, 0)]
        else:
            under_way = [forward.receive(other, theirs, 0), backward.send(other, mine, 0)]
        for pending in under_way:
            pending.wait()
        _synchronize(device)
        sends.append(time.monotonic() - begun)
        if not torch.equal(theirs, mine - rank.number + other):
            raise RuntimeError("a message arrived changed")
        total = mine.to(torch.int64)
        begun = time.monotonic()
        group.sum(total)
        _synchronize(device)
        sums.append(time.monotonic() - begun)
        if not torch.equal(total, 2 * (mine.to(torch.int64) - rank.number) + 1):
            raise RuntimeError("a sum is not the sum")
    return {"connect": connected, "send": min(sends), "sum": min(sums)}


WAITS_SECONDS = 1.5
"""A call that takes longer waits for the message: those that wait for nothing take milliseconds."""


def waits(rank: Rank) -> dict[str, float]:
    """For each call that a worker may make while it has a receive on its GPU: 1 where it does not return before the
    message has come, on which it would depend there; else 0, and -1 where it fails. Rank 1 sends each when it is told
    to."""
    device, other = rank.take(), 1 - rank.number
    group, third, spare = (_group(rank, name, device) for name in ("stage", "third", "spare"))
    for one in (group, spare):
        one.sum(torch.zeros(1, device=device, dtype=torch.int64))
    message = torch.ones(ELEMENTS, device=device)
    store, found = rank.store, dict[str, float]()
    calls = _calls(device, third, spare)
    first = group.send(other, message, 0) if rank.number else group.receive(other, message, 0)
    first.wait()
    for name, call in calls.items():
        if rank.number:
            if name == "a new communicator":
                threading.Thread(target=third.send, args=(other, torch.ones(1, device=device), 0)).start()
            store.get(f"send {name}")
            group.send(other, message, 0).wait()
            continue
        pending = group.receive(other, message, 0)
        failed = list[Exception]()

        def run(call: Callable[[], object] = call, failed: list[Exception] = failed) -> None:
            try:
                call()
            except Exception as error:  # of what another torch has not, say
                failed.append(error)

        calling = threading.Thread(target=run, daemon=True)
        calling.start()
        calling.join(WAITS_SECONDS)
        found[name] = -1.0 if failed else float(calling.is_alive())
        store.set(f"send {name}", b"now")
        pending.wait()
        calling.join(TIMEOUTS.transfer)
        if calling.is_alive():
            raise RuntimeError(f"{name}: does not return, though the message has come")
        _synchronize(device)
    return found


def _calls(device: torch.device, third: Group, spare: Any) -> dict[str, Callable[[], object]]:
    """By what people call them. third: a group that has not connected. spare: one that nobody needs."""
    cuda: Any = torch.cuda
    there, big = torch.ones(1 << 24, device=device), 1 << 28
    host = torch.ones(1 << 24)

    def launched() -> None:
        there.add_(1)
        event = cuda.Event()
        event.record(cuda.current_stream(device))
        event.synchronize()

    def beside_a_wait() -> None:
        threading.Thread(target=cuda.synchronize, args=(device,), daemon=True).start()
        time.sleep(0.3)
        launched()

    def expandable() -> None:
        cuda.memory._set_allocator_settings("expandable_segments:True")
        torch.ones(big, dtype=torch.uint8, device=device)

    def given_back() -> None:
        cuda.empty_cache()
        cuda.memory._set_allocator_settings("expandable_segments:False")

    return {
        "a kernel's first use": launched,
        "a launch beside a wait for the device": beside_a_wait,
        "memory": lambda: torch.ones(big, dtype=torch.uint8, device=device),
        "pinned memory": lambda: torch.empty(big, dtype=torch.uint8, pin_memory=device.type == "cuda"),
        "a copy from pageable memory": lambda: there.copy_(host),
        "a copy to pageable memory": lambda: host.copy_(there),
        "a library's first use": lambda: torch.fft.fft(there[: 1 << 16]),
        "memory given back": cuda.empty_cache,
        "expandable memory": expandable,
        "expandable memory given back": given_back,
        "a new communicator": lambda: third.receive(1, torch.ones(1, device=device), 0).wait(),
        "an abort": spare._group.abort,
    }


def grid(rank: Rank) -> dict[str, float]:
    """All groups of a generation, as workers make them; a message along each line and a sum in each stage."""
    groups, device, seconds = _form(rank, 1)
    # As in a pipeline: forward, then back, then the sum over the stage.
    me, lines = rank.members[rank.number], groups.lines
    next_one, last_one = Worker(me.pipeline, 1), Worker(me.pipeline, 0)
    value = torch.full((ELEMENTS,), float(me.pipeline), device=device)
    if me.stage == 0:
        lines.forward.send(lines.rank[next_one], value, 0).wait()
        got = lines.backward.receive(lines.rank[next_one], torch.empty_like(value), 0).wait()
    else:
        got = lines.forward.receive(lines.rank[last_one], torch.empty_like(value), 0).wait()
        lines.backward.send(lines.rank[last_one], value, 0).wait()
    if not torch.equal(got, value):
        raise RuntimeError("a message arrived changed")
    total = torch.full((ELEMENTS,), 1 + me.pipeline, dtype=torch.int64, device=device)
    groups.reduce(total)
    if not bool((total == 3).all()):
        raise RuntimeError("a sum is not the sum")
    return {"connect": seconds}


def death(rank: Rank) -> dict[str, float]:
    """Rank 3 is killed while all others wait for somebody; they wake, and form groups without it on the same device."""
    groups, device, _ = _form(rank, 1)
    me, lines = rank.members[rank.number], groups.lines
    if rank.number == 3:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    waiting = torch.empty(ELEMENTS, device=device)
    partner = Worker(me.pipeline, 1 - me.stage)
    line = lines.backward if me.stage == 0 else lines.forward
    pending = line.receive(lines.rank[partner], waiting, 0)
    cancelled: list[float] = []

    def cancel() -> None:
        cancelled.append(time.monotonic())
        groups.cancel()

    threading.Timer(3.0, cancel).start()
    try:
        pending.wait()
        raise RuntimeError("a message that nobody has sent has arrived")
    except TransferError:
        # A death may be seen sooner than it is told.
        woken = time.monotonic() - cancelled[0] if cancelled else 0.0
    begun = time.monotonic()
    halt_all([group for group in (lines.forward, lines.backward, lines.peers) if group is not None])
    halted = time.monotonic() - begun
    if int(torch.ones(8, device=device).sum()) != 8:
        raise RuntimeError("the device does not compute any more")
    survivors = rank.members[:3]
    again, _, seconds = _form(rank, 2, survivors, device)
    if me.stage == 0:
        total = torch.ones(4, dtype=torch.int64, device=device)
        again.reduce(total)
        if not bool((total == 2).all()):
            raise RuntimeError("a sum of the survivors is not the sum")
    return {"woken": woken, "halted": halted, "again": seconds}


def _form(
    rank: Rank, generation: int, living: tuple[Worker, ...] = (), device: torch.device | None = None
) -> tuple[Groups, torch.device, float]:
    """The groups, the device, and the seconds that connecting took."""
    device, me, living = device or rank.take(), rank.members[rank.number], living or rank.members
    begun = time.monotonic()
    groups = Groups(
        *(rank.store, generation, me, living, TIMEOUTS, Devices(LOOPBACK), rank.transport, device),
        # As a plan has them that routes around the dead one.
        [w for w in living if abs(w.stage - me.stage) == 1],
    )
    return groups, device, time.monotonic() - begun


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
