"""The controls of the Planner page. The page's question (app.plans.whatif) is only in the URL, and every control writes
to it.

There are controls for grid, technique, memory and solver, and for questions to start from; the grid of workers, where a
click marks one dead or alive; and the profile, which is chosen, uploaded or measured, edited in a table, and saved
under a name.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st
from streamlit.runtime.uploaded_file_manager import UploadedFile

from openrecycle.app.charts import text
from openrecycle.app.charts.progress import PICKED, dead_grid
from openrecycle.app.charts.theme import Palette
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.profiles import HELP, ProfileInfo, edited, measured_profile, row_name, table
from openrecycle.app.plans.solving import MAX_SECONDS
from openrecycle.app.plans.sources import without
from openrecycle.app.plans.whatif import (
    ENDS,
    EVEN,
    GRID,
    MEMORY,
    OWN,
    PARAMS,
    PARTITION,
    PRESETS,
    PROFILE,
    SAVED,
    SOLVER,
    STEPS,
    TECHNIQUE,
    UNEVEN,
    Checked,
    Keeper,
    WhatIf,
    at_random,
    follow,
    own_profile,
    parse,
    read_upload,
    step_of,
    to_keep,
    uploaded,
)
from openrecycle.app.ui import address, components
from openrecycle.app.ui.access import acting, actor, told, why_not
from openrecycle.app.ui.address import control, field_error
from openrecycle.app.ui.facts import SOLVER_WORDS
from openrecycle.app.ui.plan_pickers import file_uploader, read_file, show_reading
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import AUTO, MOST_ACTIVATIONS, Job, MemoryLimit, StageProfile, Technique, Worker
from openrecycle.planner.plans.plan import JobDoc, Plan, job_doc
from openrecycle.planner.profiles import Profile, shipped
from openrecycle.planner.solvers.portfolio import SOLVERS

# -- the page's question ------------------------------------------------------------------------

QUESTION = "planner-question"
# Names in a link beside the question: a saved plan that answers it, and the paper's example.
SAVED_PARAM, EXAMPLE = "saved", "example"
# Further names: the question of the plan before, which is shown beside it; which plan is drawn; and which part of it.
BEFORE, SHOW, WINDOW = "before", "show", "window"
MESSAGE = "planner-message"
PAGE = "page"
PROFILE_NOTE = "profile-note"


def current(keeper: Keeper) -> tuple[WhatIf, list[InputError]]:
    """Returns the question of the URL, and errors in it. Links between pages drop the URL's question, so the session
    remembers it.

    keeper: finds a saved profile by its name. Raises ConsoleError.
    """
    words = {name: st.query_params[name] for name in PARAMS if name in st.query_params}
    if not words and SAVED_PARAM not in st.query_params:
        words = _words(now())
        st.query_params.update(words)
    kept = None
    if word := words.get(PROFILE):
        before = now()
        had = before.as_own if before.named is not None and before.profile == word else None
        named = follow(word, keeper, had)
        kept, words[PROFILE] = named.kept, named.word
        if named.word != word:
            st.query_params[PROFILE] = named.word
        if named.note:
            say(PROFILE_NOTE, named.note)
    made, wrong = parse(words, kept)
    st.session_state[QUESTION] = made
    return made, wrong


def _words(question: WhatIf) -> dict[str, str]:
    """Returns the question's words for the URL. The default question gets a word, too, so that the browser's Back leads
    to it; a URL without any word comes from a link between pages."""
    return question.params() or {GRID: question.words()[GRID]}


def now() -> WhatIf:
    """Returns the present question, for callbacks, which run before the page does."""
    return st.session_state.get(QUESTION) or WhatIf()


def change(made: WhatIf, *, saved: str | None = None, example: bool = False) -> None:
    """Asks another question. saved: the fingerprint of a plan that answers it. example: show the paper's steps,
    which stay as long as the question is one of them."""
    if made != st.session_state.get(QUESTION):
        for name in (SHOW, WINDOW):
            address.put(name, None)
    st.session_state[QUESTION] = made
    words = _words(made)
    if saved:
        words[SAVED_PARAM] = saved
    if example or (EXAMPLE in st.query_params and step_of(made)):
        words[EXAMPLE] = "paper"
    for name in (*PARAMS, SAVED_PARAM, EXAMPLE):
        if words.get(name) != st.query_params.get(name):
            address.put(name, words.get(name))


def choice(
    label: str, options: Mapping[str, str], name: str, value: str, choose: Callable[[str], object], **look: Any
) -> None:
    """Draws a choice of one of the options, which have words. choose: as in `address.control`. look: passed on to
    Streamlit."""

    def draw(value: str, **rest: Any) -> None:
        names = list(options)
        st.selectbox(label, names, names.index(value), format_func=lambda each: options.get(each, each), **look, **rest)

    address.control(draw, name, value, choose)


def say(where: str, words: str) -> None:
    """Has the next run of the page show a sentence of a callback. where: the field beside which it belongs."""
    st.session_state[MESSAGE] = (where, words)


def said(where: str) -> str:
    """Returns the sentence of a callback for this field, once."""
    known, words = st.session_state.get(MESSAGE, ("", ""))
    if known != where:
        return ""
    del st.session_state[MESSAGE]
    return str(words)


# -- the question's controls --------------------------------------------------------------------

MAX_SIDE = 100_000
TECHNIQUES = tuple(Technique)
SWITCHES = {
    Technique.ADAPTIVE: (
        "Adaptive pipelining",
        "Micro-batches of a dead worker run on living peers of its stage. B, the backward, stays whole.",
    ),
    Technique.DECOUPLED: (
        "Decoupled backward",
        "B is split into I (gradient of the input, which the stage before waits for) and W (gradient of the "
        "weights, which nobody waits for). Includes adaptive pipelining.",
    ),
    Technique.STAGGERED: (
        "Staggered optimizer",
        "Each stage steps on its own, so the next iteration's warm-up fills bubbles of this one. "
        "Includes both of the above.",
    ),
}
MEMORIES = {
    "1f1b": "as 1F1B holds",
    "uniform": "uniform",
    "none": "no limit",
    "number": "a number",
    "bytes": "bytes of the profile",
}
MEMORY_HELP = (
    "Activations that a worker may hold at once. As 1F1B holds: stages − s on stage s. Uniform: as many as there "
    "are stages. Bytes: as many as fit beside weights and optimizer state, by the profile."
)
TAKE = "planner-take"


def sources(console: ConsoleService) -> None:
    """Draws questions to begin with: the paper's example, a job's, a saved plan's."""
    jobs = {f"job {job_id}": words for job_id, words in components.job_names(components.jobs_to_pick(console)).items()}
    saved = {f"saved {row['fingerprint']}": f"Saved: {row['name']}" for row in console.plans.library.saved()}
    names = {**jobs, **saved}
    with st.container(horizontal=True, vertical_alignment="bottom", width="content", key="planner-sources"):
        st.button(
            "Worked example of the paper",
            key="planner-example",
            on_click=example,
            args=(console,),
            help="3 × 4 workers, 6 micro-batches each, W1_2 dead: what each technique makes of it.",
        )
        st.button("Start over", key="planner-reset", on_click=change, args=(WhatIf(),), help="The usual question.")
        if names:
            st.selectbox(
                "Take over",
                list(names),
                index=None,
                format_func=names.__getitem__,
                placeholder="A job's grid and failures, or a saved plan",
                key=TAKE,
                on_change=_take,
                args=(console,),
                width=330,
            )


