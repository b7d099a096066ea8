"""Live's event feed, and its dialog for one worker.

The feed is newest first, filtered by values in the address, and marks events that nobody has acknowledged yet. The
dialog has one worker's details, with drain, kill and restart, each of which asks for a confirmation in the same place.
All text from outside is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from html import escape
from itertools import groupby
from typing import NamedTuple

import streamlit as st

from openrecycle.agent.messages.protocol import Doing
from openrecycle.app.charts import text
from openrecycle.app.charts.progress import LOOKS, memory, op_times
from openrecycle.app.charts.theme import palette
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.console.view import EventView, JobView, StateInterval, WorkerDetail, WorkerView
from openrecycle.app.jobs.states import ALIVE, HOLDING, OUT, Loss, RankState, RoleState
from openrecycle.app.observing.recorder import Series
from openrecycle.app.ui import address, components, facts, tables
from openrecycle.app.ui.access import actor, told
from openrecycle.planner.jobs.words import names
from openrecycle.planner.plans.drawing import OP_WORDS

# -- the event feed of Live ---------------------------------------------------------------------

MARKS = {"error": "✕", "warning": "▲", "info": "·"}
# The choices of the filter: their words, and the kinds of events that they show.
SHOW: dict[str, tuple[str, tuple[str, ...]]] = {
    "all": ("All", ()),
    "open": ("Need a look", ()),
    "failure": ("Failures", ("failure", "recovery", "worker")),
    "plan": ("Plans", ("plan", "generation")),
    "step": ("Steps", ("step",)),
    "operator": ("Operators", ("operator",)),
}
DEFAULT = "all"
# How many characters the search field takes.
MOST_WORDS = 200
SAID = "live-said"


def say_later(words: str) -> None:
    """Has the fragment's next run show this message. A callback can't do so itself: what it draws would replace the
    page's first element, which is the style sheet."""
    st.session_state[SAID] = words


def say_now() -> None:
    if words := st.session_state.pop(SAID, None):
        st.toast(text.plain_markdown(words))


def asked_for() -> tuple[str, str]:
    """Returns the filter and the words to search for, from the address."""
    show = address.read("events", {key: key for key in SHOW}.get, address.one_of(SHOW))
    return show or DEFAULT, (address.read("find", str, "words") or "").strip()


def controls() -> tuple[str, str]:
    """Draws the filter; returns the same as `asked_for`."""
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


def chosen(events: tuple[EventView, ...], show: str, words: str) -> list[EventView]:
    """Returns the events that the filter shows."""
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
    """Says whether an event still has to be acknowledged. The console's own events need not be, such as that it stood
    still, since it has acted on them itself."""
    return event.severity != "info" and event.kind != "console" and not event.seen_by


def feed(console: ConsoleService, view: JobView, events: list[EventView], zone: str | None) -> None:
    """Draws the events, and a button that acknowledges those that nobody has acknowledged yet."""
    st.html(feed_html(events, zone) if view.events else _quiet("None so far."))
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


def _quiet(words: str) -> str:
    return f'<div class="or-quiet or-feed">{words}</div>'


def feed_html(events: list[EventView], zone: str | None, now: float | None = None) -> str:
    """Returns the events as HTML. The first event of each day but today has the date above it. now: POSIX seconds."""
    if not events:
        return _quiet("No event fits.")
    rows, day = [], text.local(time.time() if now is None else now, zone).date()
    for event in events:
        at = text.local(event.at, zone)
        rows.append(_row(event, at, new_day=at.date() != day))
        day = at.date()
    return f'<ol class="or-events or-feed" tabindex="0" aria-label="Events, newest first">{"".join(rows)}</ol>'


def _times(event: EventView, at: datetime) -> str:
    """Says how often a line was repeated, and when it was last, in the zone of `at`."""
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


# -- one worker's details, with drain, kill and restart -----------------------------------------

# How many of the newest stays in a state are listed below the bar.
NEWEST = 8


