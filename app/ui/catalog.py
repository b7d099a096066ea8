"""Catalog: plans made ahead, by number of failures: what they cost, what is missing, and filling it."""

from __future__ import annotations

import time
from functools import partial

import streamlit as st

from openrecycle.app.catalogs.contents import CatalogReport, CatalogRequest, CatalogSummary, stale
from openrecycle.app.catalogs.service import exported, json_refusal
from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.ui import catalog_view, components, tables, url_state
from openrecycle.app.ui.access import acting, told
from openrecycle.app.ui.catalog_view import ask, stored
from openrecycle.app.ui.tables import rows_html
from openrecycle.app.ui.theme import Palette
from openrecycle.planner.catalogs.catalog_store import CatalogInfo

SEEN = "catalog-filling-seen"
# In the URL: which plans are looked at, by their number of failures, and which one of them.
COUNT, PLAN = "cat_count", "cat_plan"
# Rows that are shown at once; of more, a table that can be scrolled and sorted.
MOST_ROWS = 100
# Seconds between two looks at a filling; of so many plans, which take longer to draw, fewer.
REFRESH, MANY = 0.5, 100


def page() -> None:
    colours = components.use_style()
    console = get_console()
    st.html(
        '<h1 class="or-title">Catalog</h1><div class="or-about">Plans made ahead, so that recovery is a look-up: '
        "what each number of failures will cost, and what is not planned for yet.</div>"
    )
    request = stored(console) if "catalog" in st.query_params else ask(console)
    if request is None:
        return
    report = console.catalogs.report(request.question, request.tolerance, st.query_params.get("catalog"))
    if "catalog" in st.query_params:
        components.heading(catalog_view.question_words(report))
    filling = console.catalogs.filling(report.fingerprint)
    st.session_state[SEEN] = filling is None or not filling.running
    every = REFRESH if report.wanted <= MANY else 4 * REFRESH
    st.fragment(_catalog, run_every=every if filling and filling.running else None)(console, request, colours)
    _others(console, report)


def _catalog(console: ConsoleService, request: CatalogRequest, colours: Palette) -> None:
    """All that changes while it is filled."""
    report = console.catalogs.report(request.question, request.tolerance, st.query_params.get("catalog"))
    _fill(console, request, report)
    if not report.plans:
        components.quiet(
            f"Nothing is planned ahead for this question yet: {report.wanted:,} plans are to be made. Press Fill; "
            "with the list scheduler a plan takes milliseconds, for thousands of workers up to a second."
        )
        return
    components.cards(catalog_view.cards(report))
    components.heading("Period by number of failures", "beneath: how far from optimal, and activations held")
    catalog_view.show(console, report, colours)
    if report.by_pattern and report.tolerance > 1:
        st.caption(
            "At each count the longest plan is for failures that share a stage. Where workers change their stage "
            "(migrations), a shorter one serves: Planner says which, and what they cost."
        )
    elif not report.by_pattern:
        st.caption(
            "One plan per number of failures, for the stages where they cost least. Other failures are led there by "
            "migrations, or get the list scheduler's plan at once."
        )
    components.heading("The same in figures")
    st.html(rows_html(catalog_view.counts_table(report), "Figures by failures"))
    _plans(report)


def _fill(console: ConsoleService, request: CatalogRequest, report: CatalogReport) -> None:
    """Fill, its progress and Cancel. A stale catalog is shown as it is."""
    current = st.query_params.get("catalog") in (None, CatalogInfo.of(request.question).fingerprint)
    filling = console.catalogs.filling(report.fingerprint)
    running = filling is not None and filling.running
    if not running and not st.session_state.get(SEEN, True):
        # Once more, without the refresh of a filling under way.
        st.session_state[SEEN] = True
        st.rerun()
    whole = not report.missing and request.solver == "list"
    with st.container(horizontal=True, vertical_alignment="center", key="catalog-actions"):
        if running:
            if st.button("Cancel", key="cancel-fill"):
                with told():
                    with acting(console, "cancel filling", report.fingerprint):
                        console.catalogs.cancel(report.fingerprint)
                    st.rerun()
        elif current and st.button(
            "Fill",
            type="primary",
            key="fill",
            disabled=whole,
            help="Nothing is missing. Another solver looks for shorter plans where one is not proven optimal."
            if whole
            else "Plans what is missing, in the background.",
        ):
            with told():
                with acting(console, "fill catalog", report.fingerprint):
                    console.catalogs.fill(request)
                st.rerun()
        if report.plans:
            _exports(console, report)
    if filling is None:
        return
    with st.container(key="fill-progress"):  # in one place, so that its end moves nothing
        if running:
            st.progress(filling.done / max(1, filling.total), text=catalog_view.filling_words(filling))
        elif filling.state == "failed":
            st.error(catalog_view.filling_words(filling))
        else:
            components.quiet(catalog_view.filling_words(filling))


