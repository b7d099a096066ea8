"""What a page says of a value in its address that the control of that name cannot have."""

from __future__ import annotations

from html import unescape
from typing import Any

import pytest
import ui_factory as factory
from streamlit.testing.v1 import AppTest
from ui_console import MAIN, ConsoleHere, JobHere, turn_to, until

from openrecycle.app.catalogs.contents import CatalogRequest
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.whatif import WhatIf
from openrecycle.app.ui import address
from tests.golden import golden

pytestmark = pytest.mark.processes


def script() -> None:
    """A page with one control of each kind."""
    from functools import partial

    import streamlit as st

    from openrecycle.app.ui import address

    address.enter(st.session_state.get("page", "first"))
    with st.container(horizontal=True):
        address.selectbox("Select", ["a", "b"], key="select", format_func=str.upper)
        address.segmented_control("Segment", ["a", "b"], default="b", key="segment")
        address.several(partial(st.pills, selection_mode="multi"), "Pills", ["a", "b", "c"], default=["a"], key="pills")
        address.several(st.multiselect, "Many", ["a", "b", "c"], default=["a", "b"], key="many")
        address.number_input("Whole", 1, 1024, 7, key="whole")
        address.number_input("Real", 0.5, 2e3, 1.0, key="real")
        address.text_input("Text", "plain", key="text", max_chars=5)
        address.toggle("Switch", key="switch")
        if st.session_state.get("more"):
            address.selectbox("Of few", range(st.session_state.get("few", 30)), key="few-of")
    address.choose_time("plan", 840.0, "ms")
    st.button("Another job", key="another", on_click=address.moved)
    address.tabs(["One", "Two"], key="tabs")
    if address.expander("Figures", key="figures").open:
        st.write("the figures")
    found = address.read("free", lambda text: int(text) if text.isdecimal() else None, "a whole number")
    box = "free-box"
    st.selectbox(
        "Free", range(9), found or 0, key=box, on_change=lambda: address.put("free", str(st.session_state[box]))
    )
    address.say("free")


