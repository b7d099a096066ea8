"""Grids of workers too large for a button each, as heat-maps of pipelines and stages: on Live with a mark on each
worker that is not simply running, on the Planner page with a click that kills.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from openrecycle.app.console.view import JobView, WorkerView
from openrecycle.app.jobs.states import HOLDING, OUT, RoleState
from openrecycle.app.plans.whatif import WhatIf
from openrecycle.app.ui import text
from openrecycle.app.ui.charts.vega import Columns, LiveChart
from openrecycle.app.ui.theme import Palette

_CROSS = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
_RING = "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0M.55,0A.55,.55,0,1,0,-.55,0A.55,.55,0,1,0,.55,0Z"
_BARS = "M-.8,-.9L-.2,-.9L-.2,.9L-.8,.9ZM.2,-.9L.8,-.9L.8,.9L.2,.9Z"
_CHECK = "M-1,.1L-.65,-.25L-.25,.15L.65,-.8L1,-.45L-.25,.85Z"

# In the order of the legend. Values: words, Vega shape, attribute of Palette.
LOOKS: dict[RoleState, tuple[str, str, str]] = {
    RoleState.RUNNING: ("Running", "square", "healthy"),
    RoleState.REROUTED: ("Takes re-routed work", "square", "rerouted"),
    RoleState.SLOW: ("Slow beside its peers", "triangle-up", "slow"),
    RoleState.WAITING: ("Waits for your choice", _BARS, "suspect"),
    RoleState.PAUSED: ("Paused", _BARS, "muted"),
    RoleState.SUSPECT: ("Suspect (heartbeat overdue)", "diamond", "suspect"),
    RoleState.FAILED: ("Failed", _CROSS, "failed"),
    RoleState.JOINING: ("Joining", "circle", "joining"),
    RoleState.MOVED: ("Empty: its process moved", "triangle-right", "muted"),
    RoleState.LEAVING: ("Leaving, as asked", "triangle-down", "slow"),
    RoleState.DRAINED: ("Drained", "triangle-down", "muted"),
    RoleState.EMPTY: ("Empty", _RING, "muted"),
    RoleState.FINISHED: ("Finished", _CHECK, "good"),
}
QUIET = (RoleState.RUNNING, RoleState.REROUTED)
# Seconds: a heartbeat no older than this is as it should be, and its age is of no interest.
PUNCTUAL = 2
# Of a worker's ranks.
SPARE = "spare ranks"
# The chart's selection, which holds the worker that was clicked.
PICKED = "picked"


def worker_grid(view: JobView, colours: Palette) -> LiveChart:
    """x: pipeline, y: stage. Running workers are quiet cells; every other state adds a shape."""
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
    """cells, marks: how they are encoded. marked: the cells that have a mark. toggle: does a click add to those that
    are picked? Else it picks one instead."""
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
    """State, heartbeat and iteration of one worker, for hover."""
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
    """In narrow types, and the same from one refresh to the next while all is quiet: then nothing is sent."""
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
    """The newest iteration that any worker is in. One is nothing: they report at different moments. NaN: it is in
    none."""
    if worker.state not in HOLDING:
        return math.nan
    behind = newest - worker.iteration
    return behind if behind > 1 else 0


def _scale(looks: list[str], values: list[str]) -> dict[str, Any]:
    return {"field": "look", "type": "nominal", "legend": None, "scale": {"domain": looks, "range": values}}


def _mark_size(pipelines: int, stages: int) -> float:
    """Area in square pixels, so that a mark stands out of its cell without hiding its neighbours."""
    return max(60.0, min(180.0, 12_000 / max(pipelines, 2 * stages)))


# Words of the chart, and the look of the same name on Live.
_LOOKS = {"alive": RoleState.RUNNING, "takes re-routed work": RoleState.REROUTED, "dead": RoleState.FAILED}


def dead_grid(question: WhatIf, takes: Mapping[str, int], colours: Palette) -> LiveChart:
    """x: pipeline, y: stage. takes: re-routed micro-batches by worker. A click toggles the selection."""
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
