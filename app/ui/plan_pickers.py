"""Controls for plans that several pages share.

The picker writes its choice into the URL as a reference (app.plans.sources). The export button has one download per
format, made when it is asked for. A plan from a file is read in a child process, kept in the library under the file's
name, and shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator
from streamlit.runtime.uploaded_file_manager import UploadedFile

from openrecycle.app.charts import text
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.files import Export, Reading, ReadPlan, offers, render
from openrecycle.app.plans.sources import (
    NOT_KEPT,
    MeasuredReference,
    OfJob,
    PendingPlan,
    Reference,
    Saved,
    Source,
    parse_reference,
    pinned,
)
from openrecycle.app.runtime.errors import PLAN_MIB, ConsoleError
from openrecycle.app.ui import address
from openrecycle.app.ui.access import actor, say_error, why_not
from openrecycle.app.ui.facts import measured_words
from openrecycle.planner.jobs.errors import InputError

PICKER = "plan-picker"
# FOLLOW is in the URL if the plan there is the one in force, and the page follows the job. FOLLOWED in the session is
# that job.
FOLLOW, FOLLOWED = "follow", "followed-job"
TOGGLE = "follow-job"
WAIT_SECONDS = 0.5


def pick_plan(console: ConsoleService, job_id: str | None, notes: DeltaGenerator) -> Source | None:
    """Draws the choice of one plan of the job or the library, at first the one that `?plan=` names, and returns it.
    Returns None if there is no plan yet, or it is being made, which the page then says. Raises ConsoleError.

    notes: the place for messages about the link. The address always names the plan that is shown, and never "in force";
    `?follow=1` is there if the page will go on to the job's next plan.
    """
    of_job = {**console.sources.names(job_id, clock), **console.sources.measured_name(job_id)} if job_id else {}
    options = {**of_job, **console.sources.saved_names()}
    place = st.container(width=420)
    wanted, understood = _wanted(console, job_id, notes, others=bool(options))
    if wanted is not None:
        options.setdefault(str(wanted.reference), wanted.name)
    if not options:
        return None
    shown = str(wanted.reference) if wanted else next(iter(options))
    if st.session_state.get(PICKER, shown) != shown:
        st.session_state[PICKER] = shown
    chosen = place.selectbox(
        "Plan",
        list(options),
        index=list(options).index(shown),
        format_func=options.__getitem__,
        key=PICKER,
        on_change=_remember,
        args=(frozenset(options),),
    )
    found = ready(console, parse_reference(chosen))
    if found is not None and understood and (wanted is not None or found.reference == OfJob(job_id or "")):
        _into_address(found, job_id)
    return found


def _into_address(source: Source, job_id: str | None) -> None:
    """Writes the plan into the address. Somebody who opens the link later sees the same plan, and follows the job if
    the plan is still in force then."""
    st.query_params["plan"] = str(pinned(source))
    follows = source.job_id == job_id and source.reference == OfJob(source.job_id or "")
    st.session_state[FOLLOWED] = source.job_id if follows else None
    if follows:
        st.query_params[FOLLOW] = "1"
    else:
        st.query_params.pop(FOLLOW, None)


def clock(at: float) -> str:
    """Formats POSIX seconds as the viewer's time of day, with the date if that is not today."""
    return text.moment(at, st.context.timezone, time.time())


