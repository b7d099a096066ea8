"""The picker of plans that pages share. The choice is in the URL, as a reference (app.plans.references)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import streamlit as st

from app.console import Console
from app.errors import ConsoleError
from app.heap import settle
from app.plans.references import OfJob, Reference, parse_reference
from app.plans.sources import Awaited, Source, find, measured_name, names, saved_names
from app.ui import text
from app.ui.schedule_facts import measured_words
from planner.columnar import ColumnarSchedule
from planner.errors import InputError
from planner.plan import Plan
from planner.schedule import Schedule

PICKER = "plan-picker"
WAIT_SECONDS = 0.5


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule, shared by all viewers."""
    return st.cache_resource(_schedule, max_entries=16, show_spinner="Reading the plan …")(plan.fingerprint, plan)  # type: ignore[no-any-return]


def _schedule(fingerprint: str, _plan: Plan) -> Schedule:
    """Keyed by the fingerprint; the plan itself is not hashed."""
    schedule = _plan.schedule()
    if not isinstance(schedule, ColumnarSchedule):
        settle(sum(schedule.op_counts.values()))
    return schedule


def pick_plan(console: Console, job_id: str | None, *, width: int = 420) -> Source | None:
    """One plan out of the job's and the library's; the one that `?plan=` names first. Raises ConsoleError.

    None: there is no plan to show yet, or it is being made; the page has then said so.
    """
    of_job = {**names(console, job_id, clock), **measured_name(console, job_id)} if job_id else {}
    options = {**of_job, **saved_names(console)}
    wanted = _wanted(console, job_id)
    if wanted is not None:
        options.setdefault(str(wanted.reference), wanted.name)
    if not options:
        return None
    chosen = st.selectbox(
        "Plan",
        list(options),
        index=list(options).index(str(wanted.reference)) if wanted else 0,
        format_func=options.__getitem__,
        key=PICKER,
        on_change=_remember,
        width=width,
    )
    return ready(console, parse_reference(chosen))


def clock(at: float) -> str:
    """POSIX seconds as the viewer's time of day; with the day where that is not today."""
    return text.moment(at, st.context.timezone, time.time())


def _wanted(console: Console, job_id: str | None) -> Source | Awaited | None:
    """What the URL asks for; a bare fingerprint is one of the job's. Says what is wrong with it."""
    said = st.query_params.get("plan")
    if said is None:
        return None
    try:
        return find(console, parse_reference(said if ":" in said or job_id is None else str(OfJob(job_id, said))))
    except (InputError, ConsoleError) as error:
        st.error(f"{error}. Choose one instead.")
        return None


def ready(console: Console, reference: Reference) -> Source | None:
    """The plan behind it; None while it is made, which the page then says and waits for."""
    found = find(console, reference)
    if isinstance(found, Source):
        return found
    wait_for(console, [reference])
    return None


def hold_still(source: Source) -> Source:
    """A measured iteration stays the same while it is looked at, until a newer one is asked for."""
    if source.measured is None:
        return source
    key = f"held-{source.reference}"
    held: Source = st.session_state.setdefault(key, source)
    newest, shown = source.measured, held.measured or source.measured
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(measured_words(shown))
        if newest.at != shown.at and st.button(f"Show iteration {newest.iteration}", key=f"newest-{source.job_id}"):
            st.session_state[key] = source
            st.rerun()
    return held


def wait_for(console: Console, references: Sequence[Reference]) -> None:
    """Says what is waited for, and runs the page again when something of it has come."""
    if references:
        st.fragment(_wait, run_every=WAIT_SECONDS)(console, references)


def _wait(console: Console, references: Sequence[Reference]) -> None:
    for reference in references:
        try:
            found = find(console, reference)
        except ConsoleError:
            st.rerun()  # the page says why
        if isinstance(found, Awaited):
            st.caption(found.words)
        else:
            st.rerun()


def _remember() -> None:
    st.query_params["plan"] = st.session_state[PICKER]
