"""Controls whose value is in the address, and what is said where the address holds none that they can have.

The address is the only truth: a control shows what it says, and writes what somebody chooses into it. Of a value that
the control cannot have, it says beside itself what it got and what was expected: until it is changed or the page is
left. Of a value for which another job or plan, chosen since, has no room, nothing is said: nobody has sent it for that
one.

The part that is shown of charts that can be moved is in the address, too: of a schedule's time, and of a job's
iterations.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, partial
from html import escape
from importlib import import_module
from operator import eq
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import streamlit as st
from streamlit.components.v2.types import ComponentRenderer
from streamlit.navigation.page import Page

from openrecycle.app.charts.theme import CHART_CONFIG
from openrecycle.app.charts.vega import ZOOM
from openrecycle.app.plans.whatif import PARAMS

T = TypeVar("T")
D = TypeVar("D")
N = TypeVar("N", int, float)

DEFAULT, LEFT_OUT = "The default is shown.", "It is left out."
SWITCH = "true or false"
# In the session: the page that is open, what has been noted of each name since it was opened, and how often each
# control was made anew, and with which value last.
PAGE, NOTES, TURNS = "bound-page", "bound-notes", "bound-turns"
JOB = "job"
# In the session: the job that was looked at on another page; and the plans that Compare began with, which nobody has
# chosen: those of another job take their place.
CHOSEN, BEGAN_WITH = "chosen-job", "compare-began-with"
_SHARED = (JOB, "show", "pipeline", "stage", "time", "figures")
# The page whose address is empty.
FIRST = "live"
# What each page, by its address, may have in it; `name*`: with anything behind it. Any may have a job's.
NAMES: dict[str, tuple[str, ...]] = {
    "": (
        *(JOB, "worker", "worker-tabs", "worker-span", "events", "find", "refresh", "iterations"),
        *("worker-figures", "progress-figures", "ways-folded"),
    ),
    "schedule": (*_SHARED, "plan", "follow", "draw", "path", "first-row", "box"),
    "planner": (
        *(*PARAMS, "saved", "example", "before", "show", "window", "details"),
        *("planner-stage-times", "planner-bytes"),
    ),
    "compare": (*_SHARED, "plans", "baseline"),
    "catalog": (JOB, "catalog", "cat_*"),
    "simulate": ("model", "trace", "policies", "covers", "simulation-mtbf-figures", "sim_*"),
    "help": ("section",),
}
# Seconds within which a browser has heard what somebody has chosen on it.
HEARD_SECONDS = 1.0
# Of many possible values the first few are named; of a long one its beginning.
MOST_NAMED, LONGEST = 8, 60
WIDTH = 260


@dataclass
class _Note:
    """Of one name of the address. words: what is said of it. put: whether somebody has chosen `chosen`, in the place of
    `before`, and the browser may not have heard of it; at: when, by monotonic seconds."""

    words: str = ""
    put: bool = False
    chosen: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    at: float = 0.0


def page(name: str) -> Page:
    """The page whose `page()` is in the file of that name, for the navigation and for links. Pages don't import each
    other."""
    return st.Page(partial(_draw, name), title=name.capitalize(), url_path=name, default=name == FIRST)


def _draw(name: str) -> None:
    import_module(f"openrecycle.app.ui.{name}").page()


def enter(page: str) -> None:
    """Call it before a page runs as a whole: what was said on another one is said no more, and what the address holds
    counts, as after the browser's Back."""
    if st.session_state.get(PAGE) != page:
        st.session_state[PAGE] = page
        st.session_state[NOTES] = {}
    for name, note in _notes().items():
        given = st.query_params.get_all(name)
        unheard = given == note.before and time.monotonic() < note.at + HEARD_SECONDS
        note.put = note.put and (given == note.chosen or unheard)
        if note.put:
            _write(name, note.chosen)