def example(console: ConsoleService) -> None:
    change(STEPS[-1].question, example=True)
    for step in STEPS:
        with told(partial(say, PAGE)), acting(console, "plan"):
            console.plans.solves.start(step.question.asked())


def _take(console: ConsoleService) -> None:
    kind, _, name = (st.session_state[TAKE] or "").partition(" ")
    st.session_state[TAKE] = None
    if not kind:
        return
    with told(partial(say, PAGE)):
        if kind == "saved":
            plan = console.plans.library.saved_plan(name)
            change(WhatIf.of_plan(plan), saved=name)
        else:
            live = console.jobs.find(name)
            failed = live.state.current.failed if live.state.current else ()
            change(WhatIf.of(live.plans.job, failed, Technique(live.spec.technique), live.spec.memory))


# -- the grid -----------------------------------------------------------------------------------


def sizes(question: WhatIf, found: Checked) -> None:
    fields = (
        ("pipelines", "Pipelines", "Data-parallel replicas: the rows of the grid."),
        ("stages", "Stages", "Of each pipeline: the columns of the grid."),
        ("micro_batches", "Micro-batches", "Per pipeline and iteration."),
    )
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-sizes"):
        for name, label, note in fields:
            draw = partial(st.number_input, label, 1, MAX_SIDE, step=1, help=note, width=120)
            control(draw, f"planner-{name}", getattr(question, name), partial(_resize, name))
    wrong(found, GRID)


