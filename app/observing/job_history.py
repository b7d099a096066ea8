"""A job's past failures and returns, from its record: what a simulation can be run on."""

from __future__ import annotations

from collections.abc import Iterable

from openrecycle.db.store import Record

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