def say_unknown() -> None:
    """Says which names of the address the page that was entered has nothing for. Call it before the page runs."""
    known = NAMES[st.session_state[PAGE]]
    begins = tuple(name[:-1] for name in known if name.endswith("*"))
    strange = [
        name
        for name in st.query_params
        if name not in (*known, JOB) and name not in _notes() and not name.startswith(begins or ("*",))
    ]
    for name in strange[:MOST_NAMED]:
        near = get_close_matches(name, [each for each in known if not each.endswith("*")], 1)
        short = name if len(name) <= LONGEST else name[:LONGEST] + "…"
        hint = f" Did you mean {near[0]}?" if near else ""
        field_error(f"{short!r} in the link: this page knows nothing of that name, and leaves it out.{hint}", "stretch")


def moved() -> None:
    """For a callback: the page goes on with another job or plan, for which nobody has sent what the address holds."""
    for name in st.query_params:
        _notes().setdefault(name, _Note())


def job_asked_for(known: Collection[str]) -> str | None:
    """The job that the address names, whether there is such a one or not; else the one that was looked at on another
    page: links between pages drop the query. known: the jobs that there are."""
    seen = st.session_state.get(CHOSEN)
    return read(JOB, str, "the id of a job") or (seen if seen in known else None)


def show_job(job_id: str) -> None:
    """Has the address name the job, and other pages go on with it."""
    pin(JOB, job_id)
    st.session_state[CHOSEN] = job_id


def pin(name: str, shown: str) -> None:
    """Has the address name what the page shows, so that a link shows what its sender saw."""
    if st.query_params.get_all(name) != [shown]:
        put(name, shown)


def forget_job() -> None:
    """The page goes on with the newest job."""
    put(JOB, None)
    st.session_state.pop(CHOSEN, None)


def read(name: str, accept: Callable[[str], T | None], expected: str, instead: str = DEFAULT) -> T | None:
    """What the address says of that name; None if nothing, or nothing that can be: that leaves the address, and `say`
    says what was wrong with it.

    accept: makes a value of the address's words; None: it can't.
    """
    given = _given(name)
    found = accept(given[-1]) if given else None
    if given and found is None:
        _refuse(name, given[-1], [], expected, instead)
    elif given:
        _notes().setdefault(name, _Note())
    return found


def read_all(name: str, accept: Callable[[str], T | None], expected: str) -> list[T] | None:
    """The same of a name that the address may have any number of times; `?name=` is none of them. What can't be is
    left out."""
    given = _given(name)
    made = {words: accept(words) for words in given if words}
    found = {words: value for words, value in made.items() if value is not None}
    strange = next((words for words in made if words not in found), None)
    if strange is not None:
        _refuse(name, strange, list(found), expected, LEFT_OUT if found else DEFAULT)
    elif given:
        _notes().setdefault(name, _Note())
    return list(found.values()) if found or "" in given else None


def _given(name: str) -> list[str]:
    note = _notes().get(name)
    given: list[str] = st.query_params.get_all(name)
    if note is not None and note.put and given != note.chosen:
        _write(name, note.chosen)  # a browser that has not heard of it yet has asked for a part of the page
        return note.chosen
    return given


def _refuse(name: str, strange: str, rest: list[str], expected: str, instead: str) -> None:
    """Of what was right at first, or was sent for another job, nothing is said."""
    _notes().setdefault(name, _Note(sentence(name, strange, expected, instead))).put = False
    _write(name, rest)


def say(name: str) -> None:
    """Says what was wrong with the address's value, if anything was, beside what has been drawn last."""
    if (note := _notes().get(name)) and note.words:
        field_error(note.words)


def put(name: str, chosen: str | Sequence[str] | None) -> None:
    """For a callback: somebody has chosen that value of what `read` reads, None: none. It goes into the address, of
    which nothing is said any more, and counts whatever the browser sends for the old one: a page's part that is
    refreshed by the clock, or the next click, may have been asked for before the browser heard of the new one."""
    words = [] if chosen is None else [chosen] if isinstance(chosen, str) else list(chosen)
    _notes()[name] = _Note("", True, words, st.query_params.get_all(name), time.monotonic())
    _write(name, words)


