"""Catalog: plans made ahead, by number of failures: what they cost, what is missing, and filling it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import streamlit as st

from app.catalogs.export import exported, json_refusal
from app.catalogs.fill import CatalogRequest, parse_request
from app.catalogs.report import CatalogReport, CatalogSummary, most_failures, stale
from app.console import Console, get_console
from app.errors import ConsoleError
from app.ui import catalog_chart, components
from app.ui import catalog_words as words
from app.ui.access import acting
from app.ui.picker import CHOSEN
from app.ui.tables import rows_html
from app.ui.theme import Palette
from planner.catalog_store import CatalogInfo
from planner.errors import InputError, PlannerError
from planner.job import Technique
from planner.plan import job_doc
from planner.solvers.portfolio import SOLVERS
from planner.version import PLANNER_VERSION

OWN = "own"
JOB = "catalog-job"
SEEN = "catalog-filling-seen"
# In the URL: which plans are looked at, by their number of failures, and which one of them.
COUNT, PLAN = "cat_count", "cat_plan"
# Rows that are shown at once; of more, a table that can be scrolled and sorted.
MOST_ROWS = 100
# Seconds between two looks at a filling; of so many plans, which take longer to draw, fewer.
REFRESH, MANY = 0.5, 100
SOLVER_WORDS = {
    "list": "List scheduler (fast)",
    "auto": "Best within the time",
    "cp-sat": "CP-SAT (optimal)",
    "milp": "MILP (the cross-check)",
}


def page() -> None:
    colours = components.use_style()
    console = get_console()
    st.html(
        '<h1 class="or-title">Catalog</h1><div class="or-about">Plans made ahead, so that recovery is a look-up: '
        "what each number of failures will cost, and what is not planned for yet.</div>"
    )
    try:
        request = _stored(console) if "catalog" in st.query_params else _ask(console)
    except InputError as error:
        st.error(str(error))
        return
    if request is None:
        return
    report = console.catalogs.report(request.question, request.tolerance, st.query_params.get("catalog"))
    if "catalog" in st.query_params:
        components.heading(words.question_words(report))
    filling = console.catalogs.filling(report.fingerprint)
    st.session_state[SEEN] = filling is None or not filling.running
    every = REFRESH if report.wanted <= MANY else 4 * REFRESH
    st.fragment(_catalog, run_every=every if filling and filling.running else None)(console, request, colours)
    _others(console, report)


# -- what is asked ---------------------------------------------------------------------------


def _stored(console: Console) -> CatalogRequest | None:
    """A stored catalog by the URL's `catalog`."""
    fingerprint = st.query_params["catalog"]
    try:
        stored = console.catalogs.stored(fingerprint)
    except ConsoleError as error:
        st.error(f"{error}. Ask a question of your own instead.")
        _leave_button("Ask a question")
        return None
    own = stored.info
    most = max((stored.header(name).failures for name in stored.blobs.names()), default=0)
    if own.planner_version != PLANNER_VERSION:
        st.warning(
            f"This catalog is stale: version {own.planner_version} of the planner made it. "
            "It is shown as it is, and no job uses it."
        )
    _leave_button("Ask another question")
    return parse_request(job=own.job, technique=own.technique.value, memory=own.memory, tolerance=most, **_effort())


def _leave_button(label: str) -> None:
    if st.button(label, key="leave-catalog"):
        del st.query_params["catalog"]
        st.rerun()


def _ask(console: Console) -> CatalogRequest:
    """The controls; their state is in the URL. Raises InputError."""
    jobs = {job.job_id: job.name for job in console.list_jobs()}
    wanted = st.query_params.get("job") or st.session_state.get(CHOSEN) or next(iter(jobs), OWN)
    if wanted not in (OWN, *jobs):
        st.error(f"job: got {wanted!r}, expected the id of a job that this console knows. Choose one instead.")
        wanted = OWN
    values: dict[str, Any] = {}
    with st.container(horizontal=True, vertical_alignment="bottom", key="catalog-question"):
        source = st.selectbox(
            "Plans for",
            [OWN, *jobs],
            index=[OWN, *jobs].index(wanted),
            format_func=lambda j: "A question of your own" if j == OWN else f"{jobs[j]} · {j}",
            key=JOB,
            on_change=_remember,
            width=230,
        )
        if st.query_params.get("job") != source:
            st.query_params["job"] = source  # a newer job must not change what a link shows
        if source == OWN:
            values |= _own_question()
            most = values["stages"] * (values["pipelines"] - 1)
            default = min(2, most)
        else:
            question = console.job(source).question
            values = {
                "job": job_doc(question.job),
                "technique": question.technique.value,
                "memory": question.memory.text,
            }
            most = most_failures(question)
            default = min(console.tolerance, most)
        values["tolerance"] = st.number_input(
            "Failures at once",
            0,
            1024,
            default,
            key="cat_tolerance" if source == OWN else f"cat_tolerance-{source}",
            bind="query-params",
            help=f"Plan for up to so many failed workers; at most {most}, as each stage needs a living one.",
            width=125,
        )
        values |= _effort()
    return parse_request(**values)


