"""The export button that pages share: one download per format, made when it is asked for."""

from __future__ import annotations

from functools import partial

import streamlit as st

from agent.protocol import JobSpec
from app.exporting import Export, offers, render
from planner.catalog import Catalog
from planner.plan import Plan


def export_button(
    plan: Plan,
    name: str,
    *,
    spec: JobSpec | None = None,
    catalog: Catalog | None = None,
    key: str = "export",
) -> None:
    """A popover with every format of `plan`; one that is refused is shown with its reason.

    name: what people call the plan. spec, catalog: of the job that it belongs to; the bundle has them.
    """
    export = Export(plan, name, spec, catalog)
    with st.popover("Export", icon=":material/download:", key=key):
        for offer in offers(plan, name):
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
