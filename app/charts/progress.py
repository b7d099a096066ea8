"""Charts of a running job, as Vega-Lite. Curves: throughput and loss over iterations, with failures and recoveries
marked; and one worker's op times, beside the plan's, and memory over time, with gaps where it was silent.

Grids of workers that are too large for one button each are heat-maps of pipelines and stages: on Live with a mark on
each worker that does not simply run, on the Planner page with a click that makes a worker fail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from openrecycle.app.charts import text
from openrecycle.app.charts.theme import Palette
from openrecycle.app.charts.vega import ZOOM, Columns, LiveChart, y_axis
from openrecycle.app.console.view import GenerationView, JobView, RecoveryView, WorkerView
from openrecycle.app.jobs.states import HOLDING, OUT, RoleState
from openrecycle.app.jobs.throughput import IterationView
from openrecycle.app.observing.recorder import Series, Values
from openrecycle.app.plans.whatif import WhatIf
from openrecycle.planner.jobs.words import milliseconds
from openrecycle.planner.plans.drawing import OP_WORDS

# -- grids of workers too large for a button each -----------------------------------------------

_CROSS = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
_RING = "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0M.55,0A.55,.55,0,1,0,-.55,0A.55,.55,0,1,0,.55,0Z"
_BARS = "M-.8,-.9L-.2,-.9L-.2,.9L-.8,.9ZM.2,-.9L.8,-.9L.8,.9L.2,.9Z"
_FRAME = "M-1,-1L1,-1L1,1L-1,1ZM-.55,-.55L-.55,.55L.55,.55L.55,-.55Z"
_CHECK = "M-1,.1L-.65,-.25L-.25,.15L.65,-.8L1,-.45L-.25,.85Z"

# In the order of the legend. Values: words, Vega shape, attribute of Palette.
LOOKS: dict[RoleState, tuple[str, str, str]] = {
    RoleState.RUNNING: ("Running", "square", "healthy"),
    RoleState.REROUTED: ("Takes re-routed work", "square", "rerouted"),
    RoleState.SLOW: ("Slow beside its peers", "triangle-up", "slow"),
    RoleState.WAITING: ("Waiting (nothing trains)", _BARS, "suspect"),
    RoleState.PAUSED: ("Paused", _BARS, "muted"),
    RoleState.SUSPECT: ("Suspect (heartbeat overdue)", "diamond", "suspect"),
    RoleState.FAILED: ("Failed", _CROSS, "failed"),
    RoleState.JOINING: ("Joining", "circle", "joining"),
    RoleState.MOVED: ("Empty: its process moved", "triangle-right", "muted"),
    RoleState.LEAVING: ("Leaving, as asked", "triangle-down", "slow"),
    RoleState.DRAINED: ("Drained", "triangle-down", "muted"),
    RoleState.EMPTY: ("Empty", _RING, "muted"),
    RoleState.FINISHED: ("Finished", _CHECK, "good"),
    RoleState.ENDED: ("Ended with the job", _FRAME, "muted"),
}
QUIET = (RoleState.RUNNING, RoleState.REROUTED)
# Seconds: a heartbeat that is no older is in time, and its exact age is not shown.
PUNCTUAL = 2
# The name of the column with the number of a worker's spare ranks.
SPARE = "spare ranks"
# The name of the chart's selection, which holds the worker that was clicked.
PICKED = "picked"


def worker_grid(view: JobView, colours: Palette) -> LiveChart:
    """Draws the workers of a job, by pipeline (x) and stage (y). Running workers are plain cells; every other state has
    a mark."""
    spec = view.spec
    looks = [state.value for state in LOOKS]
    fills = [getattr(colours, LOOKS[state][2]) if state in QUIET else colours.track for state in LOOKS]
    strokes = [getattr(colours, LOOKS[state][2]) for state in LOOKS]
    fields = ["worker", "look", "heartbeat", "iterations behind", "generation", "re-routed micro-batches"]
    if spec.ranks_per_worker > 1:
        fields.append(SPARE)
    tooltip = [{"field": field, "title": "state" if field == "look" else field} for field in fields]
    marks = {
        "shape": _scale(looks, [shape for _, shape, _ in LOOKS.values()]),
        "color": _scale(looks, strokes),
        "size": {"value": _mark_size(spec.pipelines, spec.stages)},
    }
    loud = {"not": {"field": "look", "oneOf": [state.value for state in QUIET]}}
    cells = {"color": _scale(looks, fills)}
    return LiveChart(_grid_spec(spec.stages, tooltip, cells, loud, marks, toggle=False), _rows(view), colours)


def _grid_spec(
    stages: int, tooltip: list[Any], cells: dict[str, Any], marked: object, marks: dict[str, Any], *, toggle: object
) -> dict[str, Any]:
    """Makes the spec of a grid. cells, marks: their encodings. marked: which cells have a mark. toggle: whether a click
    adds to the selection; else it replaces it."""
    axis = {"grid": False, "domain": False, "ticks": False, "labelAngle": 0, "labelPadding": 4}
    axis |= {"labelOverlap": True, "labelSeparation": 5}
    place = {"type": "ordinal", "axis": axis, "scale": {"paddingInner": 0.12}}
    return {
        "height": max(150, min(520, 13 * stages)),
        "encoding": {"x": {"field": "pipeline", **place}, "y": {"field": "stage", **place}, "tooltip": tooltip},
        "layer": [
            {
                "params": [{"name": PICKED, "select": {"type": "point", "fields": ["worker"], "toggle": toggle}}],
                "mark": {"type": "rect", "cursor": "pointer"},
                "encoding": cells,
            },
            {
                "transform": [{"filter": marked}],
                "mark": {"type": "point", "filled": True, "opacity": 1, "cursor": "pointer", "strokeWidth": 0},
                "encoding": marks,
            },
        ],
        "resolve": {"scale": {"color": "independent"}},
    }


def worker_sentence(worker: WorkerView) -> str:
    """Describes one worker's state, heartbeat and iteration, for hover."""
    words = LOOKS[worker.state][0].lower()
    extra = f" ({worker.takes_rerouted} micro-batches)" if worker.state is RoleState.REROUTED else ""
    if worker.state is RoleState.MOVED:
        extra = f" to {worker.moved_to}"
    if worker.state is RoleState.SLOW:
        extra = f" ({worker.slow:.1f} times their op times)"
    process = f"process {worker.pid} on {worker.host}<br>" if worker.pid and worker.state not in OUT else ""
    if worker.spare:
        process = f"{text.count(worker.spare, 'spare rank')} on {worker.host}<br>"
    return (
        f"<b>{worker.name}</b> · {words}{extra}<br>{process}"
        f"iteration {worker.iteration} · generation {worker.generation}<br>"
        f"heartbeat {text.age(worker.heartbeat_age)}"
    )


