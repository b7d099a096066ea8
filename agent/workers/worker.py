"""The process of one worker, which the launcher starts, and how several ranks make one worker.

Rank 0 passes the launcher's messages on to the other ranks, and tells the launcher what all ranks have said. So
launchers, nodes and consoles know only workers.

The ranks live and die together. When one is gone, its part of every layer is lost and the others have nothing to do: so
they end, and another worker can be started in their place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from openrecycle.agent.checkpoints import WeightsError
from openrecycle.agent.config.options import ALIVE_SECONDS
from openrecycle.agent.messages.channel import FENCED, GAVE_UP, WorkerChannel, follow, receive
from openrecycle.agent.messages.client import Followed, LogTail
from openrecycle.agent.models.layers import StageIOError
from openrecycle.agent.models.parallelized import OtherRankError, Parallelized
from openrecycle.agent.models.state import StateError
from openrecycle.agent.models.torch_settings import TorchSettings
from openrecycle.agent.monitoring.heartbeat import Status, measured_ops
from openrecycle.agent.monitoring.liveness import LoopLag, OpProgress, describe_exception, thread_stacks
from openrecycle.agent.stages.optimizer import NonFiniteError
from openrecycle.agent.transport.communicator import Communicator
from openrecycle.agent.transport.ranks import Ranks, SiblingError
from openrecycle.agent.workers.loop import WorkerLoop
from openrecycle.agent.workers.recovery import NoAgreementError, UnlikeError
from openrecycle.agent.workers.spec import WorkerSpec
from openrecycle.forking import keep_from_children

# -- several ranks, one worker ------------------------------------------------------------------

_ONCE_ALL_HAVE: Mapping[str, tuple[str, ...]] = {
    "ready": (),
    "alive": (),
    "held": ("pause",),
    "adopted": ("generation",),
    "formed": ("generation", "iteration"),
    "resumed": ("generation", "iteration"),
    "committed": ("generation", "iteration"),
    "rearranged": ("generation", "iteration"),
    "parameters": ("generation", "iteration"),
    "left": ("generation",),
    "shared": ("generation",),
    "done": ("generation",),
}
"""The kinds of message that the worker sends once all its ranks have said them. Messages of a kind with equal values in
these fields are the same message."""
_ONCE: Mapping[str, tuple[str, ...]] = {
    "raised": ("generation", "iteration", "op", "micro_batch"),
    "broken": ("generation", "peer"),
    "state_lost": ("generation",),
    "unmoved": ("generation",),
    "changed": ("setting",),
    "dying": (),
    "error": (),
    "fatal": (),
}
"""The kinds of message that the worker sends as soon as one rank has said them, and only once if they have fields here.
"""
_OF_NO_GENERATION = ("ready", "alive", "held", "changed")

_HASH = 64
"""The length of one layer's hash in letters; the hashes of a stage's layers follow each other."""


def _all_hashes(values: Sequence[str]) -> str:
    """Merges the ranks' hashes layer by layer, so that the result does not depend on where the model is cut."""
    if not all(values):
        return ""
    of_layers = (tuple(v[at : at + _HASH] for v in values) for at in range(0, len(values[0]), _HASH))
    return "".join(hashlib.sha256("".join(parts).encode()).hexdigest() for parts in of_layers)


def _same(values: Sequence[bool]) -> bool | None:
    """Returns the ranks' common value; None: some ranks have settled their last step, and others not yet."""
    return values[0] if len(set(values)) == 1 else None


