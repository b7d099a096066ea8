"""The idea in five pictures: the paper's worked example, planned here when it is first asked for.

3 pipelines x 4 stages x 6 micro-batches, one slot for each of F, I and W, no transfers, no step. The
list scheduler solves each of them in milliseconds, and proves them to be optimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from openrecycle.app.plans.whatif import WhatIf
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.jobs.words import percent
from openrecycle.planner.layers.migration import best_migrations
from openrecycle.planner.plans import drawing as model
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan

JOB = Job.uniform(3, 4, 6)
FAILED = frozenset({Worker(1, 2)})
TWO = frozenset({Worker(0, 2), Worker(1, 2)})


@dataclass(frozen=True)
class IntroductionPicture:
    """title and text: for people; `text` may speak of what came before. moved: who took whose place."""

    title: str
    text: str
    plan: Plan
    moved: tuple[tuple[Worker, Worker], ...] = ()

    @cached_property
    def drawing(self) -> model.Drawing:
        """Whoever is out in these pictures has failed, or has taken another one's place."""
        why = dict.fromkeys(self.plan.failed, model.FAILED)
        return model.Drawing.of(
            self.plan.schedule(), out=why | {str(who): f"moved to {place}" for who, place in self.moved}
        )

    @property
    def words(self) -> str:
        """The picture for those who can't see it."""
        schedule = self.drawing.schedule
        failed = ", ".join(map(str, sorted(schedule.problem.failed))) or "none"
        return (
            f"Schedule of {len(schedule.ops)} living workers over {schedule.period} slots. Failed: {failed}. "
            f"Micro-batches on other workers than their own: {sum(schedule.rerouted_forwards.values())}. "
            f"Idle: {percent(schedule.bubble_fraction, 0)} of the slots."
        )


@lru_cache(maxsize=1)
def pictures() -> tuple[IntroductionPicture, ...]:
    """Fault-free, then one technique after another; last a migration. Some 50 ms the first time."""
    whole = _plan(frozenset(), Technique.FAULT_FREE, "1f1b")
    adaptive = _plan(FAILED, Technique.ADAPTIVE, "1f1b")
    decoupled = _plan(FAILED, Technique.DECOUPLED, "none")
    staggered = _plan(FAILED, Technique.STAGGERED, "none")
    bounded = _plan(FAILED, Technique.STAGGERED, "uniform")
    crowded = _plan(TWO, Technique.STAGGERED, "uniform")
    moved = best_migrations(JOB, TWO)
    spread = _plan(moved.failed, Technique.STAGGERED, "uniform")
    migrations = "; ".join(map(str, moved.migrations))
    return (
        IntroductionPicture(
            f"Healthy: {_slots(whole)}",
            "Each row is a worker, each number a micro-batch. 1F1B runs one forward (F), one backward (B), and so on. "
            "At both ends workers wait for each other: these idle slots are bubbles, and they are what a failure will "
            "be paid with.",
            whole,
        ),
        IntroductionPicture(
            f"Adaptive pipelining: {_slots(adaptive)}",
            "W1_2 has died. The other two workers of stage 2 hold the same weights, so they take its micro-batches "
            "(hatched). Nobody restarts, and the same micro-batches enter every update. But a whole backward waits "
            f"for room in the middle of the pipeline: {_more(adaptive, whole)}.",
            adaptive,
        ),
        IntroductionPicture(
            f"Decoupled backward: {_slots(decoupled)}",
            "The backward is split. I, the gradient of the input, is what the stage before waits for; W, the gradient "
            "of the weights, is needed by nobody before the step. So W's are put off into bubbles: "
            f"{_more(decoupled, whole)}.",
            decoupled,
        ),
        IntroductionPicture(
            f"Staggered optimizer: {_slots(staggered)}",
            "Each stage steps as soon as its own gradients are there, and begins the next iteration (faint) at once, "
            "in the bubbles of its warm-up. What needs all stages (clipping, NaN) is checked afterwards and rolled "
            f"back if need be. An iteration now takes {_more(staggered, whole)}. That costs memory for what is put "
            f"off: at the {JOB.stages} activations that the fullest healthy worker holds, it is {_slots(bounded)}.",
            staggered,
        ),
        IntroductionPicture(
            f"A migration: {_slots(spread)} instead of {_slots(crowded)}",
            "Two workers of one stage are dead, and the one left there would run all of its micro-batches. Only how "
            f"many fail on each stage counts, so a living worker of a fuller stage changes places: {migrations}.",
            spread,
            tuple((migration.worker, migration.takes) for migration in moved.migrations),
        ),
    )


def _plan(failed: frozenset[Worker], technique: Technique, memory: str) -> Plan:
    return make_plan(Problem(JOB, failed, technique, MemoryLimit(memory)), solver="list")


def _slots(plan: Plan) -> str:
    return f"{plan.metrics.period:g} slots"


def _more(plan: Plan, whole: Plan) -> str:
    more = plan.metrics.period / whole.metrics.period - 1
    if abs(more) < 0.0005:
        return f"{_slots(plan)}, as many as without the failure"
    return f"{_slots(plan)}, +{percent(more)}"


@dataclass(frozen=True)
class ExampleStep:
    """name, about: for people. question: what the planner is asked."""

    name: str
    about: str
    question: WhatIf


_DEAD = ("W1_2",)
STEPS = (
    ExampleStep(
        "Fault-free 1F1B",
        "Nobody has failed.",
        WhatIf(technique=Technique.FAULT_FREE, memory="1f1b"),
    ),
    ExampleStep(
        "Adaptive pipelining",
        "W1_2's micro-batches run on W0_2 and W2_2, which hold no more than 1F1B does.",
        WhatIf(failed=_DEAD, technique=Technique.ADAPTIVE, memory="1f1b"),
    ),
    ExampleStep(
        "+ decoupled backward",
        "The gradients of the weights move into bubbles.",
        WhatIf(failed=_DEAD, technique=Technique.DECOUPLED, memory="none"),
    ),
    ExampleStep(
        "+ staggered optimizer",
        "The next iteration begins on one stage before this one has ended on another.",
        WhatIf(failed=_DEAD, technique=Technique.STAGGERED, memory="none"),
    ),
)


def step_of(question: WhatIf) -> ExampleStep | None:
    """The step that asks this, whatever the solver."""
    return next((s for s in STEPS if s.question == question), None)
