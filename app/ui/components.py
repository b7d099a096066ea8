"""The console's own pieces of HTML: cards, the coordinator's sentence, recovery, legend; and what pages share.

Every text that comes from outside is escaped here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from html import escape
from typing import Any, NamedTuple

import plotly.graph_objects as go
import streamlit as st

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.console.service import get_console
from openrecycle.app.console.view import JobView, RecoveryView
from openrecycle.app.jobs.states import Condition, RoleState
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import access, text
from openrecycle.app.ui.address import FOLLOWED_CONFIG, TimeRange, follow
from openrecycle.app.ui.charts.chart_placeholder import chart_placeholder
from openrecycle.app.ui.charts.vega import LiveChart
from openrecycle.app.ui.charts.worker_grid import LOOKS
from openrecycle.app.ui.facts import Card, op_time_words
from openrecycle.app.ui.theme import Palette, palette
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.drawing import Drawing
from openrecycle.planner.plans.drawing import legend as op_keys
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule

JOB_TONE = {
    Condition.STARTING: "wait",
    Condition.RUNNING: "good",
    Condition.SILENT: "warn",
    Condition.DEGRADED: "warn",
    Condition.PAUSING: "paused",
    Condition.PAUSED: "paused",
    Condition.WAITING: "warn",
    Condition.RECOVERING: "warn",
    Condition.HALTED: "bad",
    Condition.FINISHED: "done",
    Condition.STOPPED: "done",
}


# Among the steps of a recovery the one that is a person's.
PEOPLE = 4


def use_style() -> Palette:
    """Puts the theme's colours on the page, for its style sheet; returns the palette."""
    colours = palette(st.context.theme.type)
    names = [f.name for f in fields(Palette) if f.type == "str" and f.name != "name"]
    variables = "".join(f"--or-{n.replace('_', '-')}:{getattr(colours, n)};" for n in names)
    variables += "".join(f"--or-op-{k}:{v};" for k, v in colours.ops.items())
    st.html(f"<style>:root{{{variables}}}</style>")
    return colours


def guard(page: Callable[[], None]) -> None:
    """Runs a page; what is refused, or cannot be asked, becomes a sentence on it."""
    try:
        page()
    except (ConsoleError, PlannerError) as error:
        st.error(str(error))
        if isinstance(error, ConsoleError) and error.status == 503:
            st.fragment(_until_ready, run_every=2)()
    access.who(get_console())


def _until_ready() -> None:
    """Has the page run again once the database answers."""
    try:
        get_console().ready()
    except ConsoleError:
        st.caption("The page comes back by itself.")
        return
    st.rerun()


def cards(items: list[Card], fresh: float | None = None) -> None:
    """fresh: when this was read, POSIX seconds, on a page that refreshes itself: it says when no more comes."""
    mark = "" if fresh is None else f'<i class="or-fresh" data-at="{fresh:.1f}"></i>'
    st.html('<div class="or-cards">' + "".join(map(_card, items)) + mark + "</div>")


def _card(card: Card) -> str:
    of = f' <span class="or-of">{escape(card.of)}</span>' if card.of else ""
    note, tone = escape(card.note), card.tone and f"or-{card.tone}"
    return (
        f'<div class="or-card"><div class="or-label">{escape(card.label)}</div>'
        f'<div class="or-value">{escape(card.value)}{of}</div>'
        f'<div class="or-note {tone}" title="{note}">{note}</div></div>'
    )


def sentence(view: JobView) -> None:
    """What the coordinator does or waits for, coloured by the job's state."""
    tone = JOB_TONE[view.condition]
    st.html(
        f'<div class="or-sentence or-tone-{tone}" role="status" aria-live="polite">'
        f'<span class="or-state">{escape(view.condition.value)}</span>'
        f"<span class='or-says'>{escape(view.sentence) or '&nbsp;'}</span></div>"
    )


def legend(counts: dict[RoleState, int]) -> None:
    """One entry per state that occurs, with its shape, colour and count."""
    entries = "".join(
        f'<span class="or-key"><i class="or-shape or-look-{state.value}"></i>{escape(words)} '
        f"<b>{counts[state]:,}</b></span>"
        for state, (words, _, _) in LOOKS.items()
        if counts.get(state)
    )
    st.html(f'<div class="or-legend or-states">{entries}</div>')