def _plans(report: CatalogReport) -> None:
    """One count's plans, and the way to the Gantt chart of each."""
    counts = [line.failures for line in report.lines if line.plans]
    with st.container(horizontal=True, vertical_alignment="bottom", key="catalog-plans"):
        count = url_state.selectbox(
            "Plans for failures",
            counts,
            default=counts[min(1, len(counts) - 1)],
            key=COUNT,
            on_change=lambda: url_state.put(PLAN, None),
            width=150,
        )
        line = report.lines[count]
        names = {plan.name: plan.words(8) or "fault-free" for plan in line.plans}
        chosen = url_state.selectbox("Without", list(names), format_func=names.__getitem__, key=PLAN, width=320)
        if st.button("Open on Schedule", key="open-plan"):
            catalog_view.open_plan(report, chosen)
    table, caption = catalog_view.plans_table(line, report.question.job.time_unit), "Plans of one number of failures"
    if len(line.plans) <= MOST_ROWS:
        st.html(rows_html(table, caption))
    else:
        tables.show(table, "catalog-plans-table", caption)


def _exports(console: ConsoleService, report: CatalogReport) -> None:
    """The whole catalog; made when its button is pressed."""
    with st.popover("Export", icon=":material/download:", key="export-catalog"), told():
        refusal = json_refusal(console.catalogs.stored(report.fingerprint).info, report.plans)
        for form, label, why in (
            ("json", "JSON documents (zip)", refusal),
            ("stored", "As the command line keeps it (zip)", ""),
        ):
            st.download_button(
                label,
                partial(exported, console.catalogs, report.fingerprint, form),  # type: ignore[arg-type]
                file_name=f"catalog-{report.fingerprint[:12]}.{form}.zip",
                mime="application/zip",
                on_click="ignore",
                type="tertiary",
                key=f"export-catalog-{form}",
                disabled=bool(why),
                help=why or None,
            )


def _others(console: ConsoleService, report: CatalogReport) -> None:
    """Every stored catalog; what is stale, and why."""
    catalogs = console.catalogs.list()
    if not catalogs:
        return
    old = {catalog.fingerprint: f"stale: {why}" for catalog, why in stale(report.question, catalogs)}
    states = [
        "this one" if c.fingerprint == report.fingerprint else old.get(c.fingerprint) or _state(c) for c in catalogs
    ]
    components.heading("Stored catalogs", "stale ones are kept until they are deleted")
    st.html(rows_html(catalog_view.stored_table(catalogs, states, time.time()), "Stored catalogs"))
    names = {
        c.fingerprint: f"{c.info.job.pipelines} × {c.info.job.stages} × {c.info.job.micro_batches} · "
        f"{c.info.technique.value} · {c.info.memory} · {state} · {c.fingerprint[:8]}"
        for c, state in zip(catalogs, states, strict=True)
    }
    with st.container(horizontal=True, vertical_alignment="bottom", key="catalogs-row"):
        chosen = st.selectbox("Stored catalog", list(names), format_func=names.__getitem__, key="stored", width=420)
        if st.button("Show", key="show-catalog"):
            st.query_params["catalog"] = chosen
            st.rerun()
        with st.popover("Delete", key="delete-catalog"):
            st.markdown("Its plans are gone for good; a job that runs keeps those it has, and Fill makes them anew.")
            if st.button("Delete this catalog", type="primary", key="act-kill-catalog"):
                with told():
                    with acting(console, "delete catalog", chosen):
                        console.catalogs.delete(chosen)
                    if st.query_params.get("catalog") == chosen:
                        del st.query_params["catalog"]
                    st.rerun()


def _state(catalog: CatalogSummary) -> str:
    return "another question" if catalog.current else f"stale: planner version {catalog.info.planner_version}"