def facts_html(detail: WorkerDetail) -> str:
    worker = detail.worker
    layers = text.layers(detail.held, worker.stage) if detail.held else ""
    if detail.coming and (then := text.layers(detail.coming, worker.stage)) != layers:
        layers += f", soon {then}"
    gone = worker.state in OUT and worker.state is not RoleState.LEAVING
    # A worker that was drained is in no generation any more.
    at = [f"{worker.iteration:,}", f"generation {worker.generation}" if worker.generation else ""]
    if not gone:
        at.append(worker.phase)
    rows = {
        "State": LOOKS[worker.state][0] + (f" – {worker.detail}" if worker.detail else ""),
        "Place": f"pipeline {worker.pipeline}, stage {worker.stage}",
        "Layers": f"{layers} of {sum(detail.held)}" if layers and not gone else "",
        "Last iteration" if gone else "Iteration": ", ".join(filter(None, at)),
        "Was at" if gone else "At": doing(worker.doing, limit=not gone) if worker.doing else "",
        "Re-routed work": text.count(worker.takes_rerouted, "micro-batch", "micro-batches") + " per iteration"
        if worker.takes_rerouted
        else "",
        "Last heartbeat": text.age(worker.heartbeat_age),
        "Process": _process(worker),
        "Ranks": _ranks(detail),
        "Memory, last" if gone else "Memory in use": text.size(worker.resident_bytes) if worker.resident_bytes else "",
        "May take": reckoned_words(detail),
        "Activations, by plan": f"at most {text.count(detail.activations, 'micro-batch', 'micro-batches')} at once"
        if detail.activations is not None
        else "",
    }
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items() if v)
    return f'<dl class="or-facts">{items}</dl>'


def reckoned_words(detail: WorkerDetail) -> str:
    """Says how much memory the worker may take, as estimated before the start."""
    if detail.may_take is None:
        return ""
    return f"up to {text.size(detail.may_take)} on its device, beside the program itself (worked out before the start)"


def doing(at: Doing, *, limit: bool = True) -> str:
    """Says what a training thread is doing: `forward of micro-batch 1.3 for 2.1 s, may take 10.0 s`. limit: includes
    the last part."""
    words = {"waiting": "waiting for another worker", "data": "loading data", "validation": "settling the last step"}
    what = OP_WORDS.get(at.kind, words.get(at.kind, at.kind))
    of = "" if at.micro_batch is None or at.kind == "waiting" else f" of micro-batch {at.pipeline}.{at.micro_batch}"
    most = "" if at.limit is None or not limit else f", may take {at.limit:.1f} s"
    return f"{what}{of} for {at.seconds:.1f} s{most}"


def _process(worker: WorkerView) -> str:
    """Says which process holds the role, and as what it was started; or which role it holds now."""
    if worker.moved_to:
        return f"none: it holds {worker.moved_to} now"
    if not worker.pid:
        return ""
    words = f"{worker.pid} on {worker.host}"
    if worker.slot != worker.name:
        words += f", started as {worker.slot}"
    return f"{words}; it has ended" if worker.state in (RoleState.FAILED, RoleState.DRAINED) else words


def _ranks(detail: WorkerDetail) -> str:
    if not detail.ranks:
        return ""
    spare = sum(rank.state is RankState.SPARE for rank in detail.ranks)
    words = f"{len(detail.ranks)}, which share each layer; the process is rank 0"
    if any(rank.state is not RankState.RUNNING for rank in detail.ranks):
        words = str(len(detail.ranks))
    if spare:
        words = f"{len(detail.ranks)}, of which {spare} {'is' if spare == 1 else 'are'} spare"
    if detail.made_of:
        words += f"; made of what was left of {names(detail.made_of, last=' and ')}"
    return words


_OF_RANKS = {
    RankState.RUNNING: ("running", "runs"),
    RankState.DEAD: ("failed", "has ended"),
    RankState.SPARE: ("empty", "spare: ended with its worker, and nothing runs in its place"),
    RankState.USED: ("moved", "was spare; in its place runs a rank of {}"),
}


def ranks_html(detail: WorkerDetail) -> str:
    """Returns HTML of each rank's process, and below it what will become of spare ranks."""
    rows = []
    for rank in detail.ranks:
        look, words = _OF_RANKS[rank.state]
        mark = f'<i class="or-shape or-look-{look}"></i> '
        rows.append([f"{rank.number}", f"{rank.pid}", escape(rank.host), mark + escape(words.format(rank.used_by))])
    note = ""
    if any(rank.state is RankState.SPARE for rank in detail.ranks):
        note = (
            f'<div class="or-quiet">{len(detail.ranks)} spare ranks on one node make a worker again, by themselves, in '
            "the stage that has the fewest. Those of different nodes don't.</div>"
        )
    return tables.table_html(["Rank", "process", "host", "state"], rows, "Ranks") + note


