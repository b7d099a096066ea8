"""Tables with the same facts as the charts, for reading, sorting and screen readers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import streamlit as st

from openrecycle.app.charts import text
from openrecycle.app.charts.progress import LOOKS, QUIET, Mark
from openrecycle.app.console.view import WorkerView
from openrecycle.app.jobs.throughput import IterationView
from openrecycle.planner.export.compare import by_stage, compare
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import micro_batch_names
from openrecycle.planner.plans.drawing import OP_WORDS, OUT
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule

Table = dict[str, list[object]]
# The most decimals of a number.
DECIMALS = 3


def show(rows: Mapping[str, Sequence[object]], key: str, alt: str, **look: Any) -> None:
    """Draws a table that can be sorted and scrolled. rows: the values by column. look: passed on to Streamlit."""
    st.dataframe(rows, hide_index=True, key=key, alt=alt, column_config=columns_of(rows), **look)


def columns_of(rows: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    """Returns the columns' settings: a column `worker` stays visible when the table is scrolled, and all numbers of a
    column have the same number of decimals."""
    columns: dict[str, Any] = {"worker": {"pinned": True}} if "worker" in rows else {}
    for name, values in rows.items():
        digits = max((_decimals(value) for value in values if isinstance(value, float)), default=0)
        if digits:
            columns[name] = st.column_config.NumberColumn(format=f"%.{digits}f")
    return columns


def _decimals(value: float) -> int:
    return len(f"{value:.{DECIMALS}f}".rstrip("0").partition(".")[2])


def table_html(
    heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", *, foot: str = "", look: str = ""
) -> str:
    """Returns a small table as HTML, all of which is visible. heads: the first is that of the rows' names. rows: cells
    of HTML."""
    head = "".join(f'<th scope="col">{words}</th>' for words in heads)
    body = "".join(
        f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for name, *cells in rows
    )
    return (
        f'<table class="or-table{look and f" {look}"}">{caption and f"<caption>{caption}</caption>"}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        + (f'<tfoot><tr><td colspan="{len(heads)}">{foot}</td></tr></tfoot>' if foot else "")
        + "</table>"
    )


def differences(plans: Sequence[Plan], only: Container[str] | None = None) -> list[tuple[str, list[str]]]:
    """Returns rows that compare plans: (label, a cell per plan). Times are in each plan's unit, with five digits and
    their difference from the first plan's. only: the keys of the wanted rows."""
    rows = []
    for row in compare(plans, only):
        cells = []
        for i, value in enumerate(row.values):
            if value is None:
                cells.append("–")
            elif isinstance(value, str):
                cells.append(value.replace(" x ", " × "))
            elif row.kind == "fraction":
                cells.append(text.percent(value, sign=row.key.startswith("slowdown")))
            elif row.kind == "bytes":
                cells.append(text.size(int(value)))
            elif row.kind == "time":
                change = row.changes[i] if i else None
                against = "" if change is None else f" ({text.percent(change, sign=True)})"
                cells.append(text.planned(value, plans[i].job.time_unit, 5) + against)
            else:
                cells.append(f"{value:,}")
        rows.append((row.label, cells))
    return rows


def beside_html(labels: Sequence[str], figures: Sequence[tuple[str, list[str]]], caption: str) -> str:
    """Returns a table as HTML, with one column per label and one row per figure. On narrow screens it scrolls, and the
    names of the rows stay."""
    rows = ([escape(name), *map(_whole, cells)] for name, cells in figures)
    table = table_html(["figure", *map(escape, labels)], rows, look="or-beside")
    return f'<div class="or-scroll" tabindex="0" role="region" aria-label="{escape(caption)}">{table}</div>'


def rows_html(table: Mapping[str, Sequence[object]], caption: str) -> str:
    """Returns a table as HTML, with one column per entry of `table`, of which the first names the rows. On narrow
    screens each row is a block, so that nothing is beyond the edge. It has explicit roles, since browsers drop a
    table's roles when it is laid out as blocks."""
    names = list(table)
    heads = "".join(
        f'<th role="columnheader" scope="col"{_number(table[name]) if i else ""}>{escape(name)}</th>'
        for i, name in enumerate(names)  # the column of row names is not aligned like numbers
    )
    rows = "".join(
        '<tr role="row">'
        + "".join(
            f'<td role="cell" data-of="{escape(name)}"{_number(table[name])}>{_whole(_figure(value))}</td>'
            if i
            else f'<th role="rowheader" scope="row"><span class="or-of-row">{escape(name)} </span>'
            f"{_whole(_figure(value))}</th>"
            for i, (name, value) in enumerate(zip(names, row, strict=True))
        )
        + "</tr>"
        for row in zip(*table.values(), strict=True)
    )
    return (
        f'<div class="or-figures" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="or-table" role="table"><thead role="rowgroup"><tr role="row">{heads}</tr></thead>'
        f'<tbody role="rowgroup">{rows}</tbody></table></div>'
    )


def _number(values: Sequence[object]) -> str:
    """Returns the class attribute for a column of numbers, which aligns them; "" for others."""
    return ' class="or-number"' if any(isinstance(v, int | float) for v in values) else ""


