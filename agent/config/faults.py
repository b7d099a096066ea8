"""Faults on purpose: a worker kills itself just before a given op, comes back after a given iteration, is slow, or
takes as long for its ops as a given accelerator would.

A paced op is stretched to its time, with its computation inside that time (`PacedDevice`).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import SECONDS, Job, Problem, Worker

# -- ops stretched to given times, as an accelerator of that speed would take -------------------

# Seconds. If an op starts within this time after the process woke from the op before, its inputs were there by then.
PROMPT = 0.00025
# Seconds by which a late wake-up is made up for, if an op has received something; see PacedDevice.
GRACE = 0.001


class PacedDevice:
    """The clock of an imagined device that runs queued ops back to back.

    An op whose inputs are there starts when the op before it ends, and not when this process next gets a processor.
    So the delay of a wake-up on a busy machine is not added to every op. An op that had to wait for its inputs starts
    when it has them. No op ends before its own computation.

    It is not known exactly when a received input came: perhaps while this process was late to wake up. So then a
    wake-up is made up for by at most GRACE, and no op is too short by more than that.

    pace: seconds by op kind; a kind that is missing takes as long as it takes. ended: the time at which the last op
    ended on the device.
    """

    def __init__(
        self,
        pace: Mapping[str, float],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.set_pace(pace)
        self._now, self._sleep = now, sleep
        self.ended = 0.0
        self._free: float | None = None
        self._woke = 0.0
        self._received = False

    def set_pace(self, pace: Mapping[str, float]) -> None:
        """Sets the times that hold from the next op on."""
        self._pace = dict(pace)
        if "I" in pace and "W" in pace:
            self._pace["B"] = pace["I"] + pace["W"]

    def paces(self, kind: str) -> bool:
        """Is an op of this kind stretched?"""
        return kind in self._pace

    def waited(self) -> None:
        """The next op had to wait for peers, and starts when its computation does."""
        self._free = None

    def received(self) -> None:
        """The next op has just received something from another worker, and may have waited for it."""
        self._received = True

    def finish(self, kind: str, started: float) -> float:
        """Returns when the op has ended on the device, with the seconds that it took there.

        kind: of the op. started: when its computation began, by the clock `now`.
        """
        pace = self._pace.get(kind)
        if pace is None:
            self._free, self._received = None, False
            self.ended = self._now()
            return self.ended - started
        begun = self._begun(started)
        self._free = max(begun + pace, self._now())
        if (left := self._free - self._now()) > 0:
            self._sleep(left)
        self._woke, self._received = self._now(), False
        self.ended = self._free
        return self._free - begun

    def _begun(self, started: float) -> float:
        if self._free is None:
            return started
        if not self._received:
            return self._free
        return max(self._free, started - GRACE) if started - self._woke < PROMPT else started


def profile_pace(job: Job, me: Worker, living: Iterable[Worker]) -> dict[str, float]:
    """Returns the seconds by op kind that the job's profile gives for `me`, at its own speed, while these workers live.

    O includes the reduction. It is left out if the profile has neither. Raises InputError if the profile's time unit is
    no time.
    """
    second = SECONDS.get(job.time_unit)
    if second is None:
        raise InputError(
            "planning.pace", "profile", f"a profile in {', '.join(SECONDS)}; its time unit is {job.time_unit}"
        )
    unit = second / job.ticks_per_unit
    ticks = Problem(job, frozenset(job.workers()) - frozenset(living)).worker_ticks(me)
    times = {"F": ticks.forward, "I": ticks.input_backward, "W": ticks.weight_backward, "O": ticks.optimizer}
    return {kind: n * unit for kind, n in times.items() if kind != "O" or n}


# -- deliberate faults --------------------------------------------------------------------------

_KILL = re.compile(
    r"(?P<worker>W[0-9]{1,6}_[0-9]{1,6})(?:\.(?P<rank>[0-9]{1,3}))?@(?P<iteration>[0-9]{1,15})"
    r":(?P<op>R|O|V|[FIW](?:[0-9]{1,9}\.)?[0-9]{1,9})"
)
_REJOIN = re.compile(r"(?P<worker>W[0-9]{1,6}_[0-9]{1,6})@(?P<iteration>[0-9]{1,15})")
_SLOW = re.compile(
    r"(?P<worker>W[0-9]{1,6}_[0-9]{1,6})@(?P<iteration>[0-9]{1,15}):(?P<factor>[0-9]{1,3}(\.[0-9]{1,3})?)"
)
MOST_SLOW = 100.0


@dataclass(frozen=True)
class Kill:
    """A worker kills itself before an op. kind: of the op: F, I, W, R (the reduction), O (the step) or V (after the
    step, which may not be validated yet). pipeline, micro_batch: -1 for R, O and V. rank: which rank of the worker."""

    worker: Worker
    iteration: int
    kind: str
    pipeline: int = -1
    micro_batch: int = -1
    rank: int = 0

    @classmethod
    def parse(cls, text: str, job: Job, *, ranks: int = 1) -> Kill:
        """Reads `W1_2@10:F3`. There `F3` is micro-batch 3 of the worker's own pipeline; `F1.3` is that of pipeline 1.
        `W1_2.1@10:F3` names rank 1 of the worker's `ranks`.

        Raises InputError that names what is wrong.
        """
        field = "faults.kill"
        match = _KILL.fullmatch(text.strip())
        if not match:
            of_rank = ", or W1_2.1@10:F3 of its rank 1" if ranks > 1 else ""
            expected = f"WORKER@ITERATION:OP such as W1_2@10:F3{of_rank}, with OP F3, I3, W3, F1.3, R, O or V"
            raise InputError(field, text, expected)
        worker = job.check_worker(Worker.parse(match["worker"], field=field), field=field)
        op, iteration, rank = match["op"], int(match["iteration"]), int(match["rank"] or 0)
        if ranks == 1 and match["rank"] is not None:
            raise InputError(field, text, f"{worker} without a rank: a worker is one process in this job")
        if rank >= ranks:
            raise InputError(field, text, f"a rank from 0 to {ranks - 1}, as many as a worker has")
        if op in ("R", "O", "V"):
            return cls(worker, iteration, op, rank=rank)
        head, _, tail = op[1:].rpartition(".")
        pipeline, micro_batch = int(head) if head else worker.pipeline, int(tail)
        if pipeline >= job.pipelines:
            raise InputError(field, text, f"a pipeline from 0 to {job.pipelines - 1} in {op}")
        if micro_batch >= job.micro_batches:
            raise InputError(field, text, f"a micro-batch from 0 to {job.micro_batches - 1} in {op}")
        return cls(worker, iteration, op[0], pipeline, micro_batch, rank)

    def __str__(self) -> str:
        """Returns the form that `parse` reads."""
        rank = f".{self.rank}" if self.rank else ""
        pipeline = "" if self.pipeline in (-1, self.worker.pipeline) else f"{self.pipeline}."
        micro_batch = "" if self.micro_batch < 0 else self.micro_batch
        return f"{self.worker}{rank}@{self.iteration}:{self.kind}{pipeline}{micro_batch}"


@dataclass(frozen=True)
class Rejoin:
    """A new process is started for `worker` once `iteration` is committed."""

    worker: Worker
    iteration: int

    @classmethod
    def parse(cls, text: str, job: Job) -> Rejoin:
        field = "faults.rejoin"
        match = _REJOIN.fullmatch(text.strip())
        if not match:
            raise InputError(field, text, "WORKER@ITERATION such as W1_2@15")
        worker = job.check_worker(Worker.parse(match["worker"], field=field), field=field)
        return cls(worker, int(match["iteration"]))

    def __str__(self) -> str:
        return f"{self.worker}@{self.iteration}"


@dataclass(frozen=True)
class Slow:
    """From `iteration` on, the paced ops of `worker` take `factor` times their pace; 1 is the pace itself."""

    worker: Worker
    iteration: int
    factor: float

    @classmethod
    def parse(cls, text: str, job: Job) -> Slow:
        field = "faults.slow"
        match = _SLOW.fullmatch(text.strip())
        factor = float(match["factor"]) if match else 0.0
        if not match or not 1 / MOST_SLOW <= factor <= MOST_SLOW:
            raise InputError(field, text, "WORKER@ITERATION:FACTOR such as W1_2@10:2, with a factor from 0.01 to 100")
        worker = job.check_worker(Worker.parse(match["worker"], field=field), field=field)
        return cls(worker, int(match["iteration"]), factor)


def not_done(wish: Kill | Rejoin, first: int, iterations: int, *, known: bool = True) -> str:
    """Returns, in words, why a fault was not carried out, as far as is known. The job ran iterations from `first` up to
    `iterations`. known: is it known how the worker ended, if it did?"""
    if first >= iterations:
        return f"{wish} did not happen: no iteration was left to run"
    if not first <= wish.iteration < iterations:
        return f"{wish} did not happen: the job ran iterations {first} to {iterations - 1}"
    if isinstance(wish, Rejoin):
        return f"{wish} did not happen: {wish.worker} was not gone after that iteration"
    if not known:
        return f"{wish}: whether it happened is not known, since {wish.worker} ended without saying how"
    op = str(wish).partition(":")[2]
    return f"{wish} did not happen: {wish.worker} was gone by then, or ran no {op} in that iteration"


def slowness(worker: Worker, iteration: int, wishes: Iterable[Slow]) -> float:
    """Returns the factor on a worker's op times in an iteration: that of the latest Slow which has begun."""
    due = [slow for slow in wishes if slow.worker == worker and slow.iteration <= iteration]
    return max(due, key=lambda slow: slow.iteration).factor if due else 1.0


class FaultInjector:
    """Holds the kills of one worker. The executor calls `before` ahead of every op."""

    def __init__(self, worker: Worker, kills: list[Kill], last_words: Callable[[Kill], None], rank: int = 0) -> None:
        """last_words: called just before the SIGKILL, so that it can be reported which kill happened, and when."""
        self._points = {
            (k.iteration, k.kind, k.pipeline, k.micro_batch): k for k in kills if (k.worker, k.rank) == (worker, rank)
        }
        self._last_words = last_words

    def before(self, iteration: int, kind: str, pipeline: int = -1, micro_batch: int = -1) -> None:
        if kill := self._points.get((iteration, kind, pipeline, micro_batch)):
            self._last_words(kill)
            os.kill(os.getpid(), signal.SIGKILL)