# Digits of times beside each other, enough to show that they differ.
OP_DIGITS = 4


def op_times_html(detail: WorkerDetail) -> str:
    """Returns HTML of the measured op times beside the plan's and the peers'."""
    rows = []
    for op in detail.op_times:
        cells = [OP_WORDS[op.kind], text.milliseconds(op.measured, OP_DIGITS)]
        for other in (op.planned, op.peers):
            if other is None:
                cells.append("–")
            else:
                share = f" ({text.percent(op.measured / other - 1, sign=True)})" if other > 0 else ""
                cells.append(text.milliseconds(other, OP_DIGITS) + share)
        rows.append(cells)
    heads = ["Op", "measured", "plan", "median of its peers"]
    return tables.table_html(heads, rows, "Op times, smoothed over the last heartbeats")


def over_time_html(series: Series, planned: Mapping[str, float]) -> str:
    """Returns HTML of the charts' figures: lowest, mean and highest of all heartbeats, and the plan's. planned: ms by
    op kind."""
    rows = []
    for kind, words in OP_WORDS.items():
        if kind in series.metrics:
            plan = text.milliseconds(planned[kind]) if kind in planned else "–"
            rows.append([words, *map(text.milliseconds, _figures(series, kind)), plan])
    if "resident_bytes" in series.metrics:
        rows.append(["Memory", *(text.size(round(value)) for value in _figures(series, "resident_bytes")), "–"])
    caption = f"{text.count(sum(series.beats), 'heartbeat')} in this time"
    return tables.table_html(["", "lowest", "mean", "highest", "plan"], rows, caption)


def _figures(series: Series, name: str) -> tuple[float, float, float]:
    """Returns the lowest value, the mean weighted by heartbeats, and the highest value."""
    metric = series.metrics[name]
    weighted = [(mean, n) for mean, n in zip(metric.mean, series.beats, strict=True) if mean is not None]
    return (
        min(v for v in metric.low if v is not None),
        sum(mean * n for mean, n in weighted) / sum(n for _, n in weighted),
        max(v for v in metric.high if v is not None),
    )


def stays_html(detail: WorkerDetail, zone: str | None, now: float) -> str:
    """Returns HTML of a worker's states over time, as a bar to scale, and the newest changes in words."""
    stays = [s for s in detail.stays if s.state != RoleState.EMPTY] or list(detail.stays)
    if not stays:
        return '<div class="or-quiet">No change of state is recorded.</div>'
    begin, end = stays[0].begin, stays[-1].end
    whole = max(end - begin, 1e-9)
    bar = "".join(
        f'<i class="or-in-{escape(state)}" style="width:{100 * sum(s.end - s.begin for s in group) / whole:.3f}%"></i>'
        for state, group in _runs(stays)
    )
    rows = "".join(
        f'<li><time>{text.moment(s.begin, zone, now)}</time><i class="or-shape or-look-{escape(s.state)}"></i>'
        f"<span>{escape(LOOKS[RoleState(s.state)][0])}</span>"
        f"<span>{text.milliseconds(1000 * (s.end - s.begin))}</span></li>"
        for s in reversed(stays[-NEWEST:])
    )
    words = f"States from {text.moment(begin, zone, now)} until now"
    return f'<div class="or-stays" role="img" aria-label="{words}">{bar}</div><ol class="or-changes">{rows}</ol>'


def _runs(stays: list[StateInterval]) -> list[tuple[str, list[StateInterval]]]:
    return [(state, list(group)) for state, group in groupby(stays, lambda s: s.state)]


def log_html(detail: WorkerDetail, zone: str | None, now: float) -> str:
    if not detail.log:
        return (
            '<div class="or-quiet">Nothing yet. What the worker\'s process prints comes here with its '
            "heartbeats; the console keeps the newest lines in memory.</div>"
        )
    rows = "".join(
        f"<li><time>{text.moment(line.at, zone, now)}</time> {escape(line.text)}</li>" for line in detail.log
    )
    return f'<ol class="or-lines" tabindex="0" aria-label="Log, oldest first">{rows}</ol>'


