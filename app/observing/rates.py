"""A job's throughput of late: one definition for the pages and the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from app.view import IterationView
from db.store import Record

RECENT = 5


def iteration_view(row: Record, samples: int) -> IterationView:
    """row: of the database. samples: in one iteration."""
    rate = samples / row["seconds"] if row["seconds"] > 0 else 0.0
    columns = ("iteration", "loss", "seconds", "epoch", "living", "committed_at")
    return IterationView(samples_per_second=rate, **{name: row[name] for name in columns})


def recent_rate(iterations: Sequence[IterationView]) -> float | None:
    """Samples per second over the newest iterations of the newest epoch."""
    if not iterations:
        return None
    newest = [i for i in iterations[-RECENT:] if i.epoch == iterations[-1].epoch]
    # The first iteration of an epoch holds the recovery itself; later ones tell the pace.
    settled = newest[1:] if len(newest) > 1 else newest
    seconds = sum(i.seconds for i in settled)
    return sum(i.samples_per_second * i.seconds for i in settled) / seconds if seconds else None