def _rows(view: JobView) -> Columns:
    """Returns the grid's rows, in narrow types. While nothing changes they are equal at each refresh, and nothing is
    sent.
    """
    workers = view.workers
    newest = max((w.iteration for w in workers), default=0)
    return {
        "worker": [w.name for w in workers],
        "pipeline": np.array([w.pipeline for w in workers], dtype=np.int16),
        "stage": np.array([w.stage for w in workers], dtype=np.int16),
        "look": [w.state.value for w in workers],
        "heartbeat": [_heard(w.heartbeat_age) for w in workers],
        "iterations behind": np.array([_behind(w, newest) for w in workers], dtype=np.float32),
        "generation": np.array([w.generation for w in workers], dtype=np.int32),
        "re-routed micro-batches": np.array([w.takes_rerouted for w in workers], dtype=np.int16),
        **({SPARE: np.array([w.spare for w in workers], dtype=np.int16)} if view.spec.ranks_per_worker > 1 else {}),
    }


def _heard(age: float | None) -> str:
    if age is None or age >= 60:
        return text.age(age)
    return f"{age:.0f} s ago" if age >= PUNCTUAL else f"under {PUNCTUAL} s ago"


def _behind(worker: WorkerView, newest: int) -> float:
    """Returns how many iterations a worker is behind; NaN: it trains none. One counts as 0, since workers report at
    different moments. newest: the newest iteration of any worker."""
    if worker.state not in HOLDING:
        return math.nan
    behind = newest - worker.iteration
    return behind if behind > 1 else 0


def _scale(looks: list[str], values: list[str]) -> dict[str, Any]:
    return {"field": "look", "type": "nominal", "legend": None, "scale": {"domain": looks, "range": values}}


def _mark_size(pipelines: int, stages: int) -> float:
    """Returns the area of a mark in square pixels, so that it stands out from its cell without hiding its
    neighbours."""
    return max(60.0, min(180.0, 12_000 / max(pipelines, 2 * stages)))