def _own_question() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, label, value, most in (
        ("pipelines", "Pipelines", 3, 1024),
        ("stages", "Stages", 4, 512),
        ("micro_batches", "Micro-batches", 6, 1024),
    ):
        values[name] = st.number_input(
            label, 1, most, value, key=f"cat_{name}", bind="query-params", width=105, help="Per pipeline."
            if name == "micro_batches" else None,
        )  # fmt: skip
    values["technique"] = st.selectbox(
        "Technique",
        [t.value for t in Technique if t.reroutes],
        index=2,
        key="cat_technique",
        bind="query-params",
        help="Each includes the ones before it.",
        width=125,
    )
    values["memory"] = st.text_input(
        "Memory limit",
        "uniform",
        key="cat_memory",
        bind="query-params",
        max_chars=12,
        help="Activations that a worker may hold: 1f1b, uniform, none, or a number.",
        width=110,
    )
    with st.popover("Op times", key="cat-times"):
        st.caption("In slots; the same on all stages.")
        durations: dict[str, float] = {}
        for kind, name, time_of in (
            ("F", "Forward", 1.0),
            ("I", "Backward, input", 1.0),
            ("W", "Backward, weight", 1.0),
            ("O", "Optimizer step", 0.0),
            ("transfer", "Transfer", 0.0),
        ):
            durations[kind] = st.number_input(name, 0.0, 1e6, time_of, key=f"cat_{kind}", bind="query-params")
    return values | {"durations": durations}


def _effort() -> dict[str, Any]:
    solver = st.selectbox(
        "Solver",
        list(SOLVERS),
        index=list(SOLVERS).index("list"),
        format_func=lambda s: SOLVER_WORDS.get(s, s),
        key="cat_solver",
        bind="query-params",
        help="A plan that is stored already is made again only when more is asked for than made it, and it is not "
        "proven optimal.",
        width=200,
    )
    if solver == "list":
        return {"solver": solver}
    limit = st.number_input("Seconds per plan", 0.1, 600.0, 10.0, key="cat_seconds", bind="query-params", width=130)
    return {"solver": solver, "time_limit": limit}


def _remember() -> None:
    st.query_params["job"] = st.session_state[JOB]
    if st.session_state[JOB] != OWN:
        st.session_state[CHOSEN] = st.session_state[JOB]


# -- what there is ---------------------------------------------------------------------------


def _catalog(console: Console, request: CatalogRequest, colours: Palette) -> None:
    """All that changes while it is filled."""
    report = console.catalogs.report(request.question, request.tolerance, st.query_params.get("catalog"))
    _fill(console, request, report)
    if not report.plans:
        components.quiet(
            f"Nothing is planned ahead for this question yet: {report.wanted:,} plans are to be made. Press Fill; "
            "with the list scheduler they take milliseconds each."
        )
        return
    components.cards(words.cards(report))
    components.heading("Period by number of failures", "beneath: how far from optimal, and activations held")
    catalog_chart.show(console, report, colours)
    if report.by_pattern and report.tolerance > 1:
        st.caption(
            "At each count the longest plan is for failures that share a stage. Migrations lead them towards the "
            "shortest: Planner says which, and what they cost."
        )
    elif not report.by_pattern:
        st.caption(
            "One plan per number of failures, for the stages where they cost least. Other failures are led there by "
            "migrations, or get the list scheduler's plan at once."
        )
    components.heading("The same in figures")
    st.html(rows_html(words.counts_table(report), "Figures by failures"))
    _plans(report)