ASKED = "worker-asked-for"
IN_ADDRESS = "worker"
# Names in the address of the dialog's controls.
TABS, SPAN = "worker-tabs", "worker-span"
REFRESH = 2.0
# On a busy machine a refresh of the page that was sent before the dialog was closed can wait for seconds. The dialog
# stood open again then, with what was to be confirmed done.
CLOSED_SECONDS = 10.0
# How far the charts reach back: words, seconds.
SPANS = {"10 min": 600.0, "1 hour": 3600.0, "1 day": 86_400.0}
DRAINABLE = HOLDING - {RoleState.SUSPECT}
EMPTY = (RoleState.FAILED, RoleState.DRAINED, RoleState.MOVED, RoleState.EMPTY)
# The name in the session of an action that was asked for and is not confirmed yet.
ARMED = "worker-armed"


def open_worker(name: str) -> None:
    """For a callback: opens the dialog of worker `name` at the page's next run, and writes it into the address."""
    address.put(IN_ADDRESS, name)
    st.session_state[ASKED] = True
    _arm(None)


def page_wanted() -> None:
    """Runs the whole page if a dialog is to be opened, which a fragment can't do. Call it first in the fragment in
    which workers are clicked, since nothing need be drawn before that."""
    if st.session_state.get(ASKED):
        st.rerun()


def show_opened(console: ConsoleService, job_id: str) -> None:
    """Shows the dialog of the worker that the address names, if any. Call it from the page's main run: a fragment that
    runs again by itself would close the dialog."""
    st.session_state.pop(ASKED, None)
    name = address.read(IN_ADDRESS, str, "a worker")
    if name is None:
        _arm(None)
        return

    def dialog() -> None:
        with told():
            view = console.queries.view(job_id)
            _actions(console, view, console.queries.worker_detail(view, name, time.time()).worker)
            st.fragment(_detail, run_every=REFRESH)(console, job_id, name)

    st.dialog(f"Worker {name}", width="large", on_dismiss=_close)(dialog)()


def _close() -> None:
    _arm(None)
    address.put(IN_ADDRESS, None, CLOSED_SECONDS)


def _detail(console: ConsoleService, job_id: str, name: str) -> None:
    with told():
        now = time.time()
        _tabs(console, job_id, console.queries.worker_detail(console.queries.view(job_id), name, now), now)


def _tabs(console: ConsoleService, job_id: str, detail: WorkerDetail, now: float) -> None:
    zone = st.context.timezone
    present, over_time, history, log = address.tabs(["Now", "Over time", "History", "Log"], key=TABS)
    with present:
        st.html(facts_html(detail))
        if detail.ranks:
            st.html(ranks_html(detail))
        if detail.op_times:
            st.html(op_times_html(detail))
    with over_time, told():
        _over_time(console, job_id, detail)
    with history:
        st.html(stays_html(detail, zone, now))
        st.html(feed_html(list(detail.events), zone, now))
    with log:
        st.html(log_html(detail, zone, now))


def _over_time(console: ConsoleService, job_id: str, detail: WorkerDetail) -> None:
    """Draws op times beside the plan's, and memory, as charts and in figures."""
    name = detail.worker.name
    span = address.segmented_control(
        "Span", list(SPANS), default=next(iter(SPANS)), key=SPAN, label_visibility="collapsed"
    )
    job, until = console.jobs.find(job_id), time.time() + 1
    if job.state.over and detail.stays:
        until = detail.stays[-1].begin + 1  # nothing was reported after that
    series = console.recorder.series(job, name, until - SPANS[span], until)
    if not series.metrics:
        st.html('<div class="or-quiet">It has reported nothing in this time.</div>')
        return
    colours = palette(st.context.theme.type)
    planned = {op.kind: op.planned for op in detail.op_times if op.planned is not None}
    if any(kind in series.metrics for kind in OP_WORDS):
        alt = f"Op times of {name} over time, by op kind. The table below has the same in figures."
        components.live_chart(op_times(series, planned, colours), "worker-op-times", alt)
    if "resident_bytes" in series.metrics:
        alt = f"Memory of {name}'s process over time. The table below has the same in figures."
        components.live_chart(memory(series, colours), "worker-memory", alt)
        if words := reckoned_words(detail):
            components.quiet(f"It may take {words}.")
    st.html(over_time_html(series, planned))


