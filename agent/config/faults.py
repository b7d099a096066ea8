"""Deliberate faults: a worker that SIGKILLs itself just before a given op of a given iteration, comes back
after another, or becomes slow."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker

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
    """kind: F, I, W, R (the reduction), O (the step) or V (after the step, which may not be validated
    yet). pipeline, micro_batch: -1 for R, O and V. rank: of the worker's."""

    worker: Worker
    iteration: int
    kind: str
    pipeline: int = -1
    micro_batch: int = -1
    rank: int = 0

    @classmethod
    def parse(cls, text: str, job: Job, *, field: str = "--kill", ranks: int = 1) -> Kill:
        """`W1_2@10:F3`; `F3` is the worker's own pipeline's micro-batch 3, `F1.3` that of pipeline 1.
        `W1_2.1@10:F3`: its rank 1, of `ranks`.

        Raises InputError naming what is wrong.
        """
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


@dataclass(frozen=True)
class Rejoin:
    """Start a new process for `worker` once `iteration` is committed."""

    worker: Worker
    iteration: int

    @classmethod
    def parse(cls, text: str, job: Job, *, field: str = "--rejoin") -> Rejoin:
        match = _REJOIN.fullmatch(text.strip())
        if not match:
            raise InputError(field, text, "WORKER@ITERATION such as W1_2@15")
        worker = job.check_worker(Worker.parse(match["worker"], field=field), field=field)
        return cls(worker, int(match["iteration"]))


@dataclass(frozen=True)
class Slow:
    """From `iteration` on the paced ops of `worker` take `factor` times as long; 1: as long as before."""

    worker: Worker
    iteration: int
    factor: float

    @classmethod
    def parse(cls, text: str, job: Job, *, field: str = "--slow") -> Slow:
        match = _SLOW.fullmatch(text.strip())
        factor = float(match["factor"]) if match else 0.0
        if not match or not 1 / MOST_SLOW <= factor <= MOST_SLOW:
            raise InputError(field, text, "WORKER@ITERATION:FACTOR such as W1_2@10:2, with a factor from 0.01 to 100")
        worker = job.check_worker(Worker.parse(match["worker"], field=field), field=field)
        return cls(worker, int(match["iteration"]), factor)


def slowness(worker: Worker, iteration: int, wishes: Iterable[Slow]) -> float:
    """How many times longer its ops take in that iteration: by the newest wish that has come into force."""
    due = [slow for slow in wishes if slow.worker == worker and slow.iteration <= iteration]
    return max(due, key=lambda slow: slow.iteration).factor if due else 1.0


class FaultInjector:
    """Holds one worker's kills; `before` is called by the executor ahead of every op."""

    def __init__(self, worker: Worker, kills: list[Kill], last_words: Callable[[], None], rank: int = 0) -> None:
        """last_words: run just before the SIGKILL, to say when it happened."""
        self._points = {
            (k.iteration, k.kind, k.pipeline, k.micro_batch) for k in kills if (k.worker, k.rank) == (worker, rank)
        }
        self._last_words = last_words

    def before(self, iteration: int, kind: str, pipeline: int = -1, micro_batch: int = -1) -> None:
        if (iteration, kind, pipeline, micro_batch) in self._points:
            self._last_words()
            os.kill(os.getpid(), signal.SIGKILL)