def _resize(name: str, value: int) -> None:
    grid = {each: getattr(now(), each) for each in ("pipelines", "stages", "micro_batches")}
    with told(partial(say, GRID)):
        change(now().with_grid(**grid | {name: value}))


# -- what may be used ---------------------------------------------------------------------------


def techniques(question: WhatIf, found: Checked) -> None:
    """Draws three switches. Each includes those above it, so that turning one off also turns off those below."""
    level = TECHNIQUES.index(question.technique)
    with st.container(gap="xsmall", key="planner-techniques"):
        for technique, (label, note) in SWITCHES.items():
            on, draw = level >= TECHNIQUES.index(technique), partial(st.toggle, label, help=note)
            control(draw, f"planner-use-{technique.value}", on, partial(_use, technique))
    if question.technique is Technique.FAULT_FREE:
        st.caption("All off: plain 1F1B, which can't run with a failed worker.")
    wrong(found, TECHNIQUE)


def _use(technique: Technique, on: bool) -> None:
    change(replace(now(), technique=technique if on else TECHNIQUES[TECHNIQUES.index(technique) - 1]))


def limits(question: WhatIf, found: Checked) -> None:
    """Draws the memory limit, the partition of the layers, the solver and its time."""
    named = question.memory if question.memory in MEMORIES else "number"
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-limits"):
        choice("Memory limit", MEMORIES, "planner-memory", named, _limit, help=MEMORY_HELP, width=170)
        if named == "number":
            count = int(question.memory) if question.memory.isdigit() else question.stages
            draw = partial(st.number_input, "Activations", 1, MOST_ACTIVATIONS, step=1, width=110)
            control(draw, "planner-memory-count", count, lambda most: _limit(str(most)))
    wrong(found, MEMORY)
    if found.job is not None and found.job.layers:
        _layers(question, found.job)
    wrong(found, PARTITION)
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-effort"):
        solvers = {name: SOLVER_WORDS.get(name, name) for name in SOLVERS}
        choice("Solver", solvers, "planner-solver", question.solver, partial(_set, "solver"), width=230)
        if question.solver != "list":
            note = "A search that proves its plan optimal ends sooner."
            draw = partial(
                st.number_input, "Seconds at most", 0.1, MAX_SECONDS, step=10.0, format="%g", help=note, width=130
            )
            control(draw, "planner-seconds", float(question.seconds), partial(_set, "seconds"))
    wrong(found, SOLVER)


def _layers(question: WhatIf, job: Job) -> None:
    """Draws the choice how layers are cut into stages."""
    words = {AUTO: "Best partition", "": f"As evenly as they go: {text.counts(job.home)}"}
    words.setdefault(question.partition, question.partition.replace(",", ", "))
    choice(
        "Layers per stage",
        words,
        "planner-partition",
        question.partition,
        partial(_set, "partition"),
        help="The best partition for the workers that live: the bound is then over every partition, so the gap says "
        "how far the plan may be from the best of all layouts.",
        width=300,
    )


def _limit(named: str) -> None:
    change(replace(now(), memory=MemoryLimit.parse(str(now().stages) if named == "number" else named).text))


def _set(name: str, value: Any) -> None:
    changes: dict[str, Any] = {name: value}
    change(replace(now(), **changes))


def wrong(found: Checked, name: str) -> None:
    """Draws the field's error, right below it."""
    for words in (found.errors.get(name), said(name)):
        if words:
            field_error(words, "stretch")


def question_words(question: WhatIf) -> str:
    """Returns a question in words: `3 × 4 × 6, without W1_2, staggered, memory none`."""
    grid = text.grid(question)
    return f"{grid}, {without(question.failed)}, {question.technique.value}, memory {question.memory}"


# -- the grid of workers ------------------------------------------------------------------------

# Larger grids are not drawn at all.
MAX_CELLS = 4_096
SEEN = "planner-seen-clicks"


