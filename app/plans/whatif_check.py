"""What is wrong with a Planner question, by the field that it belongs beside."""

from __future__ import annotations

from dataclasses import dataclass, field

from openrecycle.app.plans.solving_child import PlanAsked
from openrecycle.app.plans.whatif import WhatIf
from openrecycle.planner.bounds import Bound, best_bound
from openrecycle.planner.errors import InfeasibleError, InputError, PlannerError
from openrecycle.planner.job import Job

GRID, PROFILE, TECHNIQUE, MEMORY, SOLVER, PARTITION = "grid", "profile", "technique", "memory", "solver", "partition"
# Up to so many ops the bound is worked out while somebody clicks; it takes milliseconds.
BOUNDED_OPS = 20_000


@dataclass(frozen=True)
class Checked:
    """errors: sentences by field. infeasible: well asked, and no schedule exists. bound: of the period, before
    anything is planned; None where it takes too long to work out, or there is none."""

    job: Job | None = None
    asked: PlanAsked | None = None
    errors: dict[str, str] = field(default_factory=dict)
    infeasible: str = ""
    bound: Bound | None = None

    @property
    def plannable(self) -> bool:
        return self.asked is not None and not self.errors and not self.infeasible


def checked(question: WhatIf) -> Checked:
    """Nothing is solved, and absurd sizes are refused before memory is taken."""
    try:
        job = question.job()
        asked = question.asked()
    except InputError as error:
        where = GRID if error.field in ("grid", "pipelines", "stages", "micro_batches", "--stages") else PROFILE
        return Checked(errors={where: _words(error, error.field)})
    except PlannerError as error:
        return Checked(errors={PROFILE: str(error)})
    try:
        problem = asked.problem()
        # Over all partitions it is another one, which whoever looks for the best of them works out.
        bound = best_bound(problem) if asked.ops <= BOUNDED_OPS and asked.over == "schedules" else None
    except InfeasibleError as error:
        return Checked(job, asked, infeasible=f"{error.constraint}; {error.remedy}")
    except InputError as error:
        fields = {"--technique": TECHNIQUE, "solver": SOLVER, "failed": GRID, "partition": PARTITION}
        where = fields.get(error.field, MEMORY)
        return Checked(job, asked, {where: _words(error, where)})
    return Checked(job, asked, bound=bound)


def _words(error: InputError, field: str) -> str:
    """The sentence with the page's name of the field instead of the command line's."""
    return f"{field.removeprefix('--')}: got {error.value!r}, expected {error.expected}"
