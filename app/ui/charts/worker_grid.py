"""The worker grid of large jobs: a heat-map of pipelines and stages, with a mark on each worker
that is not simply running."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from app.ui import text
from app.ui.facts import look
from app.ui.theme import Palette, style
from app.view import JobView, WorkerView

# In the order of the legend. Values: words, plotly symbol, attribute of Palette.
LOOKS: dict[str, tuple[str, str, str]] = {
    "running": ("Running", "square", "healthy"),
    "re-routed": ("Takes re-routed work", "square", "rerouted"),
    "suspect": ("Suspect (heartbeat overdue)", "diamond", "suspect"),
    "failed": ("Failed", "x", "failed"),
    "re-joining": ("Re-joining", "circle", "joining"),
    "starting": ("Starting", "circle-open", "muted"),
    "finished": ("Finished", "star", "good"),
}
QUIET = ("running", "re-routed")


def worker_grid(view: JobView, colours: Palette, *, revision: str = "grid") -> go.Figure:
    """x: pipeline, y: stage. Running workers are quiet cells; every other state adds a shape."""
    spec = view.spec
    cells = np.zeros((spec.stages, spec.pipelines), dtype=np.uint8)
    hover = np.full((spec.stages, spec.pipelines), "", dtype=object)
    order = list(LOOKS)
    for worker in view.workers:
        cells[worker.stage, worker.pipeline] = order.index(look(worker))
        hover[worker.stage, worker.pipeline] = worker_sentence(worker)
    gap = 2 if max(cells.shape) <= 64 else 1
    figure = go.Figure(
        go.Heatmap(
            z=cells,
            zmin=-0.5,
            zmax=len(order) - 0.5,
            colorscale=_steps([_cell_colour(name, colours) for name in order]),
            showscale=False,
            xgap=gap,
            ygap=gap,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
        )
    )
    for name, (words, symbol, attribute) in LOOKS.items():
        marked = [] if name in QUIET else [w for w in view.workers if look(w) == name]
        if not marked:
            continue
        colour = getattr(colours, attribute)
        figure.add_trace(
            go.Scatter(
                x=[w.pipeline for w in marked],
                y=[w.stage for w in marked],
                mode="markers",
                name=words,
                marker={
                    "symbol": symbol,
                    "size": _marker_size(spec.pipelines, spec.stages),
                    "color": colour,
                    "line": {"width": 1, "color": colours.text if name == "suspect" else colour},
                },
                hoverinfo="skip",
                meta={"look": name},
            )
        )
    style(figure, colours, height=max(200, min(560, 12 * spec.stages + 80)), revision=revision)
    figure.update_layout(margin={"l": 48, "r": 8, "t": 8, "b": 44}, dragmode="pan", showlegend=False)
    figure.update_xaxes(title_text="pipeline", showgrid=False, tickformat="d", range=[-0.5, spec.pipelines - 0.5])
    figure.update_yaxes(title_text="stage", showgrid=False, tickformat="d", range=[spec.stages - 0.5, -0.5])
    return figure


def worker_sentence(worker: WorkerView) -> str:
    """State, heartbeat and iteration of one worker, for hover."""
    words = LOOKS[look(worker)][0].lower()
    extra = f" ({worker.takes_rerouted} micro-batches)" if look(worker) == "re-routed" else ""
    return (
        f"<b>{worker.name}</b> · {words}{extra}<br>"
        f"iteration {worker.iteration} · epoch {worker.epoch}<br>"
        f"heartbeat {text.age(worker.heartbeat_age)}"
    )


def _cell_colour(name: str, colours: Palette) -> str:
    return {"running": colours.healthy, "re-routed": colours.rerouted}.get(name, colours.track)


def _steps(colours: list[str]) -> list[list[float | str]]:
    """A colour scale of flat steps, one per whole number."""
    n = len(colours)
    steps: list[list[float | str]] = []
    for i, colour in enumerate(colours):
        steps += [[i / n, colour], [(i + 1) / n, colour]]
    return steps


def _marker_size(pipelines: int, stages: int) -> float:
    return max(6.0, min(14.0, 900 / max(pipelines, 1.5 * stages)))
