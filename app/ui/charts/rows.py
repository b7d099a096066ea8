"""Which workers a schedule chart shows, and where their rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrecycle.planner.job import Worker
from openrecycle.planner.schedule import Schedule

PIPELINE_GAP = 0.55


@dataclass(frozen=True)
class Rows:
    """One row per worker, one unit high, with a gap between pipelines. `at[worker]`: its middle."""

    workers: tuple[Worker, ...]
    at: dict[Worker, float]
    extent: float

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> Rows:
        """Workers in grid order, pipeline by pipeline."""
        ordered = tuple(sorted(workers))
        at: dict[Worker, float] = {}
        y = 0.0
        for i, worker in enumerate(ordered):
            # A single stage shown across pipelines reads as one block, without gaps.
            if i and ordered[i - 1].pipeline != worker.pipeline and _several_stages(ordered):
                y += PIPELINE_GAP
            at[worker] = y + 0.5
            y += 1
        return cls(ordered, at, y)

    def pixels(self) -> int:
        """Height that keeps a row readable, smaller as rows become many."""
        per_row = 32 if len(self.workers) <= 16 else 24 if len(self.workers) <= 48 else 16
        return round(self.extent * per_row)


def pipeline_workers(schedule: Schedule, pipeline: int) -> list[Worker]:
    return [w for w in schedule.problem.job.workers() if w.pipeline == pipeline]


def stage_workers(schedule: Schedule, stage: int) -> list[Worker]:
    return [w for w in schedule.problem.job.workers() if w.stage == stage]


def touched_workers(schedule: Schedule) -> list[Worker]:
    """The workers that are out, and those that run micro-batches of other pipelines."""
    return sorted(schedule.helpers | schedule.problem.failed)


def _several_stages(workers: Sequence[Worker]) -> bool:
    return any(w.stage != workers[0].stage for w in workers)
