"""The question's controls: grid, technique, memory, solver, and where a question may be taken from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st

from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.introduction import STEPS
from openrecycle.app.plans.solving import MAX_SECONDS
from openrecycle.app.plans.sources import without
from openrecycle.app.plans.whatif import GRID, MEMORY, PARTITION, SOLVER, TECHNIQUE, Checked, WhatIf
from openrecycle.app.ui import text
from openrecycle.app.ui.access import acting, told
from openrecycle.app.ui.address import control, field_error
from openrecycle.app.ui.facts import SOLVER_WORDS
from openrecycle.app.ui.planning.state import PAGE, change, choice, now, said, say
from openrecycle.planner.jobs.job import AUTO, Job, MemoryLimit, Technique
from openrecycle.planner.solvers.portfolio import SOLVERS

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
    """Questions to begin with: the paper's example, a job's, a saved plan's."""
    jobs = {f"job {job.job_id}": f"{job.name} · {job.job_id}" for job in console.queries.list_jobs()}
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
    """Three switches; each includes the ones above it, so that turning one off turns those below off."""
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
    """Memory limit, solver and its time."""
    named = question.memory if question.memory in MEMORIES else "number"
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-limits"):
        choice("Memory limit", MEMORIES, "planner-memory", named, _limit, help=MEMORY_HELP, width=170)
        if named == "number":
            count = int(question.memory) if question.memory.isdigit() else question.stages
            draw = partial(st.number_input, "Activations", 1, 10**9, step=1, width=110)
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
    """How they are cut into stages."""
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
    """The field's error, right below it."""
    for words in (found.errors.get(name), said(name)):
        if words:
            field_error(words, "stretch")


def question_words(question: WhatIf) -> str:
    """`3 × 4 × 6, without W1_2, staggered, memory none`."""
    grid = text.grid(question)
    return f"{grid}, {without(question.failed)}, {question.technique.value}, memory {question.memory}"
