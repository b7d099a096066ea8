"""The head of a page: which job it shows (`?job=` of the URL, else the newest one that runs), and what that is."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.states import JobSummary
from openrecycle.app.ui import address, components
from openrecycle.app.ui.address import BEGAN_WITH, CHOSEN, ITERATIONS
from openrecycle.app.ui.facts import OVER

PICKER = "job-picker"


def open_job(
    console: ConsoleService, *, pace: bool = True, title: Callable[[LiveJob], bool] = lambda job: False
) -> tuple[LiveJob, DeltaGenerator] | None:
    """Draws the page's head; returns the job and the place for the page's own controls.

    pace: also say whether the job is paced. title: draws what the page shows in the place of the job's name, and
    returns True, where that is not the job's. None: there is no job, or none with the URL's id; the
    page has then said so. Raises ConsoleError.
    """
    # One that runs before those that have ended, however new: that is what somebody comes for.
    jobs = sorted(console.queries.list_jobs(), key=lambda job: (job.state not in OVER, job.created_at), reverse=True)
    if not jobs:
        components.no_job((st.context.url or "http://127.0.0.1:8501").removesuffix("/schedule").rstrip("/"))
        st.fragment(_wait_for_job, run_every=2)(console)
        return None
    known = {job.job_id: job for job in jobs}
    # Links between pages drop the query; the session remembers.
    wanted = st.query_params.get("job") or st.session_state.get(CHOSEN)
    unknown = wanted is not None and wanted not in known
    if unknown:
        st.html('<h1 class="or-title">Which job?</h1>')
    with st.container(horizontal=True, vertical_alignment="bottom", key="page-head"):
        place = st.empty()
        controls = st.container(horizontal=True, vertical_alignment="bottom", width="content", key="page-controls")
    job_id = jobs[0].job_id if wanted is None else wanted
    # Before the controls, which on a narrow page are below it and would be moved by it.
    opened = None if unknown else _titled(place, console, job_id, title, pace=pace)
    if len(jobs) > 1 or unknown:
        with controls:
            chosen = _pick(known, None if unknown else job_id)
        if unknown:
            st.error(f"job: got {wanted!r}, expected the id of a job that this console knows. Choose one instead.")
        if chosen is None:
            return None
        job_id = chosen
    if st.query_params.get("job") != job_id:
        st.query_params["job"] = job_id  # so that a link shows what its sender saw
    if opened is None or opened.job_id != job_id:
        opened = _titled(place, console, job_id, title, pace=pace)
    return opened, controls


def _titled(
    place: DeltaGenerator, console: ConsoleService, job_id: str, title: Callable[[LiveJob], bool], *, pace: bool
) -> LiveJob:
    job = console.jobs.find(job_id)
    with place.container():
        if not title(job):
            components.job_title(job.spec, pace=pace)
    return job


def _pick(known: dict[str, JobSummary], job_id: str | None) -> str | None:
    options = list(known)
    names = {job.job_id: f"{job.name} · {job.condition.value} · {job.job_id}" for job in known.values()}
    return st.selectbox(  # type: ignore[no-any-return]
        "Job",
        options,
        index=None if job_id is None else options.index(job_id),
        format_func=names.__getitem__,
        placeholder="Choose a job",
        key=PICKER,
        width=340,
        on_change=_remember,
        args=(frozenset(known),),
    )


def _remember(known: frozenset[str]) -> None:
    """known: the jobs that were offered. Of one that is gone since, the browser still sends the words."""
    if st.session_state[PICKER] in known:
        address.moved()
        st.query_params["job"] = st.session_state[CHOSEN] = st.session_state[PICKER]
        left = ["plan", "follow", ITERATIONS]
        if st.query_params.get_all("plans") == st.session_state.get(BEGAN_WITH):
            left += ["plans", "baseline"]
        for name in left:
            st.query_params.pop(name, None)


def _wait_for_job(console: ConsoleService) -> None:
    if console.queries.list_jobs():
        st.rerun()
    st.caption("This page changes by itself once a job is there.")
