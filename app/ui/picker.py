"""Which job a page shows: `?job=` of the URL, else the newest one."""

from __future__ import annotations

import streamlit as st

from app.console import Console
from app.ui import components
from app.view import JobSummary

CHOSEN = "chosen-job"
PICKER = "job-picker"


def choose_job(console: Console) -> JobSummary | None:
    """Draws the choice where there is one. None: there is no job, or none with the URL's id; the
    page has then said so."""
    jobs = sorted(console.list_jobs(), key=lambda job: job.created_at, reverse=True)
    if not jobs:
        _no_job(console)
        return None
    by_id = {job.job_id: job for job in jobs}
    # Links between pages drop the query; the session remembers.
    wanted = st.query_params.get("job") or st.session_state.get(CHOSEN)
    if wanted is not None and wanted not in by_id:
        st.error(f"job: got {wanted!r}, expected the id of a job that this console knows. Choose one below.")
    if len(jobs) > 1 or (wanted is not None and wanted not in by_id):
        names = {job.job_id: f"{job.name} · {job.state.value} · {job.job_id}" for job in jobs}
        chosen = st.selectbox(
            "Job",
            list(by_id),
            index=list(by_id).index(wanted) if wanted in by_id else None if wanted is not None else 0,
            format_func=lambda job_id: names[job_id],
            placeholder="Choose a job",
            key=PICKER,
            width=420,
            on_change=_remember,
        )
        if chosen is None:
            return None
        return by_id[chosen]
    return jobs[0]


def _remember() -> None:
    st.query_params["job"] = st.session_state[CHOSEN] = st.session_state[PICKER]


def _no_job(console: Console) -> None:
    address = (st.context.url or "http://127.0.0.1:8501").rstrip("/")
    address = address.removesuffix("/schedule")
    components.no_job(address)
    st.fragment(_wait_for_job, run_every=2)(console)


def _wait_for_job(console: Console) -> None:
    if console.list_jobs():
        st.rerun()
    st.caption("This page changes by itself once a job is there.")
