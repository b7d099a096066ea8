"""Controls whose value is in the address, and what is said where the address holds none that they can have.

Streamlit drops such a value without a word. Here each control says beside itself what it got and what was expected:
from the first time that it is drawn on the page until it is changed or the page is left. Of a value for which another
job or plan, chosen since, has no room, nothing is said: nobody has sent it for that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from html import escape
from importlib import import_module
from typing import Any, Literal, TypeVar, cast

import streamlit as st
from streamlit.navigation.page import Page

from openrecycle.app.plans.whatif import PARAMS

T = TypeVar("T")
D = TypeVar("D")
N = TypeVar("N", int, float)

BIND: Literal["query-params"] = "query-params"
DEFAULT, LEFT_OUT = "The default is shown.", "It is left out."
SWITCH = "true or false"
# In the session: the page that is open, and what has been noted of each name since it was opened.
PAGE, NOTES = "bound-page", "bound-notes"
JOB = "job"
# In the session: the job that was chosen on another page; and the plans that Compare began with, which nobody has
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
# Of many possible values the first few are named; of a long one its beginning.
MOST_NAMED, LONGEST = 8, 60
WIDTH = 260


@dataclass
class _Note:
    """Of one name of the address. words: what is said, for as long as the control has the value `value`. wrong: what
    cannot be; of a control that has not been drawn since. put: whether somebody has chosen `chosen`, None: nothing,
    since the page last ran as a whole."""

    words: str = ""
    value: object = None
    wrong: str | None = None
    put: bool = False
    chosen: str | None = None


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
        note.put = note.put and st.query_params.get(name) == note.chosen


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


def forget_job() -> None:
    """For a callback: the page goes on with the newest job."""
    st.query_params.pop(JOB, None)
    st.session_state.pop(CHOSEN, None)


def read(name: str, accept: Callable[[str], T | None], expected: str, instead: str = DEFAULT) -> T | None:
    """What the address says of a name that no control is bound to; None if nothing, or nothing that can be: that
    leaves the address, and `say` says what was wrong with it.

    accept: makes a value of the address's words; None: it can't.
    """
    note = _notes().get(name)
    if note is not None and note.put and st.query_params.get(name) != note.chosen:
        _write(name, note.chosen)  # a browser that has not heard of it yet has asked for a part of the page
    given = st.query_params.get(name)
    if given is None:
        return None
    found = accept(given)
    if found is None:
        note = _notes().setdefault(name, _Note(sentence(name, given, expected, instead)))
        note.put = False
        del st.query_params[name]
    else:
        _notes().setdefault(name, _Note())
    return found


def say(name: str) -> None:
    """Says what was wrong with the address's value, if anything was, beside what has been drawn last."""
    if (note := _notes().get(name)) and note.words:
        field_error(note.words)


def put(name: str, chosen: str | None) -> None:
    """For a callback: somebody has chosen that value of what `read` reads, None: none. It goes into the address, of
    which nothing is said any more, and counts whatever the browser sends for the old one: a page's part that is
    refreshed by the clock may have been asked for before the browser heard of the new one."""
    _notes()[name] = _Note(put=True, chosen=chosen)
    _write(name, chosen)


def _write(name: str, words: str | None) -> None:
    if words is None:
        st.query_params.pop(name, None)
    else:
        st.query_params[name] = words


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


# -- Streamlit's controls. What is said here of their look is passed on to them. --------------------------------------


def selectbox(
    label: str,
    options: Sequence[T],
    *,
    key: str,
    format_func: Callable[[Any], str] = str,
    index: int = 0,
    on_change: Callable[[], None] = lambda: None,
    **look: Any,
) -> T:
    """One of the options, of which there is at least one. The address has the option itself, so that a link stays good
    when the page words it otherwise; what the page calls it is understood too. index: of the default, which no address
    has."""
    known = {format_func(option): option for option in options} | {str(option): option for option in options}
    sent, default = read(key, known.get, one_of(map(str, options))), options[index]
    shown = default if sent is None else sent
    if st.session_state.get(key) != shown:
        st.session_state[key] = shown

    def choose() -> None:
        chosen = st.session_state[key]
        put(key, None if chosen == default else str(chosen))
        on_change()

    chosen = st.selectbox(label, options, key=key, format_func=format_func, on_change=choose, **look)
    say(key)
    return cast("T", chosen)


def segmented_control(
    label: str, options: Sequence[T], *, key: str, format_func: Callable[[Any], str] = str, default: T, **look: Any
) -> T:
    """One of the options: that it has none cannot be chosen."""
    words = [format_func(option) for option in options]
    chosen = _drawn(
        key,
        lambda given: _strange(given[:1], words),
        lambda: one_of(words),
        lambda: st.segmented_control(
            label, options, default=default, required=True, key=key, format_func=format_func, bind=BIND, **look
        ),
    )
    return default if chosen is None else chosen


