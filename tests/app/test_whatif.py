"""The Planner page's question: to and from links, profiles of every kind, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ui_factory import plan

from openrecycle.app.plans.profiles import SavedProfile, unknown_profile
from openrecycle.app.plans.whatif import (
    PRESETS,
    WhatIf,
    follow,
    own_profile,
    parse,
    read_profile,
    read_upload,
    saved_word,
    to_keep,
    uploaded,
)
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.planner.jobs.errors import InfeasibleError, InputError, PlannerError
from openrecycle.planner.jobs.job import AUTO, Job, StageProfile, Technique, Worker
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.profiles import load_profile, shipped
from tests.conftest import examples, refuses
from tests.golden import golden

MEASURED = Job(
    3,
    2,
    4,
    profiles=(
        StageProfile(2.5, 2.0, 1.5, 1.0, (0.0, 0.2, 0.3), 10, 6, 100, 200),
        StageProfile(3.0, 3.1, 2.9, 1.0, (0.0, 0.2, 0.3), 12, 7, 110, 220),
    ),
    transfers=(0.25,),
    time_unit="ms",
    backward_transfers=(0.5,),
    capacity_bytes=(500, 600),
    speeds=((Worker(2, 1), 0.5),),
)


@st.composite
def questions(draw: st.DrawFn) -> WhatIf:
    grid = draw(st.tuples(*[st.integers(1, 6)] * 3))
    cells = [f"W{p}_{s}" for p in range(grid[0]) for s in range(grid[1])]
    profile = draw(st.sampled_from([*PRESETS, *shipped()]))
    return WhatIf(
        *grid,
        profile=profile,
        technique=draw(st.sampled_from(Technique)),
        memory=draw(st.sampled_from(["1f1b", "uniform", "none", "7"])),
        solver=draw(st.sampled_from(["auto", "list", "milp"])),
        seconds=draw(st.sampled_from([0.5, 20.0, 60.0])),
        heals_in=draw(st.sampled_from([0.0, 3600.0])),
    ).with_failed(draw(st.sets(st.sampled_from(cells))))


@examples(60)
@given(questions())
def test_a_link_says_the_whole_question(question: WhatIf) -> None:
    assert parse(question.params()) == (question, [])


def test_the_usual_question_needs_no_words() -> None:
    assert WhatIf().params() == {}
    assert parse({}) == (WhatIf(), [])
    assert WhatIf(failed=("W0_1", "W1_2")).params() == {"fail": "W0_1.W1_2"}


def test_what_a_link_says_wrongly_is_named_and_the_rest_stands() -> None:
    made, wrong = parse({"grid": "3x4", "fail": "W1_2", "memory": "lots", "time": "soon", "technique": "adaptive"})
    assert made == WhatIf(failed=("W1_2",), technique=Technique.ADAPTIVE)
    assert [error.field for error in wrong] == ["grid", "memory", "time"]
    for params, words in (
        ({"fail": "W9_0"}, "fail: got 'W9_0', expected a worker of the grid, W0_0 to W2_3"),
        ({"fail": "x"}, "fail: got 'x'"),
        ({"profile": "own:AAAA"}, "profile: got 'own:AAAA'"),
        ({"profile": "own:é"}, "profile: got"),
        ({"profile": "gpt-9"}, "expected a preset"),
        ({"grid": "0x4x6"}, "grid: got '0x4x6'"),
        ({"time": "nan"}, "time: got 'nan', expected a number from 0.1"),
    ):
        made, (error,) = parse(params)
        assert words in str(error) and made == WhatIf()


def test_a_profile_of_ones_own_travels_in_the_link_with_all_it_has() -> None:
    question = WhatIf.of(MEASURED, ("W0_1",), Technique.DECOUPLED, "bytes")
    made, wrong = parse(question.params())
    assert wrong == [] and made.job() == MEASURED
    assert made.asked().problem().failed == {Worker(0, 1)}
    smaller = made.with_grid(2, 2, 4).job()
    assert smaller.profiles[0].reductions == (0.0, 0.2) and smaller.speeds == ()
    deeper = made.with_grid(3, 4, 4)
    assert deeper.job().profiles == (*MEASURED.profiles, *MEASURED.profiles[1:] * 2)
    assert deeper.with_grid(3, 2, 4).job() == MEASURED
    assert deeper.failed == ("W0_1",)


def test_a_profile_that_is_a_preset_is_called_so() -> None:
    for name in PRESETS:
        job = WhatIf(profile=name).job()
        assert own_profile(job_doc(job)) == name
    assert WhatIf(stages=1, profile="ends").job().profiles == (StageProfile(1.0, 0.0, 2.0),)
    assert WhatIf.of_plan(plan(("W1_2",), unit="slot")) == WhatIf(failed=("W1_2",))


def test_a_zip_bomb_in_a_link_is_refused() -> None:
    huge = job_doc(MEASURED).model_copy(update={"time_unit": "x" * 5_000_000})
    with pytest.raises(InputError, match="profile: got"):
        read_profile(own_profile_of_text(huge.model_dump_json()))


def own_profile_of_text(text: str) -> str:
    import base64
    import zlib

    return "own:" + base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


def test_clicks_kill_and_revive_and_a_smaller_grid_forgets() -> None:
    question = WhatIf().toggled("W2_3").toggled("W0_0")
    assert question.failed == ("W0_0", "W2_3")
    assert question.toggled("W0_0").failed == ("W2_3",)
    assert question.with_grid(2, 4, 6).failed == ("W0_0",)
    # Ten pipelines sort by number, not by letter.
    assert WhatIf(pipelines=11).with_failed({"W10_0", "W2_0"}).failed == ("W2_0", "W10_0")


def test_shipped_profiles_fit_any_grid_that_the_model_can_be_cut_for() -> None:
    question = WhatIf(profile="gpt-3-medium", pipelines=2, stages=3, micro_batches=5)
    assert question.job() == load_profile("gpt-3-medium").job_for(2, 3, 5)
    assert parse({"profile": "gpt3-medium"}) == parse({"profile": "gpt-3-medium"})
    with pytest.raises(InputError, match="--stages: got 500"):
        replace(question, stages=500).job()


@pytest.mark.parametrize("form", ["job", "plan", "profile"])
def test_files_are_taken_up(form: str) -> None:
    asked = WhatIf(solver="list", memory="none", failed=("W1_2",))
    if form == "job":
        data = job_doc(MEASURED).model_dump_json()
        expected = MEASURED
    elif form == "plan":
        data = plan(("W1_2",)).to_json()
        expected = plan(("W1_2",)).job.job()
    else:
        measured = load_profile("gpt-3-medium")
        data = measured.model_dump_json()
        expected = measured.job.job()
    made = uploaded(read_upload(data.encode()), asked)
    assert made.job() == expected
    assert (made.failed, made.memory, made.solver) == ((), "none", "list")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not json", golden("the-file-is-not-json-2")),
        (b"\xff\xfe", golden("the-file-is-not-json-2")),
        (b"[]", golden("neither-a-profile-nor-a")),
        (b"{}", "pipelines"),
        (json.dumps({"profile_version": 1}).encode(), "model"),
        (job_doc(MEASURED).model_copy(update={"transfers": (1, 2)}).model_dump_json().encode(), "transfers: got"),
        (job_doc(MEASURED).model_copy(update={"micro_batches": 0}).model_dump_json().encode(), "micro_batches: got 0"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        read_upload(data)


def test_a_file_that_holds_more_than_any_profile_is_refused_before_it_is_looked_through() -> None:
    """Each thing that is wrong with it would be put into words, while no heartbeat is heard."""
    fields = "{" + ",".join(f'"k{i}": 1' for i in range(140_001)) + "}"
    lists = '{"job": [' + ",".join(["[]"] * 70_000) + "]}"
    for data, found in ((fields, "140,001"), (lists, "70,002")):
        with pytest.raises(PlannerError, match=found):
            read_upload(data.encode())


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_may_say_how_its_letters_are_written(encoding: str) -> None:
    assert read_upload(job_doc(MEASURED).model_dump_json().encode(encoding)) == job_doc(MEASURED)


def test_absurd_grids_and_dead_stages_are_refused() -> None:
    with refuses("grid", "99999 x 99999 x 9"):
        WhatIf(99_999, 99_999, 9).asked()
    with pytest.raises(InfeasibleError, match=golden("stage-2-has-no-living-peer")):
        WhatIf(failed=("W0_2", "W1_2", "W2_2")).asked().problem()
    with pytest.raises(InputError, match="--technique: got 'fault-free'"):
        WhatIf(failed=("W0_2",), technique=Technique.FAULT_FREE).asked().problem()


def test_the_request_for_migrations_has_the_costs() -> None:
    asked = WhatIf(failed=("W0_2",), state_gb=2.5, copy_gbs=5, heals_in=60).migrations_asked()
    assert (asked.state_bytes, asked.bandwidth, asked.heals_in) == (2_500_000_000, 5e9, 60)
    plain = WhatIf(failed=("W0_2",))
    assert (plain.migrations_asked().state_bytes, plain.migrations_asked().heals_in) == (None, None)
    free, wrong = parse(replace(plain, state_gb=0.0).params())
    assert free.migrations_asked().state_bytes == 0 and not wrong


@pytest.mark.parametrize("partition", [AUTO, "12,12,8,12"])
def test_migrations_are_asked_for_with_the_layers_of_the_plan(partition: str) -> None:
    question = WhatIf.of(Job.uniform(3, 4, 6, layers=44), ("W0_2", "W1_2"), Technique.STAGGERED, "none")
    question = replace(question, partition=partition)
    asked, plan = question.migrations_asked(), question.asked()
    assert (asked.over, asked.partition) == (plan.over, plan.partition) != ("schedules", ())


# -- profiles that go by name -------------------------------------------------------------------

KEPT = SavedProfile("mine", job_doc(MEASURED), "ada")
LAYERED = SavedProfile("gpt", load_profile("gpt-3-medium"), "ada")


def gone(name: str) -> SavedProfile:
    raise unknown_profile(name)


def down(name: str) -> SavedProfile:
    raise ConsoleError(503, "no_database", "the database does not answer")


def test_a_named_profile_brings_its_stages_and_a_link_names_it() -> None:
    question = WhatIf(failed=("W0_0", "W1_3")).with_kept(KEPT)
    assert (question.stages, question.failed) == (2, ("W0_0",))
    assert question.job().profiles[0].forward == 2.5 and question.job().pipelines == 3
    link = question.params()
    assert link["profile"] == f"saved:mine@{KEPT.digest}"
    assert parse(link, KEPT) == (question, []) and parse(link, KEPT)[0].job() == question.job()
    (error,) = parse(link)[1]
    assert str(error).startswith("profile: got 'mine',")
    assert to_keep(question) == KEPT.document


def test_a_named_profile_on_another_number_of_stages() -> None:
    own = WhatIf().with_kept(KEPT).with_grid(3, 3, 4)
    assert own.named is None and [p.forward for p in own.job().profiles] == [2.5, 3.0, 3.0]
    layered = WhatIf().with_kept(LAYERED).with_grid(2, 6, 4)
    assert layered.named == LAYERED and layered.job() == load_profile("gpt-3-medium").job_for(2, 6, 4)
    assert to_keep(layered) == LAYERED.document, "and not what it makes of six stages"
    # A link by hand that does not fit is said, and mended on the page.
    wrong = parse({"grid": "3x4x6", "profile": saved_word(KEPT)}, KEPT)[0]
    with pytest.raises(InputError, match="stages: got 4,"):
        wrong.job()
    assert wrong.with_grid(3, 2, 6).named == KEPT and len(wrong.with_grid(3, 5, 6).job().profiles) == 5


def test_a_name_that_stands_for_something_else_meanwhile() -> None:
    question = WhatIf().with_kept(KEPT)
    newer = SavedProfile("mine", job_doc(Job.uniform(1, 2, 1)), "eve")
    word = question.profile
    assert follow(word, lambda name: KEPT, None) == follow(word, lambda name: KEPT, question.as_own)
    assert follow("saved:mine", lambda name: KEPT, None).word == word, "a link by hand needs no digest"
    link = follow(word, lambda name: newer, None)
    assert (link.word, link.kept) == (saved_word(newer), newer) and golden("saved-anew-by-eve-since") in link.note
    for keeper, what in ((lambda name: newer, "was saved anew by eve"), (gone, "was deleted")):
        mine = follow(word, keeper, question.as_own)
        assert mine.kept is None and f"mine {what} meanwhile" in mine.note
        assert parse({**question.params(), "profile": mine.word})[0].job().profiles == question.job().profiles
    assert follow(word, gone, None).kept is None
    assert follow("even", gone, None).word == "even", "nobody is asked"
    assert follow("saved:no name\x00", down, None).kept is None, "nor for what can be no name"
    large = replace(WhatIf().with_kept(LAYERED), stages=500)
    assert follow(large.profile, gone, large.as_own).kept is None, "it was no job that one could go on with"
    with pytest.raises(ConsoleError, match=golden("does-not-answer-2")):
        follow(word, down, question.as_own)


def test_what_is_kept_of_a_profile() -> None:
    assert to_keep(WhatIf(profile="gpt-3-medium")) == load_profile("gpt-3-medium")
    assert to_keep(WhatIf()) == job_doc(WhatIf().job())
    measured = load_profile("gpt-3-medium")
    assert to_keep(uploaded(measured, WhatIf()), measured) == measured
