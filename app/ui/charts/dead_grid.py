"""The Planner's grid of workers where it is too large for buttons: a heat-map in which a click kills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from openrecycle.app.plans.whatif import WhatIf
from openrecycle.app.ui.charts.vega import LiveChart, config
from openrecycle.app.ui.charts.worker_grid import LOOKS
from openrecycle.app.ui.theme import Palette
from openrecycle.app.workers.states import RoleState

PICKED = "picked"
# Words of the chart, and the look of the same name on Live.
_LOOKS = {"alive": RoleState.RUNNING, "takes re-routed work": RoleState.REROUTED, "dead": RoleState.FAILED}


def dead_grid(question: WhatIf, takes: Mapping[str, int], colours: Palette) -> LiveChart:
    """x: pipeline, y: stage. takes: re-routed micro-batches by worker. A click toggles the selection."""
    pipelines, stages = question.pipelines, question.stages
    dead = frozenset(question.failed)
    names = [f"W{p}_{s}" for p in range(pipelines) for s in range(stages)]
    looks = ["dead" if n in dead else "takes re-routed work" if takes.get(n) else "alive" for n in names]
    axis: dict[str, Any] = {"grid": False, "domain": False, "ticks": False, "labelAngle": 0}
    axis |= {"labelOverlap": True, "labelSeparation": 5}
    fills = [getattr(colours, LOOKS[look][2]) for look in _LOOKS.values()]
    scale = {"domain": list(_LOOKS), "range": fills}
    shape = {"domain": ["dead"], "range": [LOOKS[RoleState.FAILED][1]]}
    return LiveChart(
        {
            "height": max(150, min(520, 13 * stages)),
            "width": "container",
            "autosize": {"type": "fit-x", "contains": "padding"},
            "encoding": {
                "x": {"field": "pipeline", "type": "ordinal", "axis": axis, "scale": {"paddingInner": 0.12}},
                "y": {"field": "stage", "type": "ordinal", "axis": axis, "scale": {"paddingInner": 0.12}},
                "tooltip": [{"field": f} for f in ("worker", "look", "re-routed micro-batches")],
            },
            "layer": [
                {
                    "params": [{"name": PICKED, "select": {"type": "point", "fields": ["worker"], "toggle": "true"}}],
                    "mark": {"type": "rect", "cursor": "pointer"},
                    "encoding": {
                        "color": {"field": "look", "type": "nominal", "legend": None, "scale": scale},
                        "opacity": {"value": 1},
                    },
                },
                {
                    "transform": [{"filter": "datum.look === 'dead'"}],
                    "mark": {"type": "point", "filled": True, "opacity": 1, "strokeWidth": 0, "cursor": "pointer"},
                    "encoding": {
                        "shape": {"field": "look", "type": "nominal", "legend": None, "scale": shape},
                        "color": {"value": colours.text},
                        "size": {"value": max(16.0, min(120.0, 6_000 / max(pipelines, 2 * stages)))},
                    },
                },
            ],
            "config": config(colours),
        },
        {
            "worker": names,
            "pipeline": np.repeat(np.arange(pipelines, dtype=np.int32), stages),
            "stage": np.tile(np.arange(stages, dtype=np.int32), pipelines),
            "look": looks,
            "re-routed micro-batches": np.array([takes.get(n, 0) for n in names], dtype=np.int32),
        },
    )