def _write(name: str, words: list[str]) -> None:
    if words:
        st.query_params[name] = words
    else:
        st.query_params.pop(name, None)


def sentence(name: str, given: str, expected: str, instead: str = DEFAULT) -> str:
    """`show: got 'xyz', expected one of all, pipeline, stage. The default is shown.`"""
    short = given if len(given) <= LONGEST else given[:LONGEST] + "…"
    return f"{name}: got {short!r}, expected {expected}. {instead}"


def one_of(words: Iterable[str]) -> str:
    """`one of a, b, c`; of many, or long ones, the first few."""
    known = list(words)
    named = known[:MOST_NAMED]
    while len(named) > 1 and sum(map(len, named)) > 2 * LONGEST:
        named.pop()
    more = f" and {len(known) - len(named):,} more" if len(known) > len(named) else ""
    return "one of " + ", ".join(named) + more


def field_error(words: str, width: int | Literal["stretch"] = WIDTH) -> None:
    """Beside the field that it speaks of."""
    st.html(f'<div class="or-field-error" role="alert">{escape(words)}</div>', width=width)


# -- controls. What is said here of their look is passed on to Streamlit. ---------------------------------------------


def control(
    draw: Callable[..., D],
    name: str,
    value: Any,
    choose: Callable[[Any], object],
    alike: Callable[[Any, Any], bool] = eq,
) -> D:
    """A control that shows `value`, whatever it showed before. draw: with that, and Streamlit's `key` and `on_change`.
    choose: a callback, with what somebody has chosen. alike: is what it shows what is to be shown?

    A value that comes from elsewhere than the control (a preset, a link, Back) makes it a new one. To set it by its key
    would not do: when two clicks come so fast that a run is cut short, the browser misses what was set, shows the
    control's default instead, and reports that as if somebody had chosen it.
    """
    key = _turned(name, value, alike)[0]
    return draw(value, key=key, on_change=lambda: choose(st.session_state[key]))


def _turned(name: str, value: Any, alike: Callable[[Any, Any], bool] = eq) -> tuple[str, Any]:
    """The key of a control that shows `value`, and what it was made with. Keys differ in white space at their end: that
    is not in the class by which the style sheet knows a control."""
    turns: dict[str, tuple[int, Any]] = st.session_state.setdefault(TURNS, {})
    turn, made_with = turns.get(name, (0, value))
    if (key := name + turn * " ") not in st.session_state:  # not drawn yet, or not since another page was open
        made_with = value
    elif not alike(st.session_state[key], value):
        turn, made_with = turn + 1, value
    turns[name] = turn, made_with
    return name + turn * " ", made_with


def _addressed(
    draw: Callable[..., D],
    name: str,
    sent: T | None,
    default: T,
    spell: Callable[[T], str | Sequence[str]] = str,
    on_change: Callable[[], object] = lambda: None,
    *,
    above: bool = False,
) -> D:
    """A control of what the address says, or of its default, which no address has. above: what is wrong is said
    there."""

    def choose(chosen: T) -> None:
        put(name, None if chosen == default else spell(chosen))
        on_change()

    if above:
        say(name)
    drawn = control(draw, name, default if sent is None else sent, choose)
    if not above:
        say(name)
    return drawn


def _known(options: Sequence[T], format_func: Callable[[T], str]) -> dict[str, T]:
    """The address has the option itself, so that a link stays good when the page words it otherwise; what the page
    calls it is understood too."""
    return {format_func(option): option for option in options} | {str(option): option for option in options}


