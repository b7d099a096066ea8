"""What a page says when it can't be drawn: a sentence instead of the framework's box, and all of it in the log."""

from __future__ import annotations

import secrets

import streamlit as st
import structlog

from openrecycle.app.runtime.errors import ConsoleError

log = structlog.get_logger()


def page_failed(error: Exception) -> bool:
    """For st.App: of whatever a page, a part of one that is drawn anew by itself, or a callback let through.

    True: nothing else is shown of it.
    """
    if isinstance(error, ConsoleError):
        st.error(str(error))
        return True
    mark = secrets.token_hex(4)
    log.error("a page could not be drawn", mark=mark, exc_info=error)
    st.error(
        f"This part of the page could not be drawn: an error of the console, in its log under {mark}. "
        "No job is touched by it. Load the page again; if that does not help, restart the console. Training goes on "
        "meanwhile, unless a worker dies: then the others wait for the console. What jobs report is kept."
    )
    return True
