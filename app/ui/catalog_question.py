"""The question that Catalog shows plans for: of a job, one's own, or of a stored catalog. In the URL."""

from __future__ import annotations

from typing import Any

import streamlit as st

from openrecycle.app.catalogs.contents import CatalogRequest, most_failures, parse_request
from openrecycle.app.console.service import Console
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import url_state
from openrecycle.app.ui.picker import CHOSEN
from openrecycle.planner.catalogs.catalog_store import PLANNER_VERSION
from openrecycle.planner.jobs.job import Technique
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.portfolio import SOLVERS

OWN = "own"
JOB = "catalog-job"
SOLVER_WORDS = {
    "list": "List scheduler (fast)",
    "auto": "Best within the time",
    "cp-sat": "CP-SAT (optimal)",
    "milp": "MILP (the cross-check)",
}


def stored(console: Console) -> CatalogRequest | None:
    """A stored catalog by the URL's `catalog`."""
    fingerprint = st.query_params["catalog"]
    try:
        found = console.catalogs.stored(fingerprint)
    except ConsoleError as error:
        st.error(f"{error}. Ask a question of your own instead.")
        _leave_button("Ask a question")
        return None
    own = found.info
    most = max((found.header(name).failures for name in found.blobs.names()), default=0)
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


def ask(console: Console) -> CatalogRequest:
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
        values["tolerance"] = url_state.number_input(
            "Failures at once",
            0,
            1024,
            default,
            key="cat_tolerance" if source == OWN else f"cat_tolerance-{source}",
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
        values[name] = url_state.number_input(
            label, 1, most, value, key=f"cat_{name}", width=105, help="Per pipeline."
            if name == "micro_batches" else None,
        )  # fmt: skip
    values["technique"] = url_state.selectbox(
        "Technique",
        [t.value for t in Technique if t.reroutes],
        index=2,
        key="cat_technique",
        help="Each includes the ones before it.",
        width=125,
    )
    values["memory"] = url_state.text_input(
        "Memory limit",
        "uniform",
        key="cat_memory",
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
            durations[kind] = url_state.number_input(name, 0.0, 1e6, time_of, key=f"cat_{kind}")
    return values | {"durations": durations}


def _effort() -> dict[str, Any]:
    solver = url_state.selectbox(
        "Solver",
        list(SOLVERS),
        index=list(SOLVERS).index("list"),
        format_func=lambda s: SOLVER_WORDS.get(s, s),
        key="cat_solver",
        help="A plan that is stored already is made again only when more is asked for than made it, and it is not "
        "proven optimal.",
        width=200,
    )
    if solver == "list":
        return {"solver": solver}
    limit = url_state.number_input("Seconds per plan", 0.1, 600.0, 10.0, key="cat_seconds", width=130, format="%g")
    return {"solver": solver, "time_limit": limit}


def _remember() -> None:
    url_state.moved()
    st.query_params["job"] = st.session_state[JOB]
    if st.session_state[JOB] != OWN:
        st.session_state[CHOSEN] = st.session_state[JOB]