def pills(
    label: str, options: Sequence[T], *, key: str, format_func: Callable[[Any], str] = str, default: list[T]
) -> list[T]:
    """Any number of the options; none of them is `?name=`."""
    return _several(partial(st.pills, selection_mode="multi"), label, options, key, format_func, default)


def multiselect(
    label: str, options: Sequence[T], *, key: str, format_func: Callable[[Any], str] = str, default: list[T]
) -> list[T]:
    """Any number of the options; none of them is `?name=`."""
    return _several(st.multiselect, label, options, key, format_func, default)


def _several(
    draw: Callable[..., list[T]],
    label: str,
    options: Sequence[T],
    key: str,
    format_func: Callable[[Any], str],
    default: list[T],
) -> list[T]:
    words = [format_func(option) for option in options]
    return _drawn(
        key,
        lambda given: _strange(given, [*words, ""]),
        lambda: one_of(words),
        lambda: draw(label, options, default=default, key=key, format_func=format_func, bind=BIND),
        several=set(words),
    )


def number_input(label: str, least: N, most: N, value: N, *, key: str, **look: Any) -> N:
    """A number from `least` to `most`, a whole one where they are."""
    whole = isinstance(value, int)

    def strange(given: list[str]) -> str | None:
        try:
            number = float(given[-1])
        except ValueError:
            return given[-1]
        fits = math.isfinite(number) and least <= number <= most and not (whole and number % 1)
        return None if fits else given[-1]

    return _drawn(
        key,
        strange,
        lambda: f"a {'whole ' * whole}number from {least:,.10g} to {most:,.10g}",
        lambda: cast("N", st.number_input(label, least, most, value, key=key, bind=BIND, **look)),
        instead=lambda shown: DEFAULT if shown == value else f"{shown:,} is shown.",
    )


def text_input(label: str, value: str, *, key: str, max_chars: int, **look: Any) -> str:
    return _drawn(
        key,
        lambda given: None if len(given[-1]) <= max_chars else given[-1],
        lambda: f"at most {max_chars} characters",
        lambda: cast("str", st.text_input(label, value, key=key, max_chars=max_chars, bind=BIND, **look)),
        instead=lambda shown: DEFAULT if shown == value else "Its beginning is shown.",
    )


def toggle(label: str, *, key: str, value: bool = False, **look: Any) -> bool:
    return _drawn(
        key, _no_switch, lambda: SWITCH, lambda: cast("bool", st.toggle(label, value, key=key, bind=BIND, **look))
    )


def tabs(labels: list[str], *, key: str) -> Sequence[Any]:
    """Their containers, of which one's `.open` is true."""
    return _drawn(
        key,
        lambda given: _strange(given[-1:], labels),
        lambda: one_of(labels),
        lambda: st.tabs(labels, key=key, on_change="rerun", bind=BIND),
        value_of=lambda drawn: [each.open for each in drawn],
        above=True,
    )


def expander(label: str, *, key: str, icon: str | None = None) -> Any:
    """Folded up at first. What is large in it is to be made only where its `.open` is true."""
    return _drawn(
        key,
        _no_switch,
        lambda: SWITCH,
        lambda: st.expander(label, key=key, icon=icon, on_change="rerun", bind=BIND),
        value_of=lambda drawn: drawn.open,
        instead=lambda _: "It is folded up.",
        above=True,
    )


# -- the one look at the address --------------------------------------------------------------------------------------


def _drawn(
    name: str,
    strange: Callable[[list[str]], str | None],
    expected: Callable[[], str],
    draw: Callable[[], D],
    *,
    value_of: Callable[[D], object] = lambda drawn: drawn,
    instead: Callable[[Any], str] = lambda _: DEFAULT,
    several: set[str] | None = None,
    above: bool = False,
) -> D:
    """Draws the control; beside it, or above it, what was wrong with the address.

    strange: of the address's values the one that cannot be, or None. value_of: what the control is set to. instead:
    what is shown then. several: the values, of a control that takes any number of them.
    """
    notes = _notes()
    given = st.query_params.get_all(name)
    # Streamlit takes what it drops out of the address while it draws; and a run may be cut short while it does.
    if name not in notes:
        notes[name] = _Note(wrong=strange(given) if given else None)
    note = notes[name]
    place = st.container() if above and (note.words or note.wrong is not None) else None
    drawn = draw()
    value = value_of(drawn)
    if note.wrong is not None:
        ending = LEFT_OUT if several and not several.isdisjoint(given) else instead(value)
        note.words, note.value, note.wrong = sentence(name, note.wrong, expected(), ending), value, None
    elif note.words and value != note.value:
        note.words = ""
    if note.words:
        with place or nullcontext():
            field_error(note.words)
    return drawn


def _notes() -> dict[str, _Note]:
    return st.session_state.setdefault(NOTES, {})  # type: ignore[no-any-return]


def _strange(given: list[str], words: list[str]) -> str | None:
    return next((each for each in given if each not in words), None)


def _no_switch(given: list[str]) -> str | None:
    return None if given[-1].lower() in ("true", "false") else given[-1]
