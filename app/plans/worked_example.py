"""The paper's worked example: one dead worker of 3 x 4, and what each technique makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from openrecycle.app.plans.whatif import WhatIf
from openrecycle.planner.job import Technique


@dataclass(frozen=True)
class Step:
    """name, about: for people. question: what the planner is asked."""

    name: str
    about: str
    question: WhatIf


_DEAD = ("W1_2",)
STEPS = (
    Step(
        "Fault-free 1F1B",
        "Nobody has failed.",
        WhatIf(technique=Technique.FAULT_FREE, memory="1f1b"),
    ),
    Step(
        "Adaptive pipelining",
        "W1_2's micro-batches run on W0_2 and W2_2, which hold no more than 1F1B does.",
        WhatIf(failed=_DEAD, technique=Technique.ADAPTIVE, memory="1f1b"),
    ),
    Step(
        "+ decoupled backward",
        "The gradients of the weights move into bubbles.",
        WhatIf(failed=_DEAD, technique=Technique.DECOUPLED, memory="none"),
    ),
    Step(
        "+ staggered optimizer",
        "The next iteration begins on one stage before this one has ended on another.",
        WhatIf(failed=_DEAD, technique=Technique.STAGGERED, memory="none"),
    ),
)


def step_of(question: WhatIf) -> Step | None:
    """The step that asks this, whatever the solver."""
    return next((s for s in STEPS if s.question == question), None)