def _figure(value: object) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:,.10g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _whole(words: str) -> str:
    """Escapes words, and keeps a percent sign on the line of its number."""
    return escape(words).replace(" %", "&nbsp;%")


def workers_table(schedule: Schedule, workers: Sequence[Worker], out: Mapping[str, str] | None = None) -> Table:
    """Returns one row per worker: re-routed micro-batches, idle and busy time, peak activations and bytes, ops.

    The most used columns come first, so that little has to be scrolled on a narrow screen. out: by worker, why the job
    goes without it (default: not known).
    """
    units, moved = schedule.problem.job.units, schedule.rerouted_forwards

    def each(read: Callable[[Worker], object], gone: object = None) -> list[object]:
        return [read(worker) if worker in schedule.ops else gone for worker in workers]

    table: Table = {
        "worker": list(map(str, workers)),
        "state": [
            ("takes re-routed work" if moved[w] else "runs its own")
            if w in schedule.ops
            else (out or {}).get(str(w), OUT)
            for w in workers
        ],
        "re-routed": each(moved.__getitem__, 0),
        "bubble %": each(lambda w: round(100 * schedule.worker_bubble_fraction(w), 1)),
        "peak activations": each(schedule.peak_activations.__getitem__),
        "busy": each(lambda w: units(schedule.busy(w))),
        "end": each(lambda w: units(schedule.ends[w])),
        "ops": each(schedule.op_counts.__getitem__, 0),
    }
    if schedule.counts_bytes:
        unit, scale = text.size_unit(max(schedule.peak_bytes.values()))
        peaks = [schedule.peak_bytes.get(worker) for worker in workers]
        table[f"peak memory ({unit})"] = [None if peak is None else round(peak / scale, 2) for peak in peaks]
    return table


def stage_table(labels: Sequence[str], schedules: Sequence[Schedule]) -> Table:
    """Returns one row per stage and plan; times are in each plan's own unit."""
    found = [
        (label, schedule.problem.job.units, figures)
        for label, schedule in zip(labels, schedules, strict=True)
        for figures in by_stage(schedule)
    ]
    found.sort(key=lambda row: row[2].stage)
    return {
        "stage": [f.stage for _, _, f in found],
        "plan": [label for label, _, _ in found],
        "living workers": [f.living for _, _, f in found],
        "busiest works": [units(f.busy) for _, units, f in found],
        "bubbles %": [round(100 * f.bubble_fraction, 1) for _, _, f in found],
        "from": [units(f.start) for _, units, f in found],
        "to": [units(f.end) for _, units, f in found],
        "peak activations": [f.peak for _, _, f in found],
        "limit": [f.limit for _, _, f in found],
        "re-routed micro-batches": [f.rerouted for _, _, f in found],
    }


def operations_table(schedule: Schedule, workers: Sequence[Worker], window: tuple[float, float] | None = None) -> Table:
    """Returns one row per op, by start. window: only ops that run between these ticks."""
    job = schedule.problem.job
    low, high = window or (float("-inf"), float("inf"))
    ops = [op for w in workers for op in schedule.ops.get(w, ()) if op.end >= low and op.start <= high]
    ops.sort(key=lambda o: (o.start, o.worker))
    return {
        "worker": [str(op.worker) for op in ops],
        "start": [job.units(op.start) for op in ops],
        "end": [job.units(op.end) for op in ops],
        "op": [OP_WORDS[op.kind] for op in ops],
        "micro-batch": [None if op.kind == "O" else op.micro_batch for op in ops],
        "home pipeline": [op.pipeline for op in ops],
        "stage": [op.stage for op in ops],
        "re-routed": [op.rerouted for op in ops],
    }


def iterations_table(iterations: Sequence[IterationView], marks: Sequence[Mark], micro_batches: int) -> Table:
    """Returns one row per iteration, the newest first. micro_batches: of a pipeline."""
    happened = {mark.iteration: f"{mark.text}: {mark.detail}" for mark in marks}
    newest = list(reversed(iterations))
    return {
        "iteration": [i.iteration for i in newest],
        "samples/s": [round(i.samples_per_second, 2) for i in newest],
        "took (ms)": [round(1000 * i.seconds, 1) for i in newest],
        "loss": [None if i.loss is None else round(i.loss, 4) for i in newest],
        "living workers": [i.living for i in newest],
        "generation": [i.generation for i in newest],
        "what changed": [
            "; ".join(
                filter(
                    None,
                    (
                        happened.get(i.iteration, ""),
                        f"{micro_batch_names(i.skipped, micro_batches)} left out" if i.skipped else "",
                    ),
                )
            )
            for i in newest
        ],
    }


def grid_table(workers: Sequence[WorkerView]) -> Table:
    """Returns one row per worker, those that need attention first."""
    rows = sorted(workers, key=lambda w: (w.state in QUIET, w.pipeline, w.stage))
    return {
        "worker": [w.name for w in rows],
        "state": [LOOKS[w.state][0] for w in rows],
        "re-routed micro-batches": [w.takes_rerouted for w in rows],
        "iteration": [w.iteration for w in rows],
        "generation": [w.generation for w in rows],
        "heartbeat": [text.age(w.heartbeat_age) for w in rows],
    }
