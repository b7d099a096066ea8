"""Profiles on the Planner page: of a file, kept under a name, measured by a job."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import pytest
from planner_page import click, open_page, page_console, params, run, words
from streamlit.testing.v1 import AppTest
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.messages.protocol import Heartbeat
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.profiles import measured_profile
from openrecycle.app.plans.whatif import parse
from openrecycle.app.security.access import Caller, Role
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import job_doc
from tests.golden import golden

pytestmark = pytest.mark.processes


@pytest.fixture
def console(here: ConsoleHere) -> Iterator[ConsoleService]:
    yield from page_console(here)


def test_a_file_brings_its_profile_and_a_wrong_one_is_refused_beside_it(console: ConsoleService) -> None:
    test = open_page(memory="none")
    job = Job.uniform(2, 3, 5, durations={"F": 2, "I": 2, "W": 1}, time_unit="ms")
    test.file_uploader[0].set_value(("mine.json", job_doc(job).model_dump_json().encode(), "application/json"))
    run(test)
    made, _ = parse(params(test))
    assert made.job() == job and made.memory == "none"
    assert "Your own" in next(each.options for each in test.selectbox if each.label == "Profile")
    assert "Stages: F 2, I 2, W 1 ms" in [e.label for e in test.expander]
    test.file_uploader[0].set_value(("wrong.json", b"{}", "application/json"))
    run(test)
    assert golden("wrong-json-the-file-is") in words(test)
    assert parse(params(test))[0] == made


# -- profiles by name ---------------------------------------------------------------------------


def name_field(test: AppTest) -> Any:
    return next(field for field in test.text_input if str(field.key).startswith("planner-profile-name"))


def save_as(test: AppTest, name: str) -> AppTest:
    """Name and button in one run, as in a browser."""
    name_field(test).set_value(name)
    return click(test, "planner-profile-save")


def selected(test: AppTest) -> str:
    box = next(b for b in test.selectbox if b.label == "Profile")
    return str(box.value)


def choose(test: AppTest, value: str) -> AppTest:
    next(b for b in test.selectbox if b.label == "Profile").set_value(value)
    return run(test)


def test_a_profile_is_saved_chosen_replaced_and_deleted(console: ConsoleService) -> None:
    test = save_as(open_page(profile="uneven"), "not a name")
    assert escape("name: got 'not a name', expected 1 to 80 letters") in words(test) and not test.success
    assert golden("comes-with-the-planner-choose") in words(save_as(test, "gpt-3-medium"))
    save_as(test, "stairs")
    link = params(test)["profile"]
    assert link.startswith("saved:stairs@") and "Saved as **stairs**" in words(test)
    assert selected(test) == "saved:stairs"
    # Elsewhere it is chosen like a preset, and a link brings it.
    other = choose(open_page(fail="W1_2"), "saved:stairs")
    assert params(other) == {"fail": "W1_2", "profile": link}
    assert selected(open_page(profile=link)) == "saved:stairs"
    # Its name again, for other times: it asks.
    choose(other, "even")
    save_as(other, "stairs")
    assert escape("name: 'stairs' is taken") in words(other), "the page had not asked yet"
    assert golden("stairs-is-there-already-4") in words(other)
    assert other.button(key="planner-profile-save").label == "Replace it"
    click(other, "planner-profile-save")
    assert selected(other) == "saved:stairs" and params(other)["profile"] != link
    # Whoever had the one before keeps it; whoever has but a link to it gets the new one. Both are told.
    run(test)
    assert golden("stairs-was-saved-anew-by") in words(test)
    assert selected(test) == "uneven", "it is the preset that it was saved from"
    late = open_page(profile=link)
    assert golden("saved-anew-by-operator-in") in words(late)
    assert params(late)["profile"] == params(other)["profile"]
    # Deleting asks, and leaves what is on the page.
    click(click(other, "planner-profile-delete"), "planner-profile-stay")
    assert selected(other) == "saved:stairs"
    click(click(other, "planner-profile-delete"), "act-kill-profile")
    assert "**stairs** is deleted" in words(other) and selected(other) == "even"
    assert golden("expected-the-name-of-a") in words(open_page(profile=link))
    told = [(row["action"], row["detail"]) for row in console.security.audit.read()]
    assert told[-3:] == [("save profile", ""), ("save profile", "replaced"), ("delete profile", "")]


def test_what_a_job_measures_is_a_profile(console: ConsoleService) -> None:
    job = JobHere(console, "measures").register()
    test = open_page()
    option = f"measured:{job.job_id}"
    assert not [o for o in test.selectbox(key="planner-profile").options if "measures" in o], "nothing reported yet"
    beats = {"F": 40.5, "I": 41.25, "W": 39.0}
    for name in job.names:
        beat = Heartbeat(
            worker=name,
            incarnation=name + "-a",
            seq=1,
            generation=1,
            iteration=0,
            phase="training",
            op_milliseconds=beats,
        )
        console.reports.heartbeats(job.job_id, [beat])
    live = console.jobs.find(job.job_id)
    smoothed = live.measurements.op_times.smoothed
    until(lambda: measured_profile(live.plans.nominal, smoothed) is not None, "the heartbeats are taken in")
    choose(run(test), option)
    assert golden("medians-of-a-stages-peers") in words(test) and selected(test) == "own"
    made, wrong = parse(params(test))
    assert not wrong and {(p.forward, p.input_backward, p.weight_backward) for p in made.job().profiles} == {
        (40.5, 41.25, 39.0)
    }
    assert made.job().time_unit == "ms"
    save_as(test, "as-measured")
    assert console.plans.profiles.job("as-measured").profiles == made.job().profiles
    console.plans.profiles.delete("as-measured")


def test_whoever_may_only_look_on_chooses_and_does_not_save(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    console.plans.profiles.put("theirs", job_doc(Job.uniform(1, 2, 1)), "ada")
    viewer = Caller("oidc:grace", "grace", Role.VIEW)
    monkeypatch.setattr(console.security.access, "guarded", True)
    monkeypatch.setattr(console.security.access, "caller", lambda header: viewer)
    test = choose(open_page(), "saved:theirs")
    assert selected(test) == "saved:theirs" and params(test)["grid"] == "3x2x6"
    assert test.button(key="planner-profile-save").disabled and test.button(key="planner-profile-delete").disabled
    assert golden("grace-may-look-at-everything") in words(test)
    monkeypatch.undo()
    console.plans.profiles.delete("theirs")