def _wanted(
    console: ConsoleService, job_id: str | None, notes: DeltaGenerator, *, others: bool
) -> tuple[Source | PendingPlan | None, bool]:
    """Returns the plan that the URL asks for, else the plan in force; a fingerprint alone names one of the job's plans.
    The second value is False if the URL asks for something that can't be shown; the URL is left as it is then. others:
    there are plans to choose instead."""
    said = st.query_params.get("plan")
    in_force = console.sources.find(OfJob(job_id)) if job_id and console.jobs.find(job_id).state.current else None
    found: Source | PendingPlan | None = in_force
    understood = True
    if said is not None:
        reference: Reference | None = None
        try:
            reference = parse_reference(said if ":" in said or job_id is None else str(OfJob(job_id, said)))
            found = console.sources.find(reference)
        except (InputError, ConsoleError) as error:
            understood = False
            say_error(f"{error}. Choose one instead." if others else f"{error}.", notes)
            if isinstance(reference, MeasuredReference) and isinstance(error, ConsoleError) and error.code == NOT_KEPT:
                notes.button(
                    "Show the newest that was measured", on_click=_show, args=(newest(reference),), key="show-newest"
                )
    if isinstance(in_force, Source) and job_id is not None and _follows(console, found, in_force, job_id, notes):
        return in_force, understood
    if isinstance(found, Source) and found.measured is not None:
        return replace(found, reference=pinned(found)), understood
    return found, understood


def _follows(
    console: ConsoleService, found: Source | PendingPlan | None, in_force: Source, job_id: str, notes: DeltaGenerator
) -> bool:
    """Draws the switch that follows the job, and returns whether the page shows the plan in force, whichever that is.

    A link with `?follow=1` names the plan that was in force when it was made. It follows the job only if that plan is
    still in force; the page that it was copied from follows in any case."""
    same = isinstance(found, Source) and found.plan.fingerprint == in_force.plan.fingerprint
    linked = FOLLOW in st.query_params
    known = FOLLOWED in st.session_state
    asked = isinstance(found, Source) and found.reference == in_force.reference
    wanted = asked or (linked and (same or st.session_state.get(FOLLOWED) == job_id))
    if known:
        st.session_state[TOGGLE] = wanted
    if console.jobs.find(job_id).state.over:
        return asked  # no other plan will come into force
    # At first the browser's state of the switch counts: the page may have been open when the console was restarted.
    follows = st.toggle(
        "Follow the job",
        **({} if known else {"value": wanted}),
        key=TOGGLE,
        on_change=_turn,
        args=(str(in_force.reference), str(pinned(found)) if isinstance(found, Source) else None),
        help="Show the plan in force, and the next one as soon as it comes into force.",
    )
    if not known and follows and linked:
        return True
    if linked and not wanted:
        notes.info("The job runs another plan by now. This is the plan that was in force when the link was made.")
        notes.button("Show the plan in force", on_click=_show, args=(in_force.reference,), key="show-in-force")
    return wanted


def _turn(in_force: str, shown: str | None) -> None:
    show_instead(None, in_force if st.session_state[TOGGLE] or shown is None else shown)


def newest(reference: Reference) -> MeasuredReference:
    """Returns the reference to the newest iteration of the same job. reference: to an iteration as it ran."""
    assert isinstance(reference, MeasuredReference)
    return MeasuredReference(reference.job_id)


def ready(console: ConsoleService, reference: Reference) -> Source | None:
    """Returns the plan of a reference; None while it is being made, which the page then says and waits for."""
    found = console.sources.find(reference)
    if isinstance(found, Source):
        return found
    wait_for(console, [reference])
    return None


def say_measured(console: ConsoleService, source: Source, show: Callable[[Reference, Reference], None]) -> None:
    """Draws which measured iteration is shown, and a button for the newest one; the page does not change by itself.
    show: called back with the reference that is shown and the one to show instead."""
    shown = source.measured
    if shown is None:
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(measured_words(shown))
        last = console.measuring.iteration(console.jobs.find(shown.job_id))
        if last is not None and last.at > shown.at:
            st.button(
                f"Show iteration {last.iteration}",
                key=f"newest-{shown.job_id}",
                on_click=show,
                args=(source.reference, newest(source.reference)),
            )


def wait_for(console: ConsoleService, references: Sequence[Reference]) -> None:
    """Shows what is waited for, and runs the page again as soon as one of the plans is there."""
    if references:
        st.fragment(_wait, run_every=WAIT_SECONDS)(console, references)