# The words of the Planner page's chart, and the state with the same look on Live.
_LOOKS = {"alive": RoleState.RUNNING, "takes re-routed work": RoleState.REROUTED, "dead": RoleState.FAILED}


def dead_grid(question: WhatIf, takes: Mapping[str, int], colours: Palette) -> LiveChart:
    """Draws the Planner page's grid, by pipeline (x) and stage (y). takes: re-routed micro-batches by worker. A click
    toggles a worker."""
    pipelines, stages = question.pipelines, question.stages
    dead = frozenset(question.failed)
    names = [f"W{p}_{s}" for p in range(pipelines) for s in range(stages)]
    looks = ["dead" if n in dead else "takes re-routed work" if takes.get(n) else "alive" for n in names]
    marks = {
        "shape": _scale(["dead"], [LOOKS[RoleState.FAILED][1]]),
        "color": {"value": colours.text},
        "size": {"value": max(16.0, min(120.0, 6_000 / max(pipelines, 2 * stages)))},
    }
    fills = [getattr(colours, LOOKS[look][2]) for look in _LOOKS.values()]
    cells = {"color": _scale(list(_LOOKS), fills), "opacity": {"value": 1}}
    tooltip = [{"field": f} for f in ("worker", "look", "re-routed micro-batches")]
    return LiveChart(
        _grid_spec(stages, tooltip, cells, "datum.look === 'dead'", marks, toggle="true"),
        {
            "worker": names,
            "pipeline": np.repeat(np.arange(pipelines, dtype=np.int32), stages),
            "stage": np.tile(np.arange(stages, dtype=np.int32), pipelines),
            "look": looks,
            "re-routed micro-batches": np.array([takes.get(n, 0) for n in names], dtype=np.int32),
        },
        colours,
    )


# -- curves of a job that runs ------------------------------------------------------------------

PANEL_HEIGHT = 112
# With more iterations than this, a line without dots is clearer.
MOST_DOTS = 120
_LONGEST = 160
# Beyond this share of the axis a mark's words are on its left.
LATE = 0.85
# A mark's words take at most this share of the axis, on a narrow screen. If other words are there, they go one line up.
# If all lines are taken, they are only in the tooltip, and counted by the words before them ("+1").
WORDS = 0.22
LINES, LINE_HEIGHT = 4, 14
FROM_ZERO = {"zero": True, "nice": True}
# Room above the highest value, for words.
HEADROOM = 1.15


@dataclass(frozen=True)
class Mark:
    """A change of membership, at the first iteration after it. lost: it is a failure; else workers have joined, left,
    or formed anew."""

    iteration: int
    text: str
    lost: bool
    detail: str


def generation_marks(
    iterations: tuple[IterationView, ...],
    recoveries: tuple[RecoveryView, ...],
    generations: tuple[GenerationView, ...],
) -> list[Mark]:
    """Makes one mark for each iteration whose generation is newer than that of the one before."""
    healed, opened = {r.generation: r for r in recoveries}, {g.generation: g for g in generations}
    marks = []
    for before, after in pairwise(iterations):
        if after.generation == before.generation:
            continue
        since = range(before.generation + 1, after.generation + 1)
        known, came = [healed[g] for g in since if g in healed], [opened[g] for g in since if g in opened]
        reason = "; ".join(dict.fromkeys(g.reason for g in came))
        left = [worker for g in came for worker in g.let_go]
        lost = sorted({r.worker for r in known} or {worker for g in came for worker in g.lost})
        if left and not lost:
            text = "↓ stands by" if all(worker.stands_by for worker in left) else "↓ drained"
            marks.append(Mark(after.iteration, text, False, reason[:_LONGEST]))
        elif lost or after.living < before.living:
            text = "✕ " + (", ".join(lost[:2]) + (" …" if len(lost) > 2 else "") or "failure")
            detail = f"resumed after {milliseconds(max(r.resumed_ms for r in known))}" if known else "recovered"
            marks.append(Mark(after.iteration, text, True, detail))
        elif after.living > before.living:
            marks.append(Mark(after.iteration, "↺ re-join", False, f"{after.living} workers living again"))
        else:
            moved, planned = any(g.relayout for g in came), any(g.replanned for g in came)
            words = "⇄ layers" if moved else "⇄ new plan" if planned else "re-formed"
            marks.append(Mark(after.iteration, words, False, reason[:_LONGEST] or "same workers, new groups"))
    return marks


