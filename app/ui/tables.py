"""Schedules as tables: the same facts as the charts, for reading, sorting and screen readers."""

from __future__ import annotations

from collections.abc import Sequence

from app.ui import text
from app.ui.charts.progress import Mark
from app.ui.charts.worker_grid import LOOKS, QUIET
from app.ui.facts import look
from app.ui.theme import OP_WORDS
from app.view import IterationView, WorkerView
from planner.job import Worker
from planner.schedule import Schedule

Table = dict[str, list[object]]


def workers_table(schedule: Schedule, workers: Sequence[Worker]) -> Table:
    """One row per worker: ops, re-routed micro-batches, busy and idle time, peak activations and bytes."""
    job = schedule.problem.job
    table: Table = {
        name: []
        for name in ("worker", "state", "ops", "re-routed micro-batches", "busy", "bubble %", "peak activations", "end")
    }
    for worker in workers:
        row: list[object]
        if worker not in schedule.ops:
            row = [str(worker), "failed", 0, 0, None, None, None, None]
        else:
            moved = schedule.rerouted_forwards[worker]
            row = [
                str(worker),
                "takes re-routed work" if moved else "runs its own",
                schedule.op_counts[worker],
                moved,
                job.units(schedule.busy(worker)),
                round(100 * schedule.worker_bubble_fraction(worker), 1),
                schedule.peak_activations[worker],
                job.units(schedule.ends[worker]),
            ]
        for column, value in zip(table.values(), row, strict=True):
            column.append(value)
    if schedule.counts_bytes:
        unit, scale = text.size_unit(max(schedule.peak_bytes.values()))
        peaks = [schedule.peak_bytes.get(worker) for worker in workers]
        table[f"peak memory ({unit})"] = [None if peak is None else round(peak / scale, 2) for peak in peaks]
    return table


def operations_table(schedule: Schedule, workers: Sequence[Worker], window: tuple[float, float] | None = None) -> Table:
    """One row per op by start. window: only ops that run between these ticks."""
    job = schedule.problem.job
    low, high = window or (float("-inf"), float("inf"))
    ops = [op for w in workers for op in schedule.ops.get(w, ()) if op.end >= low and op.start <= high]
    ops.sort(key=lambda o: (o.start, o.worker))
    return {
        "start": [job.units(op.start) for op in ops],
        "end": [job.units(op.end) for op in ops],
        "worker": [str(op.worker) for op in ops],
        "op": [OP_WORDS[op.kind] for op in ops],
        "home pipeline": [op.pipeline for op in ops],
        "micro-batch": [None if op.kind == "O" else op.micro_batch for op in ops],
        "stage": [op.stage for op in ops],
        "re-routed": [op.rerouted for op in ops],
    }


def iterations_table(iterations: Sequence[IterationView], marks: Sequence[Mark]) -> Table:
    """One row per iteration, the newest first."""
    happened = {mark.iteration: f"{mark.text}: {mark.detail}" for mark in marks}
    newest = list(reversed(iterations))
    return {
        "iteration": [i.iteration for i in newest],
        "samples/s": [round(i.samples_per_second, 2) for i in newest],
        "took (ms)": [round(1000 * i.seconds, 1) for i in newest],
        "loss": [round(i.loss, 4) for i in newest],
        "living workers": [i.living for i in newest],
        "epoch": [i.epoch for i in newest],
        "what changed": [happened.get(i.iteration, "") for i in newest],
    }


def grid_table(workers: Sequence[WorkerView]) -> Table:
    """One row per worker, those that need a look first."""
    rows = sorted(workers, key=lambda w: (look(w) in QUIET, w.pipeline, w.stage))
    return {
        "worker": [w.name for w in rows],
        "state": [LOOKS[look(w)][0] for w in rows],
        "re-routed micro-batches": [w.takes_rerouted for w in rows],
        "iteration": [w.iteration for w in rows],
        "epoch": [w.epoch for w in rows],
        "heartbeat": [text.age(w.heartbeat_age) for w in rows],
    }
