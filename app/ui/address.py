"""Controls whose values are in the page's address.

The address is the only truth: a control shows the value that is there, and writes a choice into it. If the address has
an invalid value, the control says beside itself what it got and what was expected, until it is changed or the page is
left. It says nothing about a value that only became invalid because another job or plan was chosen.

The part of a chart that is shown is in the address, too: a schedule's time, and a job's iterations.
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
from openrecycle.app.runtime.patches import FIRST

T = TypeVar("T")
D = TypeVar("D")
N = TypeVar("N", int, float)

DEFAULT, LEFT_OUT = "The default is shown.", "It is left out."
SWITCH = "true or false"
# Names in the session: the page that is open; the note on each name of the address since it was opened; and how often
# each control was made anew, and with which value last.
PAGE, NOTES, TURNS = "bound-page", "bound-notes", "bound-turns"
JOB = "job"
# Names in the session: the job that was shown on another page; and the plans that Compare chose by itself at first,
# which are replaced when another job is chosen.
CHOSEN, BEGAN_WITH = "chosen-job", "compare-began-with"
_SHARED = (JOB, "show", "pipeline", "stage", "time", "figures")
# The names that each page's address may have; `name*`: any name with that beginning. Every page may have JOB.
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
# Seconds after which a browser knows the address that a choice on it led to, unless the machine is very busy.
HEARD_SECONDS = 1.0
# In messages, at most this many possible values are named, and a value is cut at this length.
MOST_NAMED, LONGEST = 8, 60
WIDTH = 260


@dataclass
class _AddressNote:
    """A note on one name of the address. words: the message about its value. put: somebody has chosen `chosen` in place
    of `before`, and the browser may not know that until then (`until`, monotonic seconds)."""

    words: str = ""
    put: bool = False
    chosen: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    until: float = 0.0


def page(name: str) -> Page:
    """Returns the page in the file of that name, for the navigation and for links. It is imported when it is drawn, so
    that pages need not import each other."""
    return st.Page(partial(_draw, name), title=name.capitalize(), url_path=name, default=name == FIRST)


def _draw(name: str) -> None:
    import_module(f"openrecycle.app.ui.{name}").page()


def enter(page: str) -> None:
    """Begins the run of a whole page. Messages of another page are dropped, and the values in the address count, also
    after the browser's Back."""
    if st.session_state.get(PAGE) != page:
        st.session_state[PAGE] = page
        st.session_state[NOTES] = {}
    for name, note in _notes().items():
        given = st.query_params.get_all(name)
        unheard = given == note.before and time.monotonic() < note.until
        note.put = note.put and (given == note.chosen or unheard)
        if note.put:
            _write(name, note.chosen)


def say_unknown() -> None:
    """Shows which names of the address the page does not know. Call it after `enter`, before the page runs."""
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
    """For a callback: notes that another job or plan was chosen, so that values which do not suit it get no message."""
    for name in st.query_params:
        _notes().setdefault(name, _AddressNote())


def job_asked_for(known: Collection[str]) -> str | None:
    """Returns the job that the address names, even if there is no such job; else the one that was shown on another
    page, since links between pages drop the query. known: the existing jobs."""
    seen = st.session_state.get(CHOSEN)
    return read(JOB, str, "the id of a job") or (seen if seen in known else None)


def show_job(job_id: str) -> None:
    """Writes the job into the address, and has other pages show it, too."""
    pin(JOB, job_id)
    st.session_state[CHOSEN] = job_id


def pin(name: str, shown: str) -> None:
    """Writes what the page shows into the address, so that a link shows what its sender saw."""
    if st.query_params.get_all(name) != [shown]:
        put(name, shown)


def forget_job() -> None:
    """Removes the job from the address; the page then shows the newest one."""
    put(JOB, None)
    st.session_state.pop(CHOSEN, None)


def read(name: str, accept: Callable[[str], T | None], expected: str, instead: str = DEFAULT) -> T | None:
    """Returns the value of a name in the address; None if there is none or it is invalid. An invalid one is removed
    from the address, and `say` shows what was wrong with it.

    accept: converts the address's text to a value; None: it is invalid. expected, instead: for the message.
    """
    given = _given(name)
    found = accept(given[-1]) if given else None
    if given and found is None:
        _refuse(name, given[-1], [], expected, instead)
    elif given:
        _notes().setdefault(name, _AddressNote())
    return found


def read_all(name: str, accept: Callable[[str], T | None], expected: str) -> list[T] | None:
    """Does the same as `read` for a name that the address may have several times; `?name=` means an empty list. Invalid
    values are left out."""
    given = _given(name)
    made = {words: accept(words) for words in given if words}
    found = {words: value for words, value in made.items() if value is not None}
    strange = next((words for words in made if words not in found), None)
    if strange is not None:
        _refuse(name, strange, list(found), expected, LEFT_OUT if found else DEFAULT)
    elif given:
        _notes().setdefault(name, _AddressNote())
    return list(found.values()) if found or "" in given else None