def _furthest(said: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns what one of the ranks is doing: the one that has used the largest share of its time limit. So a rank that
    hangs in an op is seen, even if the others have left the iteration."""
    return max(said, key=lambda current: current["seconds"] / current["limit"] if current["limit"] else 0.0)


_MERGED: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "iteration": max,
    "whole": all,
    "settled": _same,
    "sha256": _all_hashes,
    "stall_ms": max,
    "at": max,
    "current": _furthest,
    "op_limit": max,
    "pids": lambda parts: [pid for part in parts for pid in part],
    "skipped": lambda parts: sorted({number for part in parts for number in part}),
}
"""How the fields are merged that ranks may fill differently. The other fields are those of rank 0."""


class MergedMessages:
    """Makes a worker's messages out of those of its `size` ranks. Pure."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
        self._said = set[tuple[Any, ...]]()

    def take(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """Returns what the worker says now that `rank` has said `message`; None: nothing yet."""
        kind = message["kind"]
        if kind in _ONCE:
            fields = _ONCE[kind]
            key = (kind, *map(message.get, fields))
            if fields and key in self._said:
                return None
            self._said.add(key)
            return message
        if kind not in _ONCE_ALL_HAVE:
            return message if rank == 0 else None
        key = (kind, *map(message.get, _ONCE_ALL_HAVE[kind]))
        said = self._waiting.setdefault(key, {})
        said[rank] = message  # if a rank says it again before all have, the newest one counts
        if len(said) < self._size:
            return None
        del self._waiting[key]
        if kind == "adopted":
            self._forget(message["generation"])
        in_order = [said[r] for r in sorted(said)]
        return in_order[0] | {
            name: merge([m[name] for m in in_order]) for name, merge in _MERGED.items() if name in in_order[0]
        }

    def _forget(self, generation: int) -> None:
        """Drops what only some ranks have said in earlier generations: all ranks have left these by now."""
        for known in (self._waiting, self._said):
            for key in [k for k in known if k[0] not in _OF_NO_GENERATION and k[1:2] and k[1] < generation]:
                known.pop(key) if isinstance(known, dict) else known.discard(key)


class RankRelay:
    """Carries messages between rank 0 and its siblings, with two threads for each. siblings: pipes to ranks 1, 2, ...,
    in order."""

    def __init__(self, siblings: Sequence[Connection]) -> None:
        self._merged, self._lock = MergedMessages(1 + len(siblings)), threading.Lock()
        self._say: Callable[[dict[str, Any]], None]
        self._outboxes = [queue.SimpleQueue[bytes]() for _ in siblings]
        self._siblings = siblings

    def start(self, say: Callable[[dict[str, Any]], None], orphaned: Callable[[], None]) -> None:
        """Starts the threads. Called before any message is taken. say: takes the worker's messages. orphaned: called
        when a sibling is gone."""
        self._say = say
        for rank, (pipe, outbox) in enumerate(zip(self._siblings, self._outboxes, strict=True), start=1):
            follow(outbox.get, pipe.send_bytes, name=f"to-rank-{rank}")
            follow(partial(receive, pipe), partial(self.take, rank), orphaned, name=f"from-rank-{rank}")

    def hand_on(self, message: bytes) -> None:
        """Sends a message to all siblings. Returns at once: the threads of `_outboxes` send it."""
        for outbox in self._outboxes:
            outbox.put(message)

    def take(self, rank: int, message: dict[str, Any]) -> None:
        """Takes a message of one rank, in any thread."""
        with self._lock:  # messages must leave in the order in which they were merged
            merged = self._merged.take(rank, message)
            if merged is not None:
                self._say(merged)


# -- the process of one worker ------------------------------------------------------------------

# The exit code of a worker that failed; agent.messages.channel has the others.
FAILED = 1
SIBLING_SECONDS = 5.0
"""How long to wait until the end of another rank is seen here."""
STUCK_SECONDS = 10.0
"""A worker that has not taken up a generation after so long reports where its threads stand, and again after each
doubling of that time."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""


def main(spec: WorkerSpec, pipe: Connection, siblings: Sequence[Connection] = ()) -> None:
    """Runs a worker's process, or one of its ranks, until the job is over. Exits with 0 then, or with another code.

    pipe: to the launcher; from a rank above 0, to rank 0. siblings: pipes from rank 0 to the other ranks.
    """
    # Ctrl-C reaches the whole terminal group; the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keep_from_children([pipe, *siblings])
    keep_freed_memory()
    # It must be the same in all workers: the number of threads shows in the bits of some kernels.
    torch.set_num_threads(spec.threads)
    options = spec.run.options
    platform, timeouts = options.platform, options.faults.timeouts
    communicator = Communicator(timeouts, address=spec.address, transport=platform.carrier)
    status, log = Status(progress=OpProgress(timeouts)), LogTail()
    relay = RankRelay(siblings) if siblings else None
    console = spec.run.heartbeat_seconds is not None

    def last_words(error: BaseException) -> None:
        """Sends a console the traceback, with what was printed before. In the terminal, one line says what failed."""
        if console:
            log.add("".join(traceback.format_exception(error)))
            _say_for_people(channel, status, log, spec)

    channel = WorkerChannel(
        *(pipe, communicator.cancel, lambda: os._exit(FENCED), lambda iteration: status.timeline.want(iteration)),
        *(relay, last_words),
    )
    if relay is not None:
        relay.start(channel.send, channel.orphaned)
    _guard_output(channel, spec, log)

    def say_alive() -> None:
        try:
            _say_alive(channel, status, log, spec)
        except ValueError as error:  # too long to send: a worker that is silent would seem to hang
            channel.say("error", text=describe_exception(error))
            os._exit(FAILED)

    threading.Thread(target=say_alive, name="alive", daemon=True).start()
    loop: WorkerLoop | None = None
    try:
        deterministic = options.optimization.mode == "deterministic"
        device = platform.take(spec.slot, deterministic=deterministic, shared=spec.run.shared_gpus)
        workload = spec.run.load_workload()
        settings = TorchSettings(device)  # taken after the workload's files, which may set some, have been imported
        if spec.ranks > 1:
            over_nccl = device.type == "cuda" and platform.carrier == "ordered"
            communicator.ranks = ranks = Ranks.begin(
                *(spec.rank, spec.ranks, spec.meeting, timeouts, device), shape=platform.shape, over_nccl=over_nccl
            )
            workload = Parallelized(workload, ranks.mesh, ranks.gather, divided=spec.run.divided)
        loop = WorkerLoop(spec, workload, communicator, channel, status, log, device, settings)
        del workload  # if all begin anew, the loop loads another one, and this one can be freed
        channel.say("ready", host=socket.gethostname(), pids=[os.getpid()])
        loop.run()
    except (NonFiniteError, NoAgreementError, StageIOError, WeightsError, StateError) as error:
        if spec.joins and loop is None:
            # Only this newcomer fails, as when files were changed since the others began: these go on.
            last_words(error)
            channel.say("error", text=describe_exception(error))
            _exit(FAILED)
        # It is not this worker's fault, and every peer comes to the same conclusion: the job ends.
        if console:
            _say_for_people(channel, status, log, spec)
        channel.say("fatal", text=str(error))
        channel.wait_for_generation(WorkerChannel.OVER - 1)
    except UnlikeError as error:
        # Only a newcomer raises this: it ends like one that can't start, and the others go on.
        channel.say("warning", text=f"{spec.worker} can't be in the job: {error}")
        if console:
            _say_for_people(channel, status, log, spec)
        channel.say("error", text=str(error))
        _exit(FAILED)
    except BaseException as error:  # a user's code may also raise SystemExit or KeyboardInterrupt
        if isinstance(error, (SiblingError, OtherRankError)) or communicator.ranks.broke(error):
            # Either another rank is gone, and the news of that ends this process; or it hangs, and is to blame.
            channel.gave_up = True
            time.sleep(SIBLING_SECONDS)
        last_words(error)
        channel.say("error", text=describe_exception(error))
        _exit(GAVE_UP if channel.gave_up else FAILED)
    _exit(0)


def _exit(code: int) -> NoReturn:
    """Ends the process from the training thread, after flushing what was printed. It does not use sys.exit, since
    gloo's threads may still wait in a group that was given up. (Other threads, which end a process that no longer
    counts, do not flush: they must not wait for the reader of its output.)"""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _guard_output(channel: WorkerChannel, spec: WorkerSpec, log: LogTail) -> None:
    """Keeps ops from failing when they print and output is not possible: their micro-batch would be blamed."""

    def lost(error: OSError) -> None:
        channel.say("warning", text=f"{spec.worker}: what it prints is lost: {error.strerror or error}")

    tail = None if spec.run.heartbeat_seconds is None else log
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:  # None: it was closed when Python started, so nothing is printed
            setattr(sys, name, Followed(stream, tail, lost))


def keep_freed_memory() -> None:
    """Has glibc keep freed memory. It would give large tensors pages of their own, and return free memory at its heap's
    end to the system. So what a step needs for a moment would be taken page by page with each step, which was a fifth
    of an iteration. Setting these bounds also stops glibc from changing them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def _say_alive(channel: WorkerChannel, status: Status, log: LogTail, spec: WorkerSpec) -> None:
    """Tells the launcher once a second that the process still runs, and what its training thread is doing. With a
    console it does so at least twice per heartbeat, and adds what the console is told. It also tells where the threads
    stand, if something takes too long or a generation is not taken up."""
    seconds = spec.run.heartbeat_seconds
    console, every = seconds is not None, ALIVE_SECONDS if seconds is None else min(ALIVE_SECONDS, seconds / 2)
    pause, due, turns = threading.Event(), STUCK_SECONDS, LoopLag()
    while not pause.wait(every):
        current = status.progress.beat(turns.late(every))
        current_op = current.model_dump() | ({"where": thread_stacks()} if current.overdue else {})
        channel.say(
            "alive",
            current=current_op,
            op_limit=status.progress.longest_limit,
            **({"beat": status.take()} if console else {}),
        )
        if console:
            _say_for_people(channel, status, log, spec)
        pending = channel.pending
        if pending < STUCK_SECONDS:
            due = STUCK_SECONDS
        elif pending >= due:
            due = 2 * pending
            text = f"a generation waits for {pending:.0f} s to be taken up; {thread_stacks()}"
            log.add(text)
            channel.say("stuck", text=text)


def _say_for_people(channel: WorkerChannel, status: Status, log: LogTail, spec: WorkerSpec) -> None:
    """Sends what a console shows: the ops that it has asked for, and what the process has printed."""
    recorded = status.timeline.take()
    if recorded is not None and (ops := measured_ops(recorded, str(spec.worker), spec.incarnation)) is not None:
        channel.say("measured", ops=ops.model_dump())
    lines, skipped = log.take()
    if lines:
        channel.say("log", lines=[(line.at, line.text) for line in lines], skipped=skipped)
