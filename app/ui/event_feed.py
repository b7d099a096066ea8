"""The event feed of Live: newest first, filtered by the address, with what still needs somebody's look."""

from __future__ import annotations

import time
from datetime import datetime
from html import escape

import streamlit as st

from openrecycle.app.console.service import ConsoleService
from openrecycle.app.console.view import EventView, JobView
from openrecycle.app.ui import address, text
from openrecycle.app.ui.access import actor, told

MARKS = {"error": "✕", "warning": "▲", "info": "·"}
# What the filter offers: words, and the kinds of events it lets through.
SHOW: dict[str, tuple[str, tuple[str, ...]]] = {
    "all": ("All", ()),
    "open": ("Need a look", ()),
    "failure": ("Failures", ("failure", "recovery", "worker")),
    "plan": ("Plans", ("plan", "generation")),
    "step": ("Steps", ("step",)),
    "operator": ("Operators", ("operator",)),
}
DEFAULT = "all"
# Characters that may be looked for.
MOST_WORDS = 200
SAID = "live-said"


def say_later(words: str) -> None:
    """Has the fragment's next run say this. A callback must not: what it writes takes the place of the
    page's first element, which is the style sheet."""
    st.session_state[SAID] = words


def say_now() -> None:
    if words := st.session_state.pop(SAID, None):
        st.toast(words)


def asked_for() -> tuple[str, str]:
    """What the filter is set to and the words to look for, by the address."""
    show = address.read("events", {key: key for key in SHOW}.get, address.one_of(SHOW))
    return show or DEFAULT, (address.read("find", str, "words") or "").strip()


def controls() -> tuple[str, str]:
    """Draws the filter; returns what `asked_for` does."""
    with st.container(horizontal=True, vertical_alignment="center", key="event-filter"):
        show = address.segmented_control(
            "Events",
            list(SHOW),
            default=DEFAULT,
            format_func=lambda key: SHOW[key][0],
            key="events",
            label_visibility="collapsed",
            wrap=True,
        )
        words = address.text_input(
            "Find in events",
            "",
            key="find",
            max_chars=MOST_WORDS,
            placeholder="Find, such as W1_2",
            label_visibility="collapsed",
            width=170,
        )
    return show, words.strip()


def filtering(show: str, words: str) -> bool:
    return show != DEFAULT or bool(words)


def chosen(events: tuple[EventView, ...], show: str, words: str) -> list[EventView]:
    """Those that the filter lets through."""
    kinds = SHOW.get(show, SHOW[DEFAULT])[1]
    wanted = words.casefold()
    return [
        e
        for e in events
        if (not kinds or e.kind in kinds)
        and (show != "open" or needs_look(e))
        and (wanted in e.text.casefold() or wanted == (e.worker or "").casefold())
    ]


def needs_look(event: EventView) -> bool:
    """Not where the console only says that it stood still: it has drawn the consequences itself."""
    return event.severity != "info" and event.kind != "console" and not event.seen_by


def feed(console: ConsoleService, view: JobView, events: list[EventView], zone: str | None) -> None:
    """The list, and a button that takes note of what nobody has yet."""
    st.html(feed_html(events, zone))
    open_ones = [e.seq for e in events if needs_look(e)]
    label = f"Acknowledge {text.count(len(open_ones), 'event')}" if open_ones else "Nothing to acknowledge"
    st.button(
        label,
        key="acknowledge",
        disabled=not open_ones,
        type="tertiary",
        icon=":material/done_all:",
        on_click=_acknowledge,
        args=(console, view.job_id, open_ones),
    )


def _acknowledge(console: ConsoleService, job_id: str, seqs: list[int]) -> None:
    with told(say_later):
        console.operators.acknowledge(job_id, seqs, actor(console))


def feed_html(events: list[EventView], zone: str | None, now: float | None = None) -> str:
    """Above the first event of each day but today's stands which day it was. now: POSIX seconds."""
    if not events:
        return '<div class="or-quiet or-feed">No event fits.</div>'
    rows, day = [], text.local(time.time() if now is None else now, zone).date()
    for event in events:
        at = text.local(event.at, zone)
        rows.append(_row(event, at, new_day=at.date() != day))
        day = at.date()
    return f'<ol class="or-events or-feed" tabindex="0" aria-label="Events, newest first">{"".join(rows)}</ol>'


def _times(event: EventView, at: datetime) -> str:
    """How often a line was repeated, and when last, in the zone that `at` is in."""
    if event.count < 2:
        return ""
    last = datetime.fromtimestamp(event.last_at, at.tzinfo)
    shown = f"{last:%H:%M:%S}" if last.date() == at.date() else f"{last:%H:%M:%S}, {last.day} {last:%B}"
    return f' <b class="or-times">{event.count:,} times, last {shown}</b>'


def _row(event: EventView, at: datetime, *, new_day: bool) -> str:
    look = f" or-{escape(event.severity)}" + (" or-open" if needs_look(event) else "")
    seen = f' title="acknowledged by {escape(event.seen_by)}"' if event.seen_by else ""
    tick = '<b class="or-seen" aria-label="acknowledged">✓</b> ' if event.seen_by else ""
    on = f'<b class="or-day">{at:%A} {at.day} {at:%B} {at.year}</b>' if new_day else ""
    return (
        f'<li class="{look.strip()}"{seen}>{on}'
        f'<time datetime="{at.isoformat(timespec="seconds")}">{at:%H:%M:%S}</time>'
        f'<i title="{escape(event.severity)}">{MARKS.get(event.severity, "·")}</i>'
        f"<span>{tick}{escape(event.text)}{_times(event, at)}</span></li>"
    )