def throughput(rows: Columns, colours: Palette, shown: tuple[float, float] | None = None) -> LiveChart:
    """Draws samples per second by iteration, and the fault-free rate, if known, as a dotted line. shown: the first and
    the last iteration that are shown at first; None: all."""
    y = {"field": "reference", "type": "quantitative"}
    last = {"filter": "datum.last"}
    reference = {
        "transform": [last],
        "mark": {"type": "rule", "strokeDash": [3, 3], "strokeWidth": 1.5, "color": colours.good},
        "encoding": {"y": y, "x": {"value": 0}, "x2": {"value": "width"}},
    }
    text: dict[str, Any] = {"type": "text", "align": "left", "baseline": "bottom", "dx": 6, "dy": -4}
    words: dict[str, Any] = {
        "transform": [last],
        "encoding": {"y": y, "x": {"value": 0}, "text": {"value": "fault-free"}},
    }
    # Drawn over the curve, which would run through the words, with an outline like the words of marks.
    label = [{**words, "mark": {**text, **_outline(colours)}}, {**words, "mark": {**text, "color": colours.good}}]
    # An invisible point keeps room for the label above the highest value.
    headroom = {
        "transform": [last],
        "mark": {"type": "point", "opacity": 0},
        "encoding": {"y": {"field": "headroom", "type": "quantitative"}},
    }
    known = bool(np.isfinite(rows["reference"]).any())
    curve = _curve("samples_per_second", colours.accent, shown, zero=True)
    layers = [*([reference] if known else []), headroom, *curve, *(label if known else []), *_marks(colours)]
    return LiveChart(_panel("Throughput (samples/s)", layers), rows, colours)


def losses(rows: Columns, colours: Palette, shown: tuple[float, float] | None = None) -> LiveChart:
    """Draws the loss by iteration, with a gap where an iteration has none. shown: as in `throughput`."""
    layers = [*_curve("loss", colours.muted, shown, zero=False), *_marks(colours, labels=False)]
    return LiveChart(_panel("Loss", layers, axis_title="iteration"), rows, colours)


def progress_rows(iterations: tuple[IterationView, ...], marks: list[Mark], fault_free: float | None) -> Columns:
    """Returns one row per iteration, in narrow types, since they are sent at each refresh.

    mark: words at iterations that open a new generation, if there is room for them, else empty; height: their position,
    in pixels from the panel's top; change: `lost`, `other` or empty. late: near the right edge, so that the words are
    on the left. before, after: where the iteration begins and ends on the axis. reference: the fault-free rate;
    headroom: the value that the axis has to reach; both in the last row only, NaN elsewhere.

    All of this is computed here, since Vega keeps a trace of each row that it derives itself.
    """
    at = {mark.iteration: mark for mark in marks}
    found = [at.get(i.iteration) for i in iterations]
    number = np.array([i.iteration for i in iterations], dtype=np.float64)
    rate = np.array([i.samples_per_second for i in iterations], dtype=np.float32)
    first, last = np.arange(len(number)) == 0, np.arange(len(number)) == len(number) - 1
    span = int(number[-1] - number[0]) if len(number) else 0
    placed = _laid_out([m for m in found if m], int(number[0]) if len(number) else 0, span)
    words = [placed.get(int(i), ("", 0)) for i in number]
    return {
        "iteration": number,
        "samples_per_second": rate,
        "milliseconds": np.array([1000 * i.seconds for i in iterations], dtype=np.float32),
        "loss": np.array([math.nan if i.loss is None else i.loss for i in iterations], dtype=np.float32),
        "generation": np.array([i.generation for i in iterations], dtype=np.float64),
        "living": np.array([i.living for i in iterations], dtype=np.int32),
        "mark": [text for text, _ in words],
        "height": np.array([PANEL_HEIGHT - 4 - LINE_HEIGHT * line for _, line in words], dtype=np.float32),
        "change": [("lost" if m.lost else "other") if m else "" for m in found],
        "happened": [m.detail if m else "" for m in found],
        "first": first,
        "last": last,
        "late": number - number[:1] > LATE * span,
        "dotted": np.full(len(number), span < MOST_DOTS),
        "before": number - 0.5,
        "after": number + 0.5,
        "reference": np.where(last, np.float32(np.nan if fault_free is None else fault_free), np.float32(np.nan)),
        "headroom": np.where(last, HEADROOM * max([*rate, fault_free or 0.0]), np.nan).astype(np.float32),
    }