def _fill(console: Console, request: CatalogRequest, report: CatalogReport) -> None:
    """Fill, its progress and Cancel. A stale catalog is shown as it is."""
    current = st.query_params.get("catalog") in (None, CatalogInfo.of(request.question).fingerprint)
    filling = console.catalogs.filling(report.fingerprint)
    running = filling is not None and filling.running
    if not running and not st.session_state.get(SEEN, True):
        # Once more, without the refresh of a filling under way.
        st.session_state[SEEN] = True
        st.rerun()
    with st.container(horizontal=True, vertical_alignment="center", key="catalog-actions"):
        if running:
            if st.button("Cancel", key="cancel-fill"):
                try:
                    with acting(console, "cancel filling", report.fingerprint):
                        console.catalogs.cancel(report.fingerprint)
                except ConsoleError as error:
                    st.error(str(error))
                else:
                    st.rerun()
        elif current and st.button(
            "Fill", type="primary", key="fill", help="Plans what is missing, in the background."
        ):
            try:
                with acting(console, "fill catalog", report.fingerprint):
                    console.catalogs.fill(request)
            except ConsoleError as error:
                st.error(str(error))
            else:
                st.rerun()
        if report.plans:
            _exports(console, report)
    if filling is None:
        return
    if running:
        st.progress(filling.done / max(1, filling.total), text=words.filling_words(filling))
    elif filling.state == "failed":
        st.error(words.filling_words(filling))
    else:
        components.quiet(words.filling_words(filling))


def _plans(report: CatalogReport) -> None:
    """One count's plans, and the way to the Gantt chart of each."""
    counts = [line.failures for line in report.lines if line.plans]
    wanted = st.query_params.get(COUNT, "")
    number = int(wanted) if wanted.isdecimal() and int(wanted) in counts else counts[min(1, len(counts) - 1)]
    with st.container(horizontal=True, vertical_alignment="bottom", key="catalog-plans"):
        # Bound widgets lose what the address says when they are drawn in a fragment.
        count = st.selectbox(
            "Plans for failures", counts, index=counts.index(number), key=COUNT, on_change=_choose_count, width=150
        )
        line = report.lines[count]
        names = {plan.name: plan.words(8) or "fault-free" for plan in line.plans}
        named = st.query_params.get(PLAN)
        chosen = st.selectbox(
            "Without",
            list(names),
            index=list(names).index(named) if named in names else 0,
            format_func=names.__getitem__,
            key=f"{PLAN}-{count}",
            on_change=_choose_plan,
            args=(count,),
            width=320,
        )
        if st.button("Open on Schedule", key="open-plan"):
            catalog_chart.open_plan(report, chosen)
    table, caption = words.plans_table(line, report.question.job.time_unit), "Plans of one number of failures"
    if len(line.plans) <= MOST_ROWS:
        st.html(rows_html(table, caption))
    else:
        st.dataframe(table, hide_index=True, key="catalog-plans-table", alt=caption)


def _choose_count() -> None:
    st.query_params[COUNT] = str(st.session_state[COUNT])
    st.query_params.pop(PLAN, None)


def _choose_plan(count: int) -> None:
    st.query_params[COUNT], st.query_params[PLAN] = str(count), st.session_state[f"{PLAN}-{count}"]


def _exports(console: Console, report: CatalogReport) -> None:
    """The whole catalog; made when its button is pressed."""
    with st.popover("Export", icon=":material/download:", key="export-catalog"):
        try:
            refusal = json_refusal(console.catalogs.stored(report.fingerprint).info, report.plans)
        except (ConsoleError, PlannerError) as error:
            st.error(str(error))
            return
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


def _others(console: Console, report: CatalogReport) -> None:
    """Every stored catalog; what is stale, and why."""
    catalogs = console.catalogs.list()
    if not catalogs:
        return
    old = {catalog.fingerprint: f"stale: {why}" for catalog, why in stale(report.question, catalogs)}
    states = [
        "this one" if c.fingerprint == report.fingerprint else old.get(c.fingerprint) or _state(c) for c in catalogs
    ]
    components.heading("Stored catalogs", "stale ones are kept until they are deleted")
    st.html(rows_html(words.stored_table(catalogs, states, time.time()), "Stored catalogs"))
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
                try:
                    with acting(console, "delete catalog", chosen):
                        console.catalogs.delete(chosen)
                except ConsoleError as error:
                    st.error(str(error))
                else:
                    if st.query_params.get("catalog") == chosen:
                        del st.query_params["catalog"]
                    st.rerun()


def _state(catalog: CatalogSummary) -> str:
    return "another question" if catalog.current else f"stale: planner version {catalog.info.planner_version}"


components.guard(page)