def grid(question: WhatIf, found: Checked, plan: Plan | None, colours: Palette) -> None:
    """Draws the grid of workers. plan: the one that answers the question, if any; it says which workers take re-routed
    work."""
    cells = question.pipelines * question.stages
    components.heading("Workers", "select one to mark it dead, or alive again")
    takes = plan.rerouted() if plan is not None else {}
    _legend(question, takes)
    if cells <= components.MAX_TILES:
        rows = [
            [_tile(f"W{pipeline}_{stage}", question, takes) for stage in range(question.stages)]
            for pipeline in range(question.pipelines)
        ]
        components.tiles(rows, "worker-grid-planner", _toggle)
    elif cells <= MAX_CELLS:
        _heat_map(question, takes, colours)
    else:
        components.quiet(f"{cells:,} workers are too many to draw; name the dead ones below.")
    _by_hand(question, buttons=cells <= components.MAX_TILES)
    if found.infeasible:
        field_error(text.whole_sentence(found.infeasible), "stretch")


def _legend(question: WhatIf, takes: Mapping[str, int]) -> None:
    dead = len(question.failed)
    busy = sum(n > 0 for n in takes.values())
    cells = question.pipelines * question.stages
    entries = [("running", "Alive", cells - dead - busy)]
    if busy:
        entries.append(("re-routed", "Takes re-routed work", busy))
    if dead:
        entries.append(("failed", "Dead", dead))
    keys = "".join(
        f'<span class="or-key"><i class="or-shape or-look-{look}"></i>{words} <b>{count:,}</b></span>'
        for look, words, count in entries
    )
    counts = Counter(Worker.parse(name).stage for name in question.failed)
    worst = "".join(
        f'<span class="or-key">stage {stage}: <b>{question.pipelines - count:,} of {question.pipelines:,}</b> live'
        "</span>"
        for stage, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:4]
    )
    st.html(f'<div class="or-legend">{keys}{worst}</div>')


def _tile(name: str, question: WhatIf, takes: Mapping[str, int]) -> components.Tile:
    moved = takes.get(name, 0)
    if name in question.failed:
        return components.Tile(name, "failed", "dead", "Bring it back to life")
    look, words = ("re-routed", f"+{moved} re-routed") if moved else ("running", "alive")
    return components.Tile(name, look, words, "Mark it dead")


def _toggle(name: str) -> None:
    change(now().toggled(name))


def _heat_map(question: WhatIf, takes: Mapping[str, int], colours: Palette) -> None:
    # A new theme draws the chart anew, without the clicks of the old one.
    key = f"planner-map-{colours.name}-{question.pipelines}x{question.stages}"
    if key not in st.session_state:  # newly drawn, also after a visit to another page: nothing is selected
        st.session_state[SEEN] = {}
    components.live_chart(
        dead_grid(question, takes, colours),
        key,
        "Worker grid: pipelines across, stages down. The list below names the dead ones.",
        on_select=partial(_mapped, key),
        selection_mode=PICKED,
    )


def _mapped(key: str) -> None:
    clicked = _clicked(key, st.session_state[key])
    if clicked:
        change(now().with_failed(set(now().failed) ^ clicked))


def _clicked(key: str, state: Mapping[str, Any]) -> set[str]:
    """Returns the workers that were clicked since the last call. The chart keeps a set, and each click adds or removes
    a worker. A chart that was drawn anew has an empty set, which counts as no click."""
    picked = {str(point["worker"]) for point in state["selection"].get(PICKED) or []}
    seen: set[str] = st.session_state.get(SEEN, {}).get(key, set())
    st.session_state[SEEN] = {key: picked}
    return set() if not picked and len(seen) > 1 else picked ^ seen


def _by_hand(question: WhatIf, *, buttons: bool) -> None:
    """Draws a field for dead workers by name, for large grids and for keyboards, and a choice of some at random."""
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-dead"):
        if not buttons:
            draw = partial(st.text_input, "Dead workers", placeholder="W3_5, W20_9", width=330, max_chars=200_000)
            control(draw, "planner-dead-names", ", ".join(question.failed), _named)
        with st.popover("At random", key="planner-random"):
            most = question.stages * (question.pipelines - 1)
            st.number_input("How many", 0, max(most, 0), min(1, most), key="planner-random-count")
            st.number_input("Seed", 0, 2**31, 0, key="planner-random-seed", help="The same seed, the same workers.")
            st.button("Mark them dead", key="planner-random-go", on_click=_random, disabled=most < 1)
        st.button(
            "All alive",
            key="planner-revive",
            on_click=lambda: change(now().with_failed(set())),
            disabled=not question.failed,
            help=f"Brings back {text.count(len(question.failed), 'worker')}." if question.failed else None,
        )