def _laid_out(marks: list[Mark], first: int, span: int) -> dict[int, tuple[str, int]]:
    """Returns, by iteration, the words of its mark and their line (from 0), so that no words overlap."""
    taken: list[list[tuple[float, float]]] = [[] for _ in range(LINES)]
    placed: dict[int, tuple[str, int]] = {}
    left_out = 0
    for mark in marks:
        at = (mark.iteration - first) / max(span, 1)
        begin, end = (at - WORDS, at) if at > LATE else (at, at + WORDS)
        line = next((i for i, parts in enumerate(taken) if all(end <= b or begin >= e for b, e in parts)), None)
        if line is None:
            left_out += 1
            continue
        if left_out:
            _count(placed, left_out)
            left_out = 0
        taken[line].append((begin, end))
        placed[mark.iteration] = mark.text, line
    if left_out:
        _count(placed, left_out)
    return placed


def _count(placed: dict[int, tuple[str, int]], more: int) -> None:
    last = next(reversed(placed))
    words, line = placed[last]
    placed[last] = f"{words} +{more}", line


def _panel(title: str, layers: list[Any], axis_title: str | None = None) -> dict[str, Any]:
    return {
        "title": title,
        "height": PANEL_HEIGHT,
        "encoding": {
            "x": {
                "field": "iteration",
                "type": "quantitative",
                "scale": {"zero": False, "nice": False, "padding": 10},
                "axis": {"grid": False, "format": ",d", "tickMinStep": 1, "title": axis_title, "tickCount": 8},
            }
        },
        "layer": layers,
    }


def _curve(field: str, colour: str, shown: tuple[float, float] | None, *, zero: bool) -> list[dict[str, Any]]:
    """Makes line and dots, and an invisible column over each iteration, so that hovering needs no aim."""
    y = y_axis(field, FROM_ZERO if zero else {"zero": False, "nice": False, "padding": 8})
    tooltip = [
        {"field": "iteration", "format": ",d"},
        {"field": "samples_per_second", "title": "samples/s", "format": ",.1f"},
        {"field": "milliseconds", "title": "took, ms", "format": ",.0f"},
        {"field": "loss", "format": ".4f"},
        {"field": "living", "title": "living workers"},
        {"field": "generation"},
        {"field": "happened"},
    ]
    return [
        {"mark": {"type": "line", "color": colour, "strokeWidth": 2, "tooltip": None}, "encoding": {"y": y}},
        {
            "transform": [_where("datum.dotted")],
            "mark": {"type": "point", "color": colour, "filled": True, "size": 18},
            "encoding": {"y": y, "opacity": {"condition": {"test": "datum.dotted", "value": 1}, "value": 0}},
        },
        {
            # The wheel zooms only with Alt, and otherwise scrolls the page.
            "params": [
                {
                    "name": ZOOM,
                    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.altKey]"},
                    "bind": "scales",
                    **({"value": {"x": list(shown)}} if shown else {}),
                }
            ],
            "mark": {"type": "rect", "opacity": 0},
            "encoding": {
                "x": {"field": "before", "type": "quantitative"},
                "x2": {"field": "after"},
                "tooltip": tooltip,
            },
        },
    ]


def _where(test: str) -> dict[str, str]:
    """Filters the rows for which `test` holds. The first row always passes (and is invisible unless the test holds),
    since Vega warns about an empty layer."""
    return {"filter": f"{test} || datum.first"}


def _marks(colours: Palette, *, labels: bool = True) -> list[dict[str, Any]]:
    """Makes a line where the membership changed, solid for a failure and dashed otherwise, with its words."""

    def by_change(lost: Any, other: Any) -> dict[str, Any]:
        return {"condition": {"test": "datum.change === 'lost'", "value": lost}, "value": other}

    x = {"field": "before", "type": "quantitative"}
    changed = _where("datum.change !== ''")
    rule = {
        "transform": [changed],
        "mark": {"type": "rule", "strokeWidth": 1.5},
        "encoding": {
            "x": x,
            "color": by_change(colours.failed, colours.joining),
            "strokeDash": by_change([1, 0], [5, 3]),
            "opacity": {"condition": {"test": "datum.change !== ''", "value": 1}, "value": 0},
        },
    }
    at = {"x": x, "y": {"field": "height", "type": "quantitative", "scale": None}, "text": {"field": "mark"}}
    text = {
        "type": "text",
        "baseline": "bottom",
        "align": {"expr": "datum.late ? 'right' : 'left'"},
        "dx": {"expr": "datum.late ? -4 : 4"},
    }
    behind = {
        "transform": [changed],
        "mark": {**text, **_outline(colours)},
        "encoding": at,
    }
    words = {
        "transform": [changed],
        "mark": text,
        "encoding": {**at, "color": by_change(colours.failed_text, colours.joining_text)},
    }
    return [rule, behind, words] if labels else [rule]


