"""The process of one worker: what the launcher starts."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from openrecycle.agent.checkpoints.weights import WeightsError
from openrecycle.agent.config.timeouts import ALIVE_SECONDS
from openrecycle.agent.messages.channel import FENCED, WorkerChannel
from openrecycle.agent.messages.delivery import Followed, LogTail
from openrecycle.agent.models.parallelized import OtherRankError, Parallelized
from openrecycle.agent.models.stage_io import StageIOError
from openrecycle.agent.models.state import StateError
from openrecycle.agent.monitoring.heartbeat import Status, measured_ops
from openrecycle.agent.monitoring.liveness import LoopLag, OpProgress, describe_exception, thread_stacks
from openrecycle.agent.stages.optimizer import NonFiniteError
from openrecycle.agent.transport.communicator import Communicator
from openrecycle.agent.transport.ranks import Ranks
from openrecycle.agent.workers.loop import WorkerLoop
from openrecycle.agent.workers.rank_relay import RankRelay
from openrecycle.agent.workers.recovery import NoAgreementError, UnlikeError
from openrecycle.agent.workers.spec import WorkerSpec

# An exit code that the launcher tells from those of agent.messages.channel.
FAILED = 1
SIBLING_SECONDS = 5.0
"""For the end of another rank to be seen here."""
STUCK_SECONDS = 10.0
"""A worker that has not taken up a generation after so long says where it stands, and again after each doubling."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def main(spec: WorkerSpec, pipe: Connection, siblings: Sequence[Connection] = ()) -> None:
    """Runs until the job is over, then returns; exits otherwise with one of the codes above. pipe: to the launcher, or
    of a rank above 0 to rank 0. siblings: of rank 0, to the others."""
    # Ctrl-C reaches the whole terminal group; the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keep_freed_memory()
    # The same everywhere: the number of threads shows in the bits of some kernels.
    torch.set_num_threads(spec.threads)
    options = spec.run.options
    platform, timeouts = options.platform, options.faults.timeouts
    communicator = Communicator(timeouts, address=spec.address, transport=platform.carrier)
    status, log = Status(progress=OpProgress(timeouts)), LogTail()
    relay = RankRelay(siblings) if siblings else None
    console = spec.run.heartbeat_seconds is not None

    def last_words(error: BaseException) -> None:
        """A console gets the traceback, with what was written before: whoever reads the terminal is told where."""
        if console:
            log.add("".join(traceback.format_exception(error)))
            _say_for_people(channel, status, log, spec)

    channel = WorkerChannel(
        *(pipe, communicator.cancel, lambda: os._exit(FENCED), lambda iteration: status.timeline.want(iteration)),
        *(relay, last_words),
    )
    if relay is not None:
        relay.start(channel.send)
    _guard_output(channel, spec, log)
    threading.Thread(target=_say_alive, args=(channel, status, log, spec), name="alive", daemon=True).start()
    try:
        deterministic = options.optimization.mode == "deterministic"
        device = platform.take(spec.slot, deterministic=deterministic, shared=spec.run.shared_gpus)
        workload = spec.run.workload.load()
        if spec.ranks > 1:
            over_nccl = device.type == "cuda" and platform.carrier == "ordered"
            communicator.ranks = ranks = Ranks.begin(
                *(spec.rank, spec.ranks, spec.meeting, timeouts, device), over_nccl=over_nccl
            )
            workload = Parallelized(workload, spec.rank, ranks.mesh, ranks.gather, divided=spec.run.divided)
        loop = WorkerLoop(spec, workload, communicator, channel, status, log, device)
        channel.say("ready", host=socket.gethostname(), pids=[os.getpid()])
        loop.run()
    except (NonFiniteError, NoAgreementError, StageIOError, WeightsError, StateError) as error:
        # Not this worker's fault, and every peer comes to the same conclusion: the job ends.
        if console:
            _say_for_people(channel, status, log, spec)
        channel.say("fatal", text=str(error))
        channel.wait_for_generation(WorkerChannel.OVER - 1)
    except UnlikeError as error:
        # Of a newcomer alone: it ends, as one that can't start, and the others go on.
        channel.say("warning", text=f"{spec.worker} can't be in the job: {error}")
        if console:
            _say_for_people(channel, status, log, spec)
        channel.say("error", text=str(error))
        _exit(FAILED)
    except Exception as error:
        if communicator.ranks.broke(error) or isinstance(error, OtherRankError):
            time.sleep(SIBLING_SECONDS)  # another rank is gone: the news of it ends this process, with its own code
        last_words(error)
        channel.say("error", text=describe_exception(error))
        _exit(FAILED)
    _exit(0)


def _exit(code: int) -> NoReturn:
    """Not as sys.exit: gloo's threads may still sit in a group that was given up. So what has been printed, and not
    handed to the system yet, would be lost. Of the thread that trains: others, which end this process because it counts
    no more, may not wait for whoever reads it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _guard_output(channel: WorkerChannel, spec: WorkerSpec, log: LogTail) -> None:
    """An op that prints must not fail where nothing can be printed: its micro-batch would be to blame."""

    def lost(error: OSError) -> None:
        channel.say("warning", text=f"{spec.worker}: what it prints is lost: {error.strerror or error}")

    tail = None if spec.run.heartbeat_seconds is None else log
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:  # it was closed when Python began: nothing is printed
            setattr(sys, name, Followed(stream, tail, lost))


def keep_freed_memory() -> None:
    """glibc gives every tensor of more than 32 MiB its own pages, whichever is freed lowers that bound, and what is
    free at its heap's end goes back to the system: so what a step needs for a moment is taken anew, page by page, with
    each step, which was a fifth of an iteration: so these bounds stay."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def _say_alive(channel: WorkerChannel, status: Status, log: LogTail, spec: WorkerSpec) -> None:
    """Tells the launcher once a second that the process still runs, and what its training thread is at; for a console
    twice as often as that is told, and with what it is told. And where its threads stand, when it is at something for
    too long, or does not take up a generation."""
    seconds = spec.run.heartbeat_seconds
    console, every = seconds is not None, ALIVE_SECONDS if seconds is None else min(ALIVE_SECONDS, seconds / 2)
    pause, due, turns = threading.Event(), STUCK_SECONDS, LoopLag()
    while not pause.wait(every):
        current = status.progress.beat(turns.late(every))
        current_op = asdict(current) | ({"where": thread_stacks()} if current.overdue else {})
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
    """What a console shows: the ops that it has asked for, and what the process has written."""
    recorded = status.timeline.take()
    if recorded is not None and (ops := measured_ops(recorded, str(spec.worker), spec.incarnation)) is not None:
        channel.say("measured", ops=ops.model_dump())
    lines, skipped = log.take()
    if lines:
        channel.say("log", lines=[(line.at, line.text) for line in lines], skipped=skipped)