def opened(**query: Any) -> AppTest:
    test = AppTest.from_function(script, default_timeout=60)
    for name, value in query.items():
        test.query_params[name] = value
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def said(test: AppTest) -> list[str]:
    bodies = [element.proto.body for element in test.get("html")]
    return [unescape(b.split(">", 1)[1].removesuffix("</div>")) for b in bodies if "or-field-error" in b]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"select": "c"}, "select: got 'c',"),
        ({"segment": "c"}, "segment: got 'c',"),
        ({"segment": ""}, "segment: got '',"),
        ({"pills": "z"}, "pills: got 'z',"),
        ({"pills": ["b", "z"]}, "pills: got 'z',"),
        ({"many": ["z", "c"]}, "many: got 'z',"),
        ({"whole": "x"}, "whole: got 'x',"),
        ({"whole": "1025"}, "whole: got '1025',"),
        ({"whole": "2.5"}, "whole: got '2.5',"),
        ({"real": "nan"}, "real: got 'nan',"),
        ({"real": "inf"}, "real: got 'inf',"),
        ({"real": "0.4"}, "real: got '0.4',"),
        ({"text": "too long"}, "text: got 'too long',"),
        ({"switch": "maybe"}, "switch: got 'maybe',"),
        ({"tabs": "Three"}, "tabs: got 'Three',"),
        ({"figures": "1"}, "figures: got '1',"),
        ({"free": "<b>"}, "free: got '<b>',"),
        ({"switch": "x" * 500}, f"switch: got '{'x' * 60}…',"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_was_expected(query: dict[str, Any], words: str) -> None:
    test = opened(**query)
    for _ in range(2):
        (line,) = said(test)
        assert line.startswith(words)
        test.run()
    left = [each for name in query for each in dict(test.query_params).get(name, []) if each]
    assert not any(f"'{each}'" in words for each in left)  # the address says what is shown
    test.session_state["page"] = "second"
    test.query_params.clear()
    assert said(test.run()) == []


def test_a_right_link_is_taken_without_a_word() -> None:
    test = opened(
        select="B", segment="a", pills=["b", "c"], many="", whole="1024", real="1e3", text="short", switch="TRUE",
        tabs="Two", figures="true", free="4", unknown="what",
    )  # fmt: skip
    assert said(test) == []
    state = test.session_state
    assert (state["select"], state["segment"], state["pills"], state["many"]) == ("b", "a", ["b", "c"], [])
    assert (state["whole"], state["real"], state["text"], state["switch"]) == (1024, 1000.0, "short", True)
    assert test.markdown[0].value == "the figures" and test.selectbox(key="free-box").value == 4
    defaults = opened(select="A", segment="b", pills="a", many=["a", "b"], whole="7", switch="false", tabs="One")
    assert said(defaults) == []


def test_a_link_names_an_option_by_itself_or_by_what_the_page_calls_it() -> None:
    test = opened(select="b")
    assert said(test) == [] and test.selectbox(key="select").value == "b"
    test.selectbox(key="select").select("a").run()
    assert "select" not in test.query_params and test.selectbox(key="select").value == "a"
    test.selectbox(key="select").select("b").run()
    assert test.query_params["select"] == "b"
    test.query_params["select"] = "A"  # as a link had it before; or Back
    test.run()
    assert next(each.value for each in test.selectbox if each.label == "Select") == "a"


def test_the_slider_of_the_time_follows_the_address() -> None:
    test = opened(time="100-300")
    assert test.slider[0].value == (100.0, 300.0)
    test.query_params["time"] = "400-600.5"  # Back, or a chart that was dragged
    assert test.run().slider[0].value == (400.0, 600.5)
    test.slider[0].set_range(0.0, 840.0).run()
    assert test.slider[0].value == (0.0, 840.0) and "time" not in test.query_params
    key = test.slider[0].key
    test.slider[0].set_range(1 / 3, 500.0).run()
    assert test.query_params["time"] == "0.333333333-500" and test.slider[0].key == key, "the same slider still"


def test_it_is_said_until_that_control_is_changed() -> None:
    test = opened(whole="0", select="c", free="x")
    assert [words.split(":")[0] for words in said(test)] == ["select", "whole", "free"]
    test.selectbox(key="select").select("b").run()
    assert [words.split(":")[0] for words in said(test)] == ["whole", "free"]
    test.number_input(key="whole").set_value(9).run()
    test.selectbox(key="free-box").select(3).run()
    assert said(test) == []
    test.number_input(key="whole").set_value(7).run()
    assert said(test) == []  # the value that was shown with it


def test_of_many_or_long_values_the_first_few_are_named() -> None:
    assert address.one_of("abc") == golden("one-of-a-b-c")
    assert address.one_of(map(str, range(30))) == "one of 0, 1, 2, 3, 4, 5, 6, 7 and 22 more"
    long = [letter * 50 for letter in "abcd"]
    assert address.one_of(long) == f"one of {long[0]}, {long[1]} and 2 more"
    assert address.one_of(["a" * 500]) == "one of " + "a" * 500


def test_a_field_that_is_drawn_later_is_looked_at_then() -> None:
    few = "few-of: got '99', expected one of 0, 1, 2, 3, 4, 5, 6, 7 and 22 more. The default is shown."
    test = opened(**{"few-of": "99"})
    assert said(test) == []
    test.session_state["more"] = True
    assert said(test.run()) == [few]


def test_what_another_job_has_no_room_for_was_not_sent_for_it() -> None:
    test = opened(**{"few-of": "20"})
    test.button(key="another").click().run()
    test.session_state["more"], test.session_state["few"] = True, 10
    assert said(test.run()) == []
    taken = opened(**{"few-of": "20"})
    taken.session_state["more"] = True
    assert said(taken.run()) == [] and taken.session_state["few-of"] == 20
    taken.session_state["few"] = 10
    assert said(taken.run()) == []


# -- the pages ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(here: ConsoleHere) -> JobHere:
    made = JobHere(here.console, "linked job").register().commit(0, 9, 1)
    return made.die("W1_2").heal("W1_2", 2).commit(10, 15, 2)


BAD = "no such thing"
# Pages, what else their address says, and the names that are given there a value that cannot be.
EVERY_PAGE: list[tuple[str, dict[str, str], list[str]]] = [
    ("live", {}, ["refresh", "events", "progress-figures", "iterations"]),
    ("schedule", {"show": "One pipeline"}, ["pipeline", "draw", "figures", "path", "time"]),
    ("schedule", {}, ["show", "figures"]),
    ("compare", {}, ["baseline", "show", "figures", "time"]),
    ("planner", {"saved": "SAVED"}, ["details", "show", "planner-bytes"]),
    ("catalog", {}, ["cat_solver", "cat_count", "cat_plan"]),
    ("catalog", {"cat_solver": "CP-SAT (may prove it optimal)"}, ["cat_seconds"]),
    (
        "simulate",
        {"sim_pipelines": "2", "sim_stages": "2"},
        ["sim_job", "model", "trace", "policies", "sim_micro_batches", "sim_seed", "sim_dollars"],
    ),
    (
        "simulate",
        {"sim_pipelines": "2", "sim_stages": "2", "sim_micro_batches": "2"},
        ["sim_mtbf", "sim_repair", "sim_hours", "sim_host_mtbf"],
    ),
    ("simulate", {"sim_job": "JOB", "trace": "This job's own history"}, ["covers", "sim_dollars"]),
    ("help", {}, ["section"]),
]


@pytest.mark.parametrize(("page", "rest", "bad"), EVERY_PAGE)
def test_every_page_says_what_of_its_link_cannot_be(
    here: ConsoleHere, console: ConsoleService, job: JobHere, page: str, rest: dict[str, str], bad: list[str]
) -> None:
    filling = console.catalogs.fill(CatalogRequest(console.jobs.find(job.job_id).plans.question, 1))
    until(lambda: not filling.running, "the catalog is filled")
    plan = factory.plan(("W0_1",), unit="slot")
    words = {
        "SAVED": lambda: console.plans.library.save(plan, "kept"),
        "JOB": lambda: f"{job.spec.name} · {job.job_id}",
    }
    query = {name: words[value]() if value in words else value for name, value in rest.items()}
    if page == "planner":
        query |= WhatIf.of_plan(plan).params()

    def open_page(**values: str) -> AppTest:
        test = AppTest.from_file(MAIN, default_timeout=60)
        if page != "live":
            turn_to(test, page)
        for name, value in ({"job": job.job_id} | query | values).items():
            test.query_params[name] = value
        test.run()
        assert not test.exception, test.exception[0].message
        return test

    assert said(open_page()) == []
    test = open_page(**dict.fromkeys(bad, BAD))
    found = said(test)
    assert sorted(words.split(":")[0] for words in found) == sorted(bad)
    assert all(f"got '{BAD}', expected " in words for words in found)
    if page == "live":
        test.segmented_control(key="events").set_value("open")
        test.toggle(key="refresh").set_value(False).run()
        assert [words.split(":")[0] for words in said(test)] == ["iterations", "progress-figures"]


def strange() -> None:
    """A page of which only the names in its address count."""
    import streamlit as st

    from openrecycle.app.ui import address

    address.enter(st.session_state.get("page", "schedule"))
    address.say_unknown()


def test_a_name_that_a_page_has_nothing_for_is_said() -> None:
    test = AppTest.from_function(strange, default_timeout=60)
    for name in ("paln", "plan", "show", "sim_seed"):
        test.query_params[name] = "x"
    test.run()
    first, second = said(test)
    assert first.startswith(golden("paln-in-the-link")) and golden("did-you-mean-plan") in first
    assert second.startswith(golden("sim-seed-in-the-link"))
    test.session_state["page"] = "simulate"
    assert [words.partition(" ")[0] for words in said(test.run())] == ["'paln'", "'plan'", "'show'"]


@pytest.mark.parametrize("page", list(address.NAMES))
def test_what_the_pages_put_into_their_addresses_they_know(
    page: str, here: ConsoleHere, console: ConsoleService
) -> None:
    """Opened as people open them; nothing of what is in an address afterwards, or has a control, is called unknown."""
    JobHere(console, "known names").register().commit(0, 9, 1)
    test = AppTest.from_file(MAIN, default_timeout=60).run()
    if page:
        turn_to(test, page).run()
    assert not test.exception, test.exception[0].message
    known = address.NAMES[page]
    begins = tuple(name[:-1] for name in known if name.endswith("*"))
    for name in [*test.query_params, *test.session_state[address.NOTES]]:
        assert name in (*known, "job") or (begins and name.startswith(begins)), name
    assert not [words for words in said(test) if golden("in-the-link") in words]
