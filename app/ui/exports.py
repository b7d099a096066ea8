"""The export button that pages share: one download per format, made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import streamlit as st

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.console.plan_sources import Source, export_of
from openrecycle.app.console.service import Console
from openrecycle.app.plans.exporting import Export, offers, render
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.plans.plan import Plan


def export_button(
    plan: Plan,
    name: str,
    *,
    spec: JobSpec | None = None,
    catalog: Callable[[], Catalog] | None = None,
    key: str = "export",
) -> None:
    """A popover with every format of `plan`; one that is refused is shown with its reason.

    name: what people call the plan. spec, catalog: of the job that it belongs to; the bundle has them.
    """
    _button(Export(plan, name, spec, catalog), key)


def export_source(console: Console, source: Source, *, key: str = "export") -> None:
    """The same of what stands behind a reference."""
    _button(export_of(console, source), key)


def _button(export: Export, key: str) -> None:
    with st.popover("Export", icon=":material/download:", key=key):
        for offer in offers(export.plan, export.name, export.job_id):
            st.download_button(
                offer.title,
                partial(render, export, offer),
                file_name=offer.file_name,
                mime=offer.media_type,
                on_click="ignore",
                type="tertiary",
                key=f"{key}-{offer.name}",
                disabled=offer.refusal is not None,
            )
            if offer.refusal is not None:
                st.caption(f"Not for this plan: {offer.refusal.reason}.")
