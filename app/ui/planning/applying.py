"""Apply: puts the plan in force in a job that it fits."""

from __future__ import annotations

import streamlit as st

from openrecycle.agent.protocol import JobState
from openrecycle.app.console.service import Console
from openrecycle.app.plans.applying import misfit, use_plan
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui.access import actor
from openrecycle.app.ui.planning.state import PAGE, SAVED, say
from openrecycle.planner.plan import Plan

JOB = "planner-apply-job"


def apply(console: Console, plan: Plan) -> None:
    """A button that asks which job; where the plan does not fit, why not."""
    over = (JobState.FINISHED, JobState.STOPPED)
    jobs = {job.job_id: job.name for job in console.list_jobs() if job.state not in over}
    with st.popover("Apply to a job", icon=":material/play_circle:", key="planner-apply", disabled=not jobs):
        if not jobs:
            return
        job_id = st.selectbox("Job", list(jobs), format_func=lambda j: f"{jobs[j]} · {j}", key=JOB)
        why = misfit(console.job(job_id), plan)
        if why:
            st.caption(f"It does not fit this job: {why}.")
        else:
            st.caption("All workers take it up at the next iteration's boundary; nobody is restarted.")
        st.button(
            "Put in force",
            type="primary",
            key="planner-apply-go",
            disabled=bool(why),
            on_click=_apply,
            args=(console, plan),
        )


def _apply(console: Console, plan: Plan) -> None:
    try:
        reason = use_plan(console.job(st.session_state[JOB]), plan, actor(console))
    except ConsoleError as error:
        say(PAGE, f"The plan was not applied: {error}")
    else:
        say(SAVED, f"Applied: {reason}. Live shows the workers take it up.")