def _named(words: str) -> None:
    question = now()
    with told(partial(say, GRID)):
        names = {str(Worker.parse(part, field="dead workers")) for part in words.replace(",", " ").split()}
        made = question.with_failed(names)
        if left_out := sorted(names - set(made.failed)):
            last = Worker(question.pipelines - 1, question.stages - 1)
            raise InputError("dead workers", left_out[0], f"workers of the grid, W0_0 to {last}")
        change(made)


def _random() -> None:
    noise = random.Random(int(st.session_state["planner-random-seed"]))
    change(at_random(now(), int(st.session_state["planner-random-count"]), noise))


# -- the profile of the question ----------------------------------------------------------------

NAME = "planner-profile-name"
ASKED = "planner-profile-delete-asked"
# Places of messages: beside the field, and the page's line for what has been done.
FIELD, KEPT = "profile-name", "profile-kept"
# Names in the session of where the user's own profile comes from.
_NAMED, _MEASURED = "planner-profile-named", "planner-profile-measured"


def remember_name(question: WhatIf) -> None:
    """Notes the profile's name, since an edited profile is mostly saved under the same name."""
    if question.named is not None:
        st.session_state[_NAMED] = question.named.name


def keep(console: ConsoleService, question: WhatIf, known: Sequence[ProfileInfo]) -> None:
    """Draws the menu that saves and deletes profiles. known: the profiles that have names."""
    lines = {line.name: line for line in known}
    named = question.named
    refused = why_not(console)
    with st.popover(
        "Saved profile" if named else "Save profile", icon=":material/bookmark:", key="planner-profile-keep"
    ):
        if named is not None and named.name in lines:
            st.markdown(f"Saved as **{text.plain_markdown(named.name)}**: {_about(lines[named.name])}")
            st.caption("Jobs, plans and catalogs take it by this name: `profile_name` in the API.")
            _delete_button(console, named.name, refused)
            st.divider()
        begin = named.name if named else st.session_state.get(_NAMED, "")
        # The field is made anew for each profile, so that it shows that profile's name.
        key = f"{NAME}-{abs(hash((question.profile, begin)))}"
        name = st.text_input(
            "Save it under another name" if named else "Name of the profile",
            "" if named else begin,
            key=key,
            max_chars=80,
            placeholder="my-model",
            disabled=bool(refused),
            help="Letters, digits, _ . + and -; a letter or digit first.",
        ).strip()
        seen = lines.get(name)
        replaced = seen if seen is not None and seen.source == "saved" else None
        if words := said(FIELD) or (refused and text.whole_sentence(refused)):
            field_error(words, "stretch")
        if replaced is not None:
            st.warning(f"**{text.plain_markdown(name)}** is there already: {_about(replaced)} Replace it?")
        st.button(
            "Replace it" if replaced else "Save",
            type="primary",
            key="planner-profile-save",
            disabled=bool(refused),
            on_click=_save,
            args=(console, key, replaced),
        )


def _about(line: ProfileInfo) -> str:
    at = text.moment(line.updated_at or 0, st.context.timezone, time.time())
    what = text.plain_markdown(line.about)
    if line.kind == "job":
        what = f"{text.count(line.stages or 0, 'stage')}, times in {text.plural(line.time_unit)}"
    return f"{what}; saved by {text.plain_markdown(line.saved_by)}, {at}."


def _save(console: ConsoleService, key: str, replaced: ProfileInfo | None) -> None:
    """Saves the profile. replaced: the profile that the user has seen under that name, and wants to replace."""
    name, question = st.session_state[key].strip(), now()
    seen = replaced.updated_at if replaced is not None and replaced.name == name else None
    word, measured = st.session_state.get(_MEASURED, ("", None))
    with told(partial(say, FIELD)):
        by = actor(console)
        document = to_keep(question, measured if word == question.profile else None)
        console.plans.profiles.put_over(name, document, by, updated_at=seen)
        console.security.audit.record(by, "save profile", name, detail="replaced" if seen else "")
        change(question.with_kept(console.plans.profiles.kept(name)))
        say(KEPT, f"Saved as **{text.plain_markdown(name)}**. The link to this page names it.")