def _given(name: str) -> list[str]:
    note = _notes().get(name)
    given: list[str] = st.query_params.get_all(name)
    if note is not None and note.put and given != note.chosen:
        _write(name, note.chosen)  # a browser that does not know the choice yet has asked for a part of the page
        return note.chosen
    return given


def _refuse(name: str, strange: str, rest: list[str], expected: str, instead: str) -> None:
    """Removes an invalid value from the address, with a message, unless the value was valid at first or was for another
    job. rest: the valid values."""
    _notes().setdefault(name, _AddressNote(sentence(name, strange, expected, instead))).put = False
    _write(name, rest)


def say(name: str) -> None:
    """Shows what was wrong with the address's value, if anything, beside what was drawn last."""
    if (note := _notes().get(name)) and note.words:
        field_error(note.words)


def put(name: str, chosen: str | Sequence[str] | None, heard_after: float | None = None) -> None:
    """For a callback: writes a choice into the address (None removes it), and drops its message.

    The choice counts even if the browser sends the old value once more: a timed refresh of a part of the page, or the
    next click, may have been sent before the browser knew of the choice. heard_after: seconds for which it counts then
    (default: HEARD_SECONDS). Within them, the browser's Back does not bring the old value."""
    words = [] if chosen is None else [chosen] if isinstance(chosen, str) else list(chosen)
    until = time.monotonic() + (HEARD_SECONDS if heard_after is None else heard_after)
    _notes()[name] = _AddressNote("", True, words, st.query_params.get_all(name), until)
    _write(name, words)


def _write(name: str, words: list[str]) -> None:
    if words:
        st.query_params[name] = words
    else:
        st.query_params.pop(name, None)


def sentence(name: str, given: str, expected: str, instead: str = DEFAULT) -> str:
    """Returns a message such as `show: got 'xyz', expected one of all, pipeline, stage. The default is shown.`"""
    short = given if len(given) <= LONGEST else given[:LONGEST] + "…"
    return f"{name}: got {short!r}, expected {expected}. {instead}"


def one_of(words: Iterable[str]) -> str:
    """Returns `one of a, b, c`; only the first few if there are many, or they are long."""
    known = list(words)
    named = known[:MOST_NAMED]
    while len(named) > 1 and sum(map(len, named)) > 2 * LONGEST:
        named.pop()
    more = f" and {len(known) - len(named):,} more" if len(known) > len(named) else ""
    return "one of " + ", ".join(named) + more


def field_error(words: str, width: int | Literal["stretch"] = WIDTH) -> None:
    """Shows a message beside its field."""
    st.html(f'<div class="or-field-error" role="alert">{escape(words)}</div>', width=width)


# -- controls; `look` is passed on to Streamlit ----------------------------------------------------------------------


def control(
    draw: Callable[..., D],
    name: str,
    value: Any,
    choose: Callable[[Any], object],
    alike: Callable[[Any, Any], bool] = eq,
) -> D:
    """Draws a control that shows `value`, whatever it showed before. draw: called with the value, and Streamlit's `key`
    and `on_change`. choose: called back with a choice. alike: compares what the control shows with `value`.

    If the value comes from elsewhere (a preset, a link, Back), the control is made anew under another key. To set its
    value by the key does not work: when two clicks come so fast that a run is cut short, the browser misses the new
    value, shows the control's default, and reports that as if somebody had chosen it.
    """
    key = _turned(name, value, alike)[0]
    return draw(value, key=key, on_change=lambda: choose(st.session_state[key]))


def _turned(name: str, value: Any, alike: Callable[[Any, Any], bool] = eq) -> tuple[str, Any]:
    """Returns the key of a control that shows `value`, and the value that it was made with. Keys differ only in white
    space at their end, since that is not part of the class by which the style sheet finds a control."""
    turns: dict[str, tuple[int, Any]] = st.session_state.setdefault(TURNS, {})
    turn, made_with = turns.get(name, (0, value))
    if (key := name + turn * " ") not in st.session_state:  # it was not drawn since the page was opened
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
    """Draws a control for a value in the address, or for its default, which is never written there. above: shows the
    message above the control."""

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
    """Returns the options by their text in the address. The address has the option itself, so that a link stays valid
    when the page's words change; the words are understood, too."""
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
    """Draws a choice of one of the options, of which there must be one. default: by default the first one."""

    def draw(value: T, **rest: Any) -> T:
        shown = list(options).index(value)
        return cast("T", st.selectbox(label, options, shown, format_func=format_func, **look, **rest))

    sent = read(key, _known(options, format_func).get, one_of(map(str, options)), instead)
    return _addressed(draw, key, sent, options[0] if default is None else default, on_change=on_change)