@dataclass(frozen=True)
class _DialogAction:
    """An action that the dialog offers. kind: for keys and styles. helps: False if it could do no good, so that it has
    no button. words, warning: shown at the confirmation. done: shown afterwards."""

    kind: str
    label: str
    words: str
    helps: bool
    done: str
    act: Callable[[], object]
    warning: str = ""


class _Armed(NamedTuple):
    """An action that waits for its confirmation. process: the worker's process id, with its start, since ids are used
    again. peers: the workers that would do its work."""

    job_id: str
    worker: str
    kind: str
    process: tuple[int, float]
    peers: tuple[str, ...]


def _actions(console: ConsoleService, view: JobView, worker: WorkerView) -> None:
    """Draws the actions for a worker. A click on a button only asks for a confirmation, in the same place."""
    offered = _offered(console, view, worker)
    if worker.state in ALIVE and not view.spec.demo:
        st.caption("Only the processes of a demo job can be killed from here.")
    if worker.state is RoleState.EMPTY and not view.generation and not offered and view.state not in facts.OVER:
        st.caption("It has not registered yet: look at its launcher.")
    if not offered:
        return
    process, peers = (worker.pid, worker.since), tuple(facts.living_peers(view, worker))
    here = partial(_Armed, view.job_id, worker.name, process=process, peers=peers)
    armed: _Armed | None = st.session_state.get(ARMED)
    asked = next((a for a in offered if armed == here(kind=a.kind)), None)
    if asked is not None:
        _ask(asked)
        return
    if armed is not None and armed.worker == worker.name:
        st.caption(f"{worker.name} is not as it was when you asked. Look at it anew.")
    for action in offered:
        if not action.helps:
            st.caption(action.words)
    with st.container(horizontal=True, key="worker-actions"):
        for action in offered:
            if action.helps:
                args = (here(kind=action.kind),)
                st.button(action.label.split()[0], key=f"ask-{action.kind}", on_click=_arm, args=args)


def _arm(wanted: _Armed | None) -> None:
    st.session_state[ARMED] = wanted


def _offered(console: ConsoleService, view: JobView, worker: WorkerView) -> list[_DialogAction]:
    """What can be done with it, the mildest first."""
    name, job_id = worker.name, view.job_id
    process, made = text.plain_markdown(facts.process_words(worker)), []
    loss = console.operators.loss_of(job_id, name) if worker.state in ALIVE else Loss()
    if worker.state in DRAINABLE and facts.living_peers(view, worker):
        made.append(
            _DialogAction(
                "drain",
                f"Drain {name}",
                f"**Drain {name}?** This is {process}. {facts.consequence_of_drain(view, worker, loss.share)}",
                True,
                f"{name} is asked to leave",
                lambda: console.operators.drain(job_id, name, actor(console)),
            )
        )
    if worker.state in ALIVE and view.spec.demo:
        consequence, warning = facts.consequence_of_kill(view, worker, loss)
        made.append(
            _DialogAction(
                "kill",
                f"Kill {name}",
                f"**Kill {name}?** {text.capital(process)} gets SIGKILL, as if its machine had died. {consequence}",
                True,
                f"SIGKILL sent to {name}",
                lambda: console.operators.kill(job_id, name, actor(console), worker.pid),
                warning,
            )
        )
    if worker.state in EMPTY and console.operators.can_restart(job_id, name):
        consequence, helps = facts.consequence_of_restart(view, worker)
        verb = "Restart" if worker.state in (RoleState.FAILED, RoleState.DRAINED) else "Start"
        made.append(
            _DialogAction(
                "restart",
                f"{verb} {name}",
                f"**{verb} {name}?** {consequence}",
                helps,
                f"The launcher is asked to start {name}",
                lambda: console.operators.restart(job_id, name, actor(console)),
            )
        )
    return made


def _ask(action: _DialogAction) -> None:
    with st.container(border=True, key=f"act-{action.kind}"):
        st.markdown(action.words)
        if action.warning:
            st.warning(action.warning, icon=":material/warning:")
        with st.container(horizontal=True, horizontal_alignment="right"):
            st.button("Cancel", key="worker-cancel", on_click=_arm, args=(None,))
            confirmed = st.button(action.label, type="primary", key="worker-confirm", disabled=not action.helps)
    if confirmed:
        with told():
            action.act()
            st.toast(action.done)
            _close()
            st.rerun()