def selectbox(
    label: str,
    options: Sequence[T],
    *,
    key: str,
    format_func: Callable[[Any], str] = str,
    default: T | None = None,
    instead: str = DEFAULT,
    on_change: Callable[[], object] = lambda: None,
    **look: Any,
) -> T:
    """One of the options, of which there is at least one. default: the first one."""

    def draw(value: T, **rest: Any) -> T:
        shown = list(options).index(value)
        return cast("T", st.selectbox(label, options, shown, format_func=format_func, **look, **rest))

    sent = read(key, _known(options, format_func).get, one_of(map(str, options)), instead)
    return _addressed(draw, key, sent, options[0] if default is None else default, on_change=on_change)


def segmented_control(
    label: str, options: Sequence[T], *, key: str, format_func: Callable[[Any], str] = str, default: T, **look: Any
) -> T:
    """One of the options: that it has none cannot be chosen."""

    def draw(value: T, **rest: Any) -> T:
        return cast(
            "T",
            st.segmented_control(label, options, default=value, required=True, format_func=format_func, **look, **rest),
        )

    return _addressed(draw, key, read(key, _known(options, format_func).get, one_of(map(str, options))), default)


def several(
    draw: Callable[..., list[T]],
    label: str,
    options: Sequence[T],
    *,
    key: str,
    format_func: Callable[[Any], str] = str,
    default: list[T],
) -> list[T]:
    """Any number of the options; none of them is `?name=`. draw: as `st.multiselect` does."""

    def drawn(value: list[T], **rest: Any) -> list[T]:
        return draw(label, options, default=value, format_func=format_func, **rest)

    sent = read_all(key, _known(options, format_func).get, one_of(map(str, options)))
    return _addressed(drawn, key, sent, default, lambda chosen: list(map(str, chosen)) or [""])


def number_input(label: str, least: N, most: N, value: N, *, key: str, **look: Any) -> N:
    """A number from `least` to `most`, a whole one where they are."""
    whole = isinstance(value, int)

    def accept(words: str) -> N | None:
        try:
            number = float(words)
        except ValueError:
            return None
        fits = math.isfinite(number) and least <= number <= most and not (whole and number % 1)
        return cast("N", int(number) if whole else number) if fits else None

    def draw(value: N, **rest: Any) -> N:
        return cast("N", st.number_input(label, least, most, value, **look, **rest))

    expected = f"a {'whole ' * whole}number from {least:.10g} to {most:.10g}"
    return _addressed(draw, key, read(key, accept, expected), value, lambda number: f"{number}".removesuffix(".0"))


def text_input(label: str, value: str, *, key: str, max_chars: int, **look: Any) -> str:
    def draw(value: str, **rest: Any) -> str:
        return cast("str", st.text_input(label, value, max_chars=max_chars, **look, **rest))

    def accept(words: str) -> str | None:
        return words if len(words) <= max_chars else None

    return _addressed(draw, key, read(key, accept, f"at most {max_chars} characters"), value)


def toggle(label: str, *, key: str, value: bool = False, **look: Any) -> bool:
    draw: Callable[..., bool] = partial(st.toggle, label, **look)
    return _addressed(draw, key, read(key, _switch, SWITCH), value, _switched)


def tabs(labels: list[str], *, key: str) -> Sequence[Any]:
    """Their containers, of which one's `.open` is true."""

    def draw(value: str, **rest: Any) -> Any:
        made_with = _turned(key, value)[1]  # with another default they would be others
        return st.tabs(labels, default=made_with if made_with in labels else value, **rest)

    sent = read(key, _known(labels, str).get, one_of(labels))
    drawn: Sequence[Any] = _addressed(draw, key, sent, labels[0], above=True)
    return drawn


def expander(label: str, *, key: str, icon: str | None = None) -> Any:
    """Folded up at first. What is large in it is to be made only where its `.open` is true."""

    def draw(value: bool, **rest: Any) -> Any:
        return st.expander(label, _turned(key, value)[1], icon=icon, **rest)

    return _addressed(draw, key, read(key, _switch, SWITCH, "It is folded up."), False, _switched, above=True)


def _switch(words: str) -> bool | None:
    return {"true": True, "false": False}.get(words.lower())