def segmented_control(
    label: str, options: Sequence[T], *, key: str, format_func: Callable[[Any], str] = str, default: T, **look: Any
) -> T:
    """Draws a choice of one of the options, which cannot be emptied."""

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
    """Draws a choice of any number of options; none is `?name=` in the address. draw: such as `st.multiselect`."""

    def drawn(value: list[T], **rest: Any) -> list[T]:
        return draw(label, options, default=value, format_func=format_func, **rest)

    sent = read_all(key, _known(options, format_func).get, one_of(map(str, options)))
    return _addressed(drawn, key, sent, default, lambda chosen: list(map(str, chosen)) or [""])


def number_input(label: str, least: N, most: N, value: N, *, key: str, **look: Any) -> N:
    """Draws a field for a number from `least` to `most`, which must be whole if `value` is."""
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
    """Draws tabs; returns their containers, of which one has `.open` true."""

    def draw(value: str, **rest: Any) -> Any:
        made_with = _turned(key, value)[1]  # with another default Streamlit would make new tabs
        return st.tabs(labels, default=made_with if made_with in labels else value, **rest)

    sent = read(key, _known(labels, str).get, one_of(labels))
    drawn: Sequence[Any] = _addressed(draw, key, sent, labels[0], above=True)
    return drawn


def expander(label: str, *, key: str, icon: str | None = None) -> Any:
    """Draws an expander, closed at first. Make large content only if its `.open` is true."""

    def draw(value: bool, **rest: Any) -> Any:
        return st.expander(label, _turned(key, value)[1], icon=icon, **rest)

    return _addressed(draw, key, read(key, _switch, SWITCH, "It is folded up."), False, _switched, above=True)


def _switch(words: str) -> bool | None:
    return {"true": True, "false": False}.get(words.lower())


def _switched(value: bool) -> str:
    return str(value).lower()


def _notes() -> dict[str, _AddressNote]:
    return st.session_state.setdefault(NOTES, {})  # type: ignore[no-any-return]


# -- the part of a schedule's time that is shown: chosen by a slider or by dragging over the chart --------------------

Range = tuple[float, float]

TIME = "time"
# For a chart that is followed, `chart_zoom.js` handles the double click.
FOLLOWED_CONFIG: dict[str, object] = {**CHART_CONFIG, "doubleClick": False}
_SCRIPT = Path(__file__).parent / "assets" / "chart_zoom.js"


@dataclass(frozen=True)
class TimeRange:
    """The part of a schedule's time that is shown, in the unit of the chart's axis. shown: None: all, from 0 to `end`.
    name: in the address."""

    name: str
    end: float
    shown: Range | None


def choose_time(of: str, end: float, unit: str, name: str = TIME) -> TimeRange:
    """Draws the slider. of: names the schedule; each has a slider of its own, since their lengths differ. name: in the
    address."""
    expected = f"two times from 0 to {spelled(end)}, such as 0-{spelled(end / 2)}"
    sent = read(name, lambda word: parsed(word, end), expected, "All of it is shown.")

    def draw(value: Range, **rest: Any) -> Range:
        step, label = _step(end), f"Time ({unit})"
        return cast("Range", st.slider(label, 0.0, end, value, step=step, format="%g", width=240, **rest))

    def alike(slid: Range, value: Range) -> bool:  # compared as text, since an address has nine digits
        return _word(narrowed(slid, end)) == _word(narrowed(value, end))

    control(draw, f"{name}-{of}", sent or (0.0, end), lambda slid: choose_range(name, narrowed(slid, end)), alike)
    say(name)
    return TimeRange(name, end, narrowed(sent, end) if sent else None)


def follow(chart: str, time: TimeRange) -> None:
    """Lets the chart of that key choose the time: by dragging over it, moving its axis, or a double click for all."""
    _component()(
        key=_key(chart), data={"chart": chart}, on_range_change=partial(dragged, chart, time)
    )  # fmt: skip


def within(time: TimeRange, low: float, high: float) -> Range | None:
    """Returns the part of the chosen time that lies in a chart from `low` to `high`; None: all of the chart."""
    if time.shown is None:
        return None
    part = max(low, time.shown[0]), min(high, time.shown[1])
    return part if part[0] < part[1] and part != (low, high) else None


def dragged(chart: str, time: TimeRange) -> None:
    """Takes the range that a browser has sent: two times in order, or nothing for all. Anything else is ignored."""
    state = st.session_state.get(_key(chart))
    sent = state.get("range") if state else None
    if not isinstance(sent, list) or not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in sent):
        return
    if not sent:
        part = None
        forget_chart(chart)  # the browser waits for the chart to be drawn anew
    else:
        low, high = (min(max(edge, 0.0), time.end) for edge in (sent[0], sent[-1]))
        if low >= high:
            return
        digits = max(0, 3 - math.floor(math.log10(high - low)))
        part = narrowed((round(low, digits), min(time.end, round(high, digits))), time.end)
        chart_moved(chart, part)
    choose_range(time.name, part)