def _outline(colours: Palette) -> dict[str, Any]:
    """Returns an outline for words in the page's colour, so that they stay readable over lines."""
    return {"stroke": colours.background, "strokeWidth": 5, "strokeJoin": "round"}


WORKER_PANEL_HEIGHT = 150
MIB = 1 << 20
# A line is broken if this many steps in a row have no heartbeat.
SILENT_STEPS = 3


def op_times(series: Series, planned: Mapping[str, float], colours: Palette) -> LiveChart:
    """Draws milliseconds by op kind. planned: those of the plan in force, by kind; drawn dashed."""
    kinds = [kind for kind in OP_WORDS if kind in series.metrics]
    rows: Columns = {"at": [], "milliseconds": [], "planned": [], "op": []}
    for kind in kinds:
        at, values = broken(series, series.metrics[kind].mean)
        rows["at"] += at
        rows["milliseconds"] += values
        rows["planned"] += [planned.get(kind)] * len(at)
        rows["op"] += [kind] * len(at)
    scale = {"domain": kinds, "range": [colours.op_lines[kind] for kind in kinds]}
    legend = {"orient": "top", "title": None, "labelColor": colours.muted, "symbolType": "stroke"}
    colour = {"field": "op", "type": "nominal", "scale": scale, "legend": legend}
    planned_y = y_axis("planned", FROM_ZERO)
    dashed = [{"mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.5}, "encoding": {"y": planned_y}}]
    layers = [
        *(dashed if any(kind in planned for kind in kinds) else []),
        {
            "mark": {"type": "line", "strokeWidth": 2, "point": {"size": 12}},
            "encoding": {
                "y": y_axis("milliseconds", FROM_ZERO),
                "tooltip": [
                    _TIME,
                    {"field": "op"},
                    {"field": "milliseconds", "format": ".1f"},
                    {"field": "planned", "title": "plan, ms", "format": ".1f"},
                ],
            },
        },
    ]
    words = "Op times (ms)" + (", dashed: the plan's" if dashed and planned else "")
    return _chart(words, layers, rows, colours, {"color": colour})


def memory(series: Series, colours: Palette) -> LiveChart:
    """Draws resident memory in MiB, the highest of each step."""
    at, values = broken(series, series.metrics["resident_bytes"].high)
    rows: Columns = {"at": at, "mebibytes": [None if v is None else v / MIB for v in values]}
    layer = {
        "mark": {"type": "line", "strokeWidth": 2, "color": colours.accent, "point": {"size": 12}},
        "encoding": {
            "y": y_axis("mebibytes", FROM_ZERO),
            "tooltip": [_TIME, {"field": "mebibytes", "title": "MiB", "format": ",.0f"}],
        },
    }
    return _chart("Memory in use (MiB)", [layer], rows, colours, {})


def broken(series: Series, values: Values) -> tuple[list[int], list[float | None]]:
    """Returns times (milliseconds since 1970) and values, with an empty row in each gap so that no line crosses it."""
    at: list[int] = []
    out: list[float | None] = []
    for i, (second, value) in enumerate(zip(series.at, values, strict=True)):
        if i and second - series.at[i - 1] > SILENT_STEPS * series.step:
            at.append(1000 * (series.at[i - 1] + series.step))
            out.append(None)
        at.append(1000 * second)
        out.append(value)
    return at, out


# The console's format for times; Vega's own would be `03 PM` and `:15`.
_CLOCK = {"seconds": "%H:%M:%S", "minutes": "%H:%M", "hours": "%H:%M", "day": "%-d %b", "date": "%-d %b"}
_TIME = {"field": "at", "type": "temporal", "title": "time", "format": "%H:%M:%S"}


def _chart(
    title: str, layers: list[dict[str, Any]], rows: Columns, colours: Palette, encoding: dict[str, Any]
) -> LiveChart:
    axis = {"grid": False, "title": None, "tickCount": 6, "labelOverlap": True, "format": _CLOCK}
    return LiveChart(
        {
            "title": title,
            "height": WORKER_PANEL_HEIGHT,
            "encoding": {"x": {"field": "at", "type": "temporal", "axis": axis}, **encoding},
            "layer": layers,
        },
        rows,
        colours,
    )