def _delete_button(console: ConsoleService, name: str, refused: str) -> None:
    if st.session_state.get(ASKED) != name:
        st.button(
            "Delete it …",
            key="planner-profile-delete",
            disabled=bool(refused),
            help=refused or None,
            on_click=_ask,
            args=(name,),
        )
        return
    st.warning("Gone for all who use this console. Jobs and plans that were made with it keep what they have of it.")
    with st.container(horizontal=True):
        st.button("Delete it for good", type="primary", key="act-kill-profile", on_click=_delete, args=(console, name))
        st.button("Keep it", key="planner-profile-stay", on_click=_ask, args=("",))


def _ask(name: str) -> None:
    st.session_state[ASKED] = name


def _delete(console: ConsoleService, name: str) -> None:
    """Deletes a profile. The page keeps its values, as the user's own profile."""
    question = now()
    _ask("")
    with told(partial(say, FIELD)), acting(console, "delete profile", name):
        console.plans.profiles.delete(name)
        remember_name(question)
        change(question.with_own())
        say(KEPT, f"**{text.plain_markdown(name)}** is deleted. What is shown here can be saved again.")


NAMES = {
    EVEN: "Even: every op one slot",
    UNEVEN: "Uneven: 0.9 to 1.2 slots by stage",
    ENDS: "Embedding first, longer head last",
    OWN: "Your own",
}
# Bytes. Larger files are read in a child process if they have plans; no profile or job is larger than MOST_PROFILE.
LARGE_FILE, MOST_PROFILE = 1 << 20, 8 << 20
MEASURED = "measured"
# Rows that the table shows without scrolling.
ROWS = 12


def profile(console: ConsoleService, question: WhatIf, found: Checked) -> None:
    known = console.plans.profiles.list()
    options = _options(console, known)
    named = question.profile if question.profile in options else OWN
    if question.named is not None:
        named = f"{SAVED}:{question.named.name}"
    options.setdefault(named, NAMES.get(named, named))
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-profile-row"):
        choice(
            "Profile",
            options,
            "planner-profile",
            named,
            partial(_choose, console),
            help="Op times and bytes of each stage: presets; profiles of GPT-3 layers that come with the planner, "
            "measured on one processor core; those that are saved here under a name; and the op times that the "
            "workers of a job report.",
            width=260,
        )
        with st.popover("File", icon=":material/upload_file:", key="planner-upload-box"):
            file_uploader(
                "A profile, a job document or a plan (JSON)",
                key="planner-upload",
                take=partial(_upload, console),
                help="`openrecycle profile --out FILE.json` writes profiles.",
            )
            if found.job is not None:
                document = job_doc(found.job).model_dump_json(indent=2)
                st.download_button(
                    "Download this profile",
                    document,
                    file_name=f"profile-{hashlib.sha256(document.encode()).hexdigest()[:8]}.json",
                    mime="application/json",
                    on_click="ignore",
                    icon=":material/download:",
                    key="planner-download",
                    help="For `openrecycle plan --profile profile.json`.",
                )
        if found.job is not None:
            keep(console, question, known)
    show_reading(partial(_show_plan, console))
    wrong(found, PROFILE)
    if words := said(KEPT):
        st.success(words)
    if words := said(PROFILE_NOTE):
        st.warning(text.plain_markdown(words))
    if found.job is not None:
        what = "Layers" if found.job.layers else "Stages"
        with address.expander(f"{what}: {_sum_up(found.job)}", key="planner-stage-times"):
            _editor(question, found.job)


def _options(console: ConsoleService, known: Sequence[ProfileInfo]) -> dict[str, str]:
    """Returns the profiles that may be chosen, with their names for people."""
    options = {name: NAMES[name] for name in PRESETS}
    options |= {f"{SAVED}:{line.name}": f"Saved: {line.name}" for line in known if line.source == "saved"}
    options |= {
        f"{MEASURED}:{live.job_id}": f"Measured by job {live.spec.name} · {live.job_id}"
        for live in console.jobs.live()
        if measured_profile(live.plans.nominal, live.measurements.op_times.smoothed) is not None
    }
    return options | {name: f"Shipped: {name}" for name in shipped()}