def _switched(value: bool) -> str:
    return str(value).lower()


def _notes() -> dict[str, _Note]:
    return st.session_state.setdefault(NOTES, {})  # type: ignore[no-any-return]


# -- the part of a schedule's time that is shown: chosen by a slider or by dragging over the chart --------------------

Range = tuple[float, float]

TIME = "time"
# Of a chart that is followed: a double click is for `chart_zoom.js`.
FOLLOWED_CONFIG: dict[str, object] = {**CHART_CONFIG, "doubleClick": False}
_SCRIPT = Path(__file__).parent / "assets" / "chart_zoom.js"


@dataclass(frozen=True)
class TimeRange:
    """Times in the unit of the chart's axis. shown: None: all, from 0 to `end`. name: in the address."""

    name: str
    end: float
    shown: Range | None


def choose_time(of: str, end: float, unit: str, name: str = TIME) -> TimeRange:
    """Draws the slider. of: what is shown; each has a slider of its own, since their times differ in length. name: in
    the address."""
    expected = f"two times from 0 to {spelled(end)}, such as 0-{spelled(end / 2)}"
    sent = read(name, lambda word: parsed(word, end), expected, "All of it is shown.")

    def draw(value: Range, **rest: Any) -> Range:
        step, label = _step(end), f"Time ({unit})"
        return cast("Range", st.slider(label, 0.0, end, value, step=step, format="%g", width=240, **rest))

    def alike(slid: Range, value: Range) -> bool:  # an address has nine digits
        return _word(narrowed(slid, end)) == _word(narrowed(value, end))

    control(draw, f"{name}-{of}", sent or (0.0, end), lambda slid: choose_range(name, narrowed(slid, end)), alike)
    say(name)
    return TimeRange(name, end, narrowed(sent, end) if sent else None)


def follow(chart: str, time: TimeRange) -> None:
    """Has the chart of that key choose the time: dragging over it, moving its axis, and a double click for all."""
    _component()(
        key=_key(chart), data={"chart": chart}, on_range_change=partial(dragged, chart, time)
    )  # fmt: skip


def within(time: TimeRange, low: float, high: float) -> Range | None:
    """Of what is chosen, the part that lies in a chart which has only the time from `low` to `high`. None: all of
    that."""
    if time.shown is None:
        return None
    part = max(low, time.shown[0]), min(high, time.shown[1])
    return part if part[0] < part[1] and part != (low, high) else None


def dragged(chart: str, time: TimeRange) -> None:
    """What else a browser may send than two times in order, or nothing for all, changes nothing."""
    state = st.session_state.get(_key(chart))
    sent = state.get("range") if state else None
    if not isinstance(sent, list) or not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in sent):
        return
    if not sent:
        part = None
        forget_chart(chart)  # the browser waits for it
    else:
        low, high = (min(max(edge, 0.0), time.end) for edge in (sent[0], sent[-1]))
        if low >= high:
            return
        digits = max(0, 3 - math.floor(math.log10(high - low)))
        part = narrowed((round(low, digits), min(time.end, round(high, digits))), time.end)
        chart_moved(chart, part)
    choose_range(time.name, part)


def choose_range(name: str, part: Range | None) -> None:
    """For a callback. None: all of it."""
    put(name, _word(part))


def _word(part: Range | None) -> str | None:
    return "-".join(map(spelled, part)) if part else None


def narrowed(chosen: Range, end: float) -> Range | None:
    """None where it is all, as far as the slider can tell, or nothing."""
    low, high = chosen
    return None if (low <= 0 and high > end - _step(end)) or low >= high else (low, high)


def parsed(word: str, end: float) -> Range | None:
    """`5-12`."""
    low, _, high = word.partition("-")
    try:
        found = float(low), float(high)
    except ValueError:
        return None
    return (found[0], min(found[1], end)) if 0 <= found[0] < found[1] <= end * (1 + 1e-9) else None


def spelled(value: float) -> str:
    """As it stands in an address."""
    return f"{value:.9f}".rstrip("0").rstrip(".")