def _wait(console: ConsoleService, references: Sequence[Reference]) -> None:
    for reference in references:
        try:
            found = console.sources.find(reference)
        except ConsoleError:
            st.rerun()  # the page will say why
        if isinstance(found, PendingPlan):
            st.caption(found.words)
        else:
            st.rerun()


def _remember(known: frozenset[str]) -> None:
    """Takes the choice. known: the plans that were offered; a browser may still send an older name of a plan."""
    if st.session_state[PICKER] in known:
        show_instead(None, st.session_state[PICKER])


def _show(reference: Reference) -> None:
    show_instead(None, reference)


def show_instead(_: Reference | None, reference: Reference | str) -> None:
    """For callbacks: has the page show another plan."""
    address.moved()
    st.query_params["plan"] = str(reference)
    st.query_params.pop(FOLLOW, None)


def export_button(export: Export, *, key: str = "export") -> None:
    """Draws a menu with every format of a plan; a format that is refused is shown with its reason."""
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
                st.caption(f"Not for this plan: {offer.refusal.detail}.")


READING = "plan-upload-reading"
LOOK_SECONDS = 0.5


def file_uploader(label: str, *, key: str, take: Callable[[UploadedFile], object], **look: Any) -> None:
    """Draws an uploader for a JSON file, which is emptied once a file was taken, since that may have megabytes. take:
    called back with the file. look: passed on to Streamlit."""
    turn = st.session_state.get(key, 0)

    def taken() -> None:
        if (file := st.session_state[f"{key}-{turn}"]) is not None:
            st.session_state[key] = turn + 1
            take(file)

    st.file_uploader(label, "json", key=f"{key}-{turn}", on_change=taken, max_upload_size=PLAN_MIB, **look)


def open_file(console: ConsoleService, show: Callable[[str], None]) -> None:
    """Draws the button that opens a file, and beside it how far the reading is, or what was wrong with the file.

    show: called with the reference of the plan, once it is there.
    """
    refused = why_not(console)
    with st.popover("Open a file", icon=":material/upload_file:", key="plan-upload"):
        file_uploader(
            "A plan (JSON), as `openrecycle plan --out` writes it",
            key="plan-upload-turn",
            take=partial(_begin, console),
            disabled=bool(refused),
            help=refused or "It is kept in the library under the file's name.",
        )
    show_reading(show)


def read_file(console: ConsoleService, name: str, document: bytes) -> None:
    """For a callback: begins to read a file. Raises ConsoleError for people who may only look."""
    by = actor(console)
    st.session_state[READING] = console.plans.uploads.begin(name, document, partial(_keep, console, by))


def show_reading(show: Callable[[str], None]) -> None:
    """Draws how far a reading is, or what was wrong with the file; passes the finished plan to `show`."""
    reading: Reading | None = st.session_state.get(READING)
    if reading is None:
        return
    if not reading.over:
        st.fragment(_read, run_every=LOOK_SECONDS)(reading)
    elif reading.error:
        address.field_error(reading.error, "stretch")
    else:
        del st.session_state[READING]
        show(str(Saved(reading.kept)))
        st.rerun()


def _begin(console: ConsoleService, file: UploadedFile) -> None:
    try:
        read_file(console, file.name, file.getvalue())
    except ConsoleError as error:
        st.session_state[READING] = failed = Reading(file.name, 0)
        failed.error = str(error)


def _keep(console: ConsoleService, by: str, plan: ReadPlan) -> str:
    kept = console.plans.library.save_read(plan)
    console.security.audit.record(by, "save plan", kept, detail=plan.name)
    return kept


def _read(reading: Reading) -> None:
    if reading.over:
        st.rerun()
    took = text.seconds(time.monotonic() - reading.began)
    st.caption(f"Reading and checking {text.plain_markdown(reading.name)} ({text.size(reading.size)}) … {took}")