def _sum_up(job: Job) -> str:
    """Returns the op times in words: `F 1, I 1, W 1 slots`, with the smallest and the largest if they differ."""

    def span(values: list[float]) -> str:
        low, high = min(values), max(values)
        return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"

    rows: Sequence[StageProfile] = job.layers or job.profiles
    parts = [
        f"F {span([p.forward for p in rows])}",
        f"I {span([p.input_backward for p in rows])}",
        f"W {span([p.weight_backward for p in rows])}",
    ]
    if any(p.optimizer for p in rows):
        parts.append(f"O {span([p.optimizer for p in rows])}")
    if any(job.transfers):
        parts.append(f"transfers {span(list(job.transfers))}")
    return ", ".join(parts) + f" {text.plural(job.time_unit)}"


def _editor(question: WhatIf, job: Job) -> None:
    memory = address.toggle("Memory too", key="planner-bytes", help="Bytes of activations, weights and workers, in MB.")
    document = job_doc(job)
    # After each edit the table is made anew from the edited profile.
    key = f"planner-table-{abs(hash((question.profile, question.stages, memory)))}"
    rows = table(document, memory=memory)
    st.data_editor(
        rows,
        key=key,
        hide_index=True,
        disabled=[row_name(document)],
        height=min(len(rows[row_name(document)]), ROWS) * 35 + 40,
        column_config={
            name: st.column_config.NumberColumn(name, help=HELP.get(name), min_value=0.0 if name in HELP else None)
            for name in rows
        },
        on_change=_edit,
        args=(key, document),
    )
    if words := said("table"):
        field_error(words, "stretch")
    fixed = sum(p.weight_bytes + p.optimizer_bytes for p in job.profiles)
    if fixed:
        st.caption(f"Weights and optimizer state of all stages: {text.size(fixed)}.")


def _choose(console: ConsoleService, name: str) -> None:
    kind, _, of = name.partition(":")
    with told(partial(say, PROFILE)):
        if kind == SAVED:
            change(now().with_kept(console.plans.profiles.kept(of)))
        elif kind == MEASURED:
            _take_measured(console, of)
        elif name != OWN:
            change(replace(now(), profile=name))


def _take_measured(console: ConsoleService, job_id: str) -> None:
    """Takes the profile that a job has measured so far. The question keeps it, even if the job's op times change
    later."""
    live = console.jobs.find(job_id)
    document = measured_profile(live.plans.nominal, live.measurements.op_times.smoothed)
    if document is None:
        say(PROFILE, f"profile: job {live.spec.name} has not reported the op times of every stage yet")
        return
    changed = replace(now(), stages=document.stages, profile=own_profile(document))
    change(changed.with_failed(set(changed.failed)))
    say(
        PROFILE_NOTE,
        f"What the workers of {live.spec.name} reported until now: medians of a stage's peers. "
        "Optimizer steps, transfers and bytes are those of the job's own profile.",
    )


def _edit(key: str, document: JobDoc) -> None:
    edits: dict[int, dict[str, Any]] = st.session_state[key]["edited_rows"]
    with told(partial(say, "table")):
        made = edited(document, edits)
        made.job()
        remember_name(now())
        change(replace(now(), profile=own_profile(made)))


def _show_plan(console: ConsoleService, reference: str) -> None:
    """Asks the question of a saved plan, and shows the plan as the answer."""
    fingerprint = reference.partition(":")[2]
    change(WhatIf.of_plan(console.plans.library.saved_plan(fingerprint)), saved=fingerprint)


def _upload(console: ConsoleService, file: UploadedFile) -> None:
    document = file.getvalue()
    with told(lambda why: say(PROFILE, f"{file.name}: {why}")):
        if len(document) > LARGE_FILE and b'"workers"' in document:
            read_file(console, file.name, document)
            return
        if len(document) > MOST_PROFILE:
            raise InputError("the file", f"{len(document):,} bytes", f"a plan, or at most {MOST_PROFILE:,} bytes")
        read = read_upload(document)
        change(uploaded(read, now()))
        if isinstance(read, Profile):
            # A measured profile is good for more grids than the question's.
            st.session_state[_MEASURED] = (now().profile, read)
