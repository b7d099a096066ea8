"""A job's past failures and returns, from its record: what a simulation can be run on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from openrecycle.db.store import Record

if TYPE_CHECKING:
    from openrecycle.app.console import Console

Row = tuple[float, str, str]


def changes(generations: Iterable[Record], begin: float = 0.0) -> list[Row]:
    """(seconds since `begin`, worker, `failed` or `joined`) of a job's generations, oldest first.

    A worker that changes its stage is neither: the failure goes on at the place that it gave up, under
    the name that it began with.
    """
    rows: list[Row] = []
    failed: set[str] = set()
    began_as: dict[str, str] = {}  # place that is out -> where that failure began
    for generation in generations:
        at, now = generation["opened_at"] - begin, set(generation["failed"])
        for source, to in generation["moves"]:
            if to in failed and to not in now and source in now and source not in failed:
                failed = failed - {to} | {source}
                began_as[source] = began_as.pop(to, to)
        rows += [(at, worker, "failed") for worker in sorted(now - failed)]
        rows += [(at, began_as.pop(worker, worker), "joined") for worker in sorted(failed - now)]
        failed = now
    return rows


def repair_times(rows: Iterable[Row]) -> list[float]:
    """Seconds from each failure to the return, of those that have come back."""
    times: list[float] = []
    since: dict[str, float] = {}
    for at, worker, what in rows:
        if what == "failed":
            since[worker] = at
        elif worker in since:
            times.append(at - since.pop(worker))
    return times


def history(console: Console, job_id: str, seconds: float | None = None) -> tuple[tuple[Row, ...], float]:
    """((seconds since the first generation, worker, `failed` or `joined`), ...), seconds covered: to now, or the first
    so many.

    A generation tells both: who is out that was in before, and who is in that was out. Raises ConsoleError.
    """
    generations = console.generations(job_id)
    if not generations:
        return (), 0.0
    begin = generations[0]["opened_at"]
    rows = changes(generations, begin)
    job = console.job(job_id)
    iterations = console.iterations(job_id, after=max(-1, job.state.committed - 2), limit=1)
    last = iterations[-1]["committed_at"] if iterations else time.time()
    # Whole ten seconds: a page that is opened again soon asks the same question.
    covered = 10.0 * ((max(last, generations[-1]["opened_at"]) - begin) // 10 + 1)
    if seconds is not None:
        covered = min(covered, seconds)
    return tuple(row for row in rows if row[0] <= covered), covered
