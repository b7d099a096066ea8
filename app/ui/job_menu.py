"""What can be done with a job as a whole: its history as a file, and away with it when it is over."""

from __future__ import annotations

from html import escape

import streamlit as st

from openrecycle.agent.messages.protocol import API
from openrecycle.app.console.service import Console
from openrecycle.app.console.view import JobHead
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import text
from openrecycle.app.ui.access import actor
from openrecycle.app.ui.event_feed import say_later
from openrecycle.app.ui.picker import forget

NAME = "delete-name"


def job_menu(console: Console, head: JobHead) -> None:
    """Draws the button; what is behind it acts only after it was confirmed."""
    name, job_id = head.spec.name, head.job_id
    with st.popover("Job", icon=":material/folder:", key=f"job-menu-{job_id}"):
        st.markdown("**History**")
        link = f"{API}/jobs/{escape(job_id)}/history.zip"
        st.html(f'<a href="{link}" download>Download all that is stored</a>')
        st.caption("Iterations, events, op times, measured iterations and plans, as a zip file that can be imported.")
        st.divider()
        st.markdown("**Delete this job**")
        if why := console.histories.kept_for(job_id):
            st.caption(f"It can be deleted when it has ended; it {text.plain_markdown(why)}.")
            return
        st.caption(
            "All that is stored of it is gone for good; download its history first if you may want it back. "
            "Plans that other jobs use are kept, and so is the audit log."
        )
        key = f"{NAME}-{job_id}"
        typed = st.text_input("Its name, to confirm", key=key, placeholder=name, max_chars=200)
        st.button(
            "Delete this job",
            key="act-kill-job",
            type="primary",
            disabled=typed.strip() != name.strip(),
            help=None if typed.strip() == name.strip() else "Type the job's name above, then press Enter.",
            on_click=_delete,
            args=(console, job_id, name),
        )


def _delete(console: Console, job_id: str, name: str) -> None:
    try:
        console.histories.delete(job_id, actor(console))
    except ConsoleError as error:
        say_later(str(error))
    else:
        forget()
        say_later(f"{name} is deleted")