def recovery(latest: RecoveryView | None, zone: str | None) -> None:
    """The latest failure's way back to training, step by step, to scale: the steps add up to the whole."""
    if latest is None:
        words = "None so far. It is measured once training goes on after a failure."
        st.html(f'<div class="or-quiet or-recovery">{words}</div>')
        return
    whole = max(sum(took for _, took in latest.steps), 1e-9)
    shown = [(i, words, took) for i, (words, took) in enumerate(latest.steps) if i < PEOPLE or took > 0]
    bars = [f'<i class="or-step-{i}" style="width:{100 * took / whole:.2f}%"></i>' for i, _, took in shown]
    items = "".join(
        f'<li><i class="or-dot or-step-{i}"></i><b>{text.milliseconds(took)}</b><span>{escape(words)}</span></li>'
        for i, words, took in shown
    )
    begin = "its death" if latest.death_known else "when its death was seen"
    st.html(
        f'<div class="or-recovery"><p><b>{escape(latest.worker)}</b> · generation {latest.generation} · '
        f"{text.moment(latest.at, zone, time.time())} · <b>{text.milliseconds(whole)}</b> from {begin} to training "
        f'again</p><div class="or-bar" aria-hidden="true">{"".join(bars)}</div><ol>{items}</ol></div>'
    )


class Tile(NamedTuple):
    """A worker as a button. look: of its state. words: below its name. tip: Markdown."""

    name: str
    look: str
    words: str
    tip: str


def tiles(
    rows: Iterable[Sequence[Tile]],
    place: str,
    on_click: Callable[[str], None],
    held: Sequence[int] = (),
    coming: Sequence[int] = (),
) -> None:
    """A grid of workers, a row per pipeline. place: its key. on_click: a callback, with the worker's name. held,
    coming: as of `_grid_columns`."""
    with st.container(key=place, gap=None):
        for pipeline, row in enumerate(rows):
            if not pipeline:
                _grid_columns(len(row), held, coming)
            with st.container(key=f"grid-row-{pipeline}", horizontal=True):
                words = '<span class="or-long">pipeline&nbsp;</span><span class="or-short">P</span>'
                st.html(f'<div class="or-rowhead">{words}{pipeline}</div>')
                for name, look, words, tip in row:
                    with st.container(key=f"cell-{look}-{name}"):
                        label = f"**{name}** :small[{words}]"
                        st.button(label, f"worker-{name}", help=tip, width="stretch", on_click=on_click, args=(name,))


def heading(words: str, aside: str = "") -> None:
    extra = f' <span class="or-aside">{escape(aside)}</span>' if aside else ""
    st.html(f'<h2 class="or-heading">{escape(words)}{extra}</h2>')


def quiet(words: str) -> None:
    st.html(f'<div class="or-quiet">{escape(words)}</div>')


def op_legend(kinds: Iterable[str], *, rerouted: bool, ghost: bool) -> None:
    """What the bars of a schedule mean: the op kinds that occur, and the marks."""
    keys = op_keys(kinds, rerouted=rerouted, ghost=ghost)
    shapes = "".join(
        f'<span class="or-key"><i class="or-shape or-op-{key.look}"></i>{escape(key.words)}</span>' for key in keys
    )
    st.html(f'<div class="or-legend">{shapes}</div>')


def legend_of(drawings: Sequence[Drawing], *, ghost: bool) -> None:
    """One legend of what occurs in the rows of all."""
    looks = {(op.kind, op.rerouted) for drawing in drawings for op in drawing.ops}
    op_legend({kind for kind, _ in looks}, rerouted=any(moved for _, moved in looks), ghost=ghost)


def job_title(spec: JobSpec, *, pace: bool = True) -> None:
    """The job's name, what it is, and whether its op times are paced."""
    about = _about(spec, spec.technique, spec.memory)
    if spec.profile is not None and spec.profile.layers:
        about += f" · {text.count(len(spec.profile.layers), 'layer')}"
    paced, times = "", op_time_words(spec)
    if spec.profile is not None and times and not spec.paced:
        about += f" · op times by stage: {times}"
    if spec.paced and pace:
        paced = (
            f"<br>Planned with {escape(times)}. Paced: F, I and W are stretched to these times, as an accelerator "
            "would take them. The computation inside is real."
        )
    st.html(f'<h1 class="or-title">{escape(spec.name)}</h1><div class="or-about">{escape(about)}{paced}</div>')


