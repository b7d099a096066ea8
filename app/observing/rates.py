"""A job's throughput of late: one definition for the pages and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrecycle.app.jobs.waiting import NOTHING, Waited, trained
from openrecycle.app.observing.goodput import Figures
from openrecycle.db.store import Record

RECENT = 5


@dataclass(frozen=True)
class IterationView:
    """seconds: wall time of the iteration, without waited, for which the job waited for a person in it. skipped:
    micro-batches, numbered over the pipelines, that are in no sum of it. samples_per_second: global batch / seconds."""

    iteration: int
    loss: float
    seconds: float
    samples_per_second: float
    generation: int
    living: int
    committed_at: float
    waited: float = 0.0
    skipped: tuple[int, ...] = ()


def iteration_view(row: Record, samples: int, waited: Waited = NOTHING) -> IterationView:
    """row: of the database. samples: in one iteration."""
    seconds = trained(row, waited)
    rate = samples / seconds if seconds > 0 else 0.0
    columns = ("iteration", "loss", "generation", "living", "committed_at")
    known = {name: row[name] for name in columns}
    waited_for, skipped = row["seconds"] - seconds, tuple(row["skipped"])
    return IterationView(seconds=seconds, samples_per_second=rate, waited=waited_for, skipped=skipped, **known)


def recent_rate(iterations: Sequence[IterationView]) -> float | None:
    """Samples per second over the newest iterations of the newest generation."""
    if not iterations:
        return None
    newest = [i for i in iterations[-RECENT:] if i.generation == iterations[-1].generation]
    # The first iteration of a generation holds the recovery itself; later ones tell the pace.
    settled = newest[1:] if len(newest) > 1 else newest
    seconds = sum(i.seconds for i in settled)
    return sum(i.samples_per_second * i.seconds for i in settled) / seconds if seconds else None


def share_of(rate: float | None, figures: Figures | None) -> float | None:
    """rate / the fault-free rate; None: one of them is not known."""
    if rate is None or figures is None or not figures.fault_free:
        return None
    return rate / figures.fault_free
