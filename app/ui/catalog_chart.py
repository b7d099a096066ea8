"""The Catalog page's chart, which stands still while the catalog is filled, and the way from a point to its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from openrecycle.app.catalogs.contents import CatalogReport, whole_counts
from openrecycle.app.console.service import Console
from openrecycle.app.ui import catalog_words as words
from openrecycle.app.ui import components
from openrecycle.app.ui.charts.catalog import catalog_curves
from openrecycle.app.ui.theme import CHART_CONFIG, Palette

CHART = "catalog-chart"
DRAWN = "catalog-drawn"
SCHEDULE = Path(__file__).resolve().parent / "schedule.py"


def show(console: Console, report: CatalogReport, colours: Palette) -> None:
    drawn = _drawn(console, report)
    if drawn.plans:
        _curves(drawn, colours)
    else:
        components.quiet("Here is drawn what each number of failures costs, once all its plans are there.")


def _drawn(console: Console, report: CatalogReport) -> CatalogReport:
    """The same one at each refresh of a filling until more can be drawn: a chart that is drawn anew takes no
    click meanwhile."""
    filling = console.catalogs.filling(report.fingerprint)
    if filling is None or not filling.running:
        st.session_state.pop(DRAWN, None)
        return report
    drawn = whole_counts(report)
    key = (report.fingerprint, filling.began, [line.failures for line in drawn.lines if line.plans])
    kept = st.session_state.get(DRAWN)
    if kept is None or kept[0] != key:
        kept = st.session_state[DRAWN] = key, drawn
    return kept[1]  # type: ignore[no-any-return]


def _curves(report: CatalogReport, colours: Palette) -> None:
    event = st.plotly_chart(
        catalog_curves(report, colours, revision=report.fingerprint),
        theme=None,
        config=CHART_CONFIG,
        key=CHART,
        on_select="rerun",
        selection_mode="points",
        alt=words.chart_words(report),
    )
    clicked = _clicked(event)
    if clicked is not None and clicked < len(report.lines) and report.lines[clicked].worst is not None:
        open_plan(report, report.lines[clicked].plans[0].name)


def _clicked(event: Any) -> int | None:
    """The number of failures of the point that was clicked."""
    points = event.selection.points if event and "selection" in event else []
    return int(points[0]["x"]) if points else None


def open_plan(report: CatalogReport, name: str) -> None:
    st.switch_page(SCHEDULE, query_params={"plan": f"catalog:{report.fingerprint}:{name}"})