def choose_range(name: str, part: Range | None) -> None:
    """For a callback: writes the chosen time into the address; None: all of it."""
    put(name, _word(part))


def _word(part: Range | None) -> str | None:
    return "-".join(map(spelled, part)) if part else None


def narrowed(chosen: Range, end: float) -> Range | None:
    """Returns the range, or None if it is empty or, within a step of the slider, everything."""
    low, high = chosen
    return None if (low <= 0 and high > end - _step(end)) or low >= high else (low, high)


def parsed(word: str, end: float) -> Range | None:
    """Parses `5-12`; None: invalid."""
    low, _, high = word.partition("-")
    try:
        found = float(low), float(high)
    except ValueError:
        return None
    return (found[0], min(found[1], end)) if 0 <= found[0] < found[1] <= end * (1 + 1e-9) else None


def spelled(value: float) -> str:
    """Formats a time for the address."""
    return f"{value:.9f}".rstrip("0").rstrip(".")


def _step(end: float) -> float:
    """Returns the slider's step: about a 200th of the iteration, whole if that is long enough."""
    rough = end / 200
    return max(1.0, float(round(rough))) if end >= 20 else rough


def _key(chart: str) -> str:
    return f"zoom-of-{chart}"


@cache
def _component() -> ComponentRenderer:
    return st.components.v2.component("chart-zoom", js=_SCRIPT.read_text(), isolate_styles=False)


# -- charts that somebody may have moved since -----------------------------------------------------------------------
#
# For each chart it is remembered which part it was drawn with, and which part it shows by now. It is drawn anew only if
# it does not show the wanted part; so a chart that somebody drags is not drawn again meanwhile.


@dataclass
class _ChartRevision:
    """The state of a chart in the browser. what: names its content. drawn: the part with which it was drawn (None:
    all); showing: the part that it shows by now. turn: counts drawings."""

    what: str
    drawn: Range | None
    showing: Range | None
    turn: int


def drawn_with(chart: str, what: str, shown: Range | None) -> tuple[Range | None, int]:
    """Returns the part with which to draw a chart so that it shows `shown`, and a number that changes whenever the
    browser must forget how somebody has moved the chart. what: names everything else in the chart."""
    key = _revision_key(chart)
    chart_revision: _ChartRevision | None = st.session_state.get(key)
    if chart_revision is None or chart_revision.what != what or chart_revision.showing != shown:
        turn = chart_revision.turn + 1 if chart_revision is not None else 0
        chart_revision = st.session_state[key] = _ChartRevision(what, shown, shown, turn)
    return chart_revision.drawn, chart_revision.turn


def chart_moved(chart: str, showing: Range | None) -> None:
    """For a callback: notes that somebody has moved the chart, so that it shows that part by now."""
    if (chart_revision := st.session_state.get(_revision_key(chart))) is not None:
        chart_revision.showing = showing


def forget_chart(chart: str) -> None:
    """For a callback: has the chart drawn anew in any case."""
    if (chart_revision := st.session_state.get(_revision_key(chart))) is not None:
        chart_revision.what = ""


def _revision_key(chart: str) -> str:
    return f"{chart}-revision"


# -- the part of a job's progress that Live shows: chosen by moving or zooming either curve ---------------------------
#
# A curve that is moved reports its part to the console once it has stood still for a moment. Its view stays, and the
# other curve is made anew with that part; both get new rows as before. A choice of "the newest N iterations" would not
# be enough: operators look closely at failures, and these move away from the newest iteration.

ITERATIONS = "iterations"
_FROM_TO = re.compile(r"([0-9]{1,12})-([0-9]{1,12})")


def iterations_shown(first: int, last: int) -> Range | None:
    """Reads `?iterations=120-180` from the address; None: all. A part that is older than all iterations is invalid.

    first, last: the first and the last iteration that can be shown.
    """

    def accept(word: str) -> Range | None:
        found = _FROM_TO.fullmatch(word)
        low, high = map(int, found.groups()) if found else (0, 0)
        return (low, high) if low < high and low <= last and high >= first else None

    expected = f"two iterations between {first} and {last}, the newest, such as {first}-{max(first + 1, last)}"
    return read(ITERATIONS, accept, expected, "All of them are shown.")


def zoomed(chart: str, key: str) -> None:
    """For a callback of the chart `chart`, whose widget is `key`: takes the part that it shows. Anything invalid from
    the browser is ignored."""
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