def _about(grid: text.Grid, technique: str, memory: str) -> str:
    limit = "by bytes" if memory == "bytes" else memory
    return f"{text.grid_words(grid)} · {technique} · memory limit {limit}"


def plan_title(name: str, plan: Plan, aside: str) -> None:
    """The name of a plan that is no job's, what it is for, and what it has to do with the job."""
    about = f"{_about(plan.job, plan.technique.value, plan.memory)} · {aside}"
    st.html(f'<h1 class="or-title">{escape(name)}</h1><div class="or-about">{escape(about)}</div>')


def until_drawn(figure: go.Figure) -> None:
    """A schedule's picture in the place of its chart, which is to be the next in the same container, until the browser
    has drawn that."""
    if picture := chart_placeholder(figure):
        st.html(picture)


def live_chart(chart: LiveChart, key: str, alt: str, **look: Any) -> None:
    """look: passed on to Streamlit."""
    st.vega_lite_chart(None, chart.whole(), theme=None, key=key, alt=alt, **look)


def schedule_chart(
    figure: go.Figure, key: str, time: TimeRange, alt: str, *, place: str = "wide-chart", **look: Any
) -> None:
    """Drawn as wide as the page; somebody who moves it chooses the time. look: passed on to Streamlit."""
    with st.container(key=place, gap=None):
        until_drawn(figure)
        st.plotly_chart(figure, theme=None, key=key, config=FOLLOWED_CONFIG, alt=alt, **look)
        follow(key, time)


def _grid_columns(stages: int, held: Sequence[int] = (), coming: Sequence[int] = ()) -> None:
    """Tells the style sheet how many columns the worker grid has; draws their heads. held: layers per stage, where
    stages can be cut anew; coming: those that they will have, once some have moved."""
    heads = ""
    for s in range(stages):
        below = ""
        if held:
            now, then = text.layers(held, s), text.layers(coming or held, s)
            moves = f' <b class="or-coming">→&nbsp;{then}</b>' if then != now else ""
            below = f'<small><span class="or-long">layers </span><span class="or-short">L</span>{now}{moves}</small>'
        name = f'<span class="or-long">stage </span><span class="or-short">S</span>{s}'
        heads += f'<span class="or-colhead">{name}{below}</span>'
    st.html(f'<style>:root{{--or-stages:{stages}}}</style><div class="or-colheads"><span></span>{heads}</div>')


def no_job(address: str) -> None:
    """What this console is for, and how to bring it a job."""
    st.html('<h1 class="or-title">No training job yet</h1>')
    st.markdown(
        "This console plans, watches and repairs pipeline-parallel training jobs. "
        "A job appears here as soon as its launcher registers it. In a second terminal, start 12 real worker "
        "processes, 3 pipelines of 4 stages, that train a small GPT and may be killed from this page:"
    )
    st.code(
        f"openrecycle train --console {address} --demo --pipelines 3 --stages 4 --micro-batches 6 "
        "--iterations 1000 --pace F=40ms,I=40ms,W=40ms",
        language=None,
        wrap_lines=True,
    )
    if get_console().security.access.guarded:
        st.markdown("This console asks for a token: the launcher finds it in `OPENRECYCLE_TOKEN`.")
    st.markdown("Leave out `--pace` to run as fast as the machine can, and `--demo` to forbid kills from here.")
    st.markdown(
        "No job is needed to [plan for failures](planner), to [make plans ahead](catalog), to "
        "[simulate what failures cost](simulate), or to read [how it works](help)."
    )


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule, read once and shared by all viewers."""
    return st.cache_resource(_schedule, max_entries=16, show_spinner="Reading the plan …")(plan.fingerprint, plan)  # type: ignore[no-any-return]


def _schedule(fingerprint: str, _plan: Plan) -> Schedule:
    """Keyed by the fingerprint; the plan itself is not hashed."""
    return _plan.schedule()