def _step(end: float) -> float:
    """A hundredth of the iteration or so, whole where times are."""
    rough = end / 200
    return max(1.0, float(round(rough))) if end >= 20 else rough


def _key(chart: str) -> str:
    return f"zoom-of-{chart}"


@cache
def _component() -> ComponentRenderer:
    return st.components.v2.component("chart-zoom", js=_SCRIPT.read_text(), isolate_styles=False)


# -- charts that somebody may have moved since -----------------------------------------------------------------------
#
# Which part each was drawn with, and which it shows by now: it is drawn anew only where it does not show the part that
# is asked for, so what somebody drags does not come back to be drawn again meanwhile.


@dataclass
class _ChartRevision:
    """what: is in it. drawn: the part that it was drawn with, None: all; showing: that it shows. turn: counts
    drawings."""

    what: str
    drawn: Range | None
    showing: Range | None
    turn: int


def drawn_with(chart: str, what: str, shown: Range | None) -> tuple[Range | None, int]:
    """The part to draw the chart of that key with so that it shows `shown`, and a number that is another one whenever
    the browser is to forget what somebody has moved. what: names all else that is in the chart."""
    key = _revision_key(chart)
    chart_revision: _ChartRevision | None = st.session_state.get(key)
    if chart_revision is None or chart_revision.what != what or chart_revision.showing != shown:
        turn = chart_revision.turn + 1 if chart_revision is not None else 0
        chart_revision = st.session_state[key] = _ChartRevision(what, shown, shown, turn)
    return chart_revision.drawn, chart_revision.turn


def chart_moved(chart: str, showing: Range | None) -> None:
    """For a callback: somebody has moved it, and it shows that part by now."""
    if (chart_revision := st.session_state.get(_revision_key(chart))) is not None:
        chart_revision.showing = showing


def forget_chart(chart: str) -> None:
    """For a callback: it is drawn anew in any case."""
    if (chart_revision := st.session_state.get(_revision_key(chart))) is not None:
        chart_revision.what = ""


def _revision_key(chart: str) -> str:
    return f"{chart}-revision"


# -- the part of a job's progress that Live shows: chosen by moving or zooming either curve ---------------------------
#
# A curve that is moved tells the console once it has stood still for a moment, whatever the mouse did. Its view stands,
# and the other's is made anew with that part; new rows are handed to both as before. A plain choice of the newest so
# many would not do: what an operator looks at closely is a failure, and that moves away from the newest.

ITERATIONS = "iterations"
_FROM_TO = re.compile(r"([0-9]{1,12})-([0-9]{1,12})")


def iterations_shown(first: int, last: int) -> Range | None:
    """`?iterations=120-180`; None: all. A part that the job has left behind is none any more.

    first, last: the iterations that there are to see.
    """

    def accept(word: str) -> Range | None:
        found = _FROM_TO.fullmatch(word)
        low, high = map(int, found.groups()) if found else (0, 0)
        return (low, high) if low < high and low <= last and high >= first else None

    expected = f"two iterations between {first} and {last}, the newest, such as {first}-{max(first + 1, last)}"
    return read(ITERATIONS, accept, expected, "All of them are shown.")


def zoomed(chart: str, key: str) -> None:
    """For a callback of the chart `chart`, whose widget is `key`. What else a browser may send changes nothing."""
    state = st.session_state.get(key)
    edges = next(iter((state["selection"].get(ZOOM) or {}).values()), None) if state else None
    part = None
    if edges is not None:
        if not isinstance(edges, list) or not all(isinstance(e, int | float) and math.isfinite(e) for e in edges):
            return
        low, high = (round(max(0.0, edge)) for edge in (edges[0], edges[-1]))
        if low >= high:
            return
        part = float(low), float(high)
    chart_moved(chart, part)
    put(ITERATIONS, f"{part[0]:.0f}-{part[1]:.0f}" if part else None)
