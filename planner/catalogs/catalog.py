"""Plans made ahead: one per failure pattern, so that recovery is a look-up.

Pipelines are interchangeable, so a plan for a pattern serves every failure set that differs from
it only in which pipeline is called which: `find` renames the pipelines of the stored plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Literal

from pydantic import ValidationError

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.failures import canonical_pattern, inverse, parse_workers, patterns
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.jobs.words import percent
from openrecycle.planner.plans.packed import RequestedPlan, merit
from openrecycle.planner.plans.plan import INTEGER, Plan, PlanError, first_problem, job_doc, read_model
from openrecycle.planner.solvers.portfolio import make_plan

# More patterns than this per failure count are not planned ahead; the list scheduler takes over.
MAX_PATTERNS = 10_000
_NO_PLANS = '"plans":[]'


class CatalogDoc(RequestedPlan):
    """The catalog as JSON, for a file or another process."""

    schema_version: Annotated[Literal[1], INTEGER] = 1
    plans: tuple[Plan, ...]


class Catalog:
    """Plans of one job, technique and memory limit, by failure pattern."""

    def __init__(self, job: Job, technique: Technique, memory: MemoryLimit) -> None:
        self.job = job
        self.technique = technique
        self.memory = memory
        # As they came, with the place that each of their pipelines has in the pattern: renaming a plan of
        # 2,048 workers takes seconds, and most are found for the very failures they were made for.
        self._plans: dict[frozenset[Worker], tuple[Plan, tuple[int, ...]]] = {}
        self._renamed: tuple[Plan, frozenset[Worker], Plan] | None = None  # what was found last, and for whom
        self._elsewhere: dict[tuple[int, ...], Catalog] = {job.partition: self}

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The stored plans, each for its pattern, in the order in which their patterns were first added."""
        held = list(self._plans.values())  # at once: plans come in from other threads
        return tuple(plan.renamed(places) for plan, places in held)

    def patterns(self, tolerance: int) -> list[list[frozenset[Worker]]]:
        """For each failure count 0..tolerance the canonical failure sets that leave every stage a
        living peer, at most MAX_PATTERNS per count. Raises InputError for a negative tolerance.
        """
        if tolerance < 0:
            raise InputError("tolerance", tolerance, "a number of failures of at least 0")
        if not self.technique.reroutes:
            tolerance = 0
        return [list(islice(patterns(self.job, count), MAX_PATTERNS)) for count in range(tolerance + 1)]

    def problem(self, failed: Iterable[Worker]) -> Problem:
        """Raises InputError or InfeasibleError when `failed` can't be planned for."""
        return Problem(self.job, frozenset(failed), self.technique, self.memory)

    def add(self, plan: Plan) -> None:
        """Keeps `plan` for its pattern, unless one as short and with as high a bound is kept already. One with the
        layers cut otherwise is kept with those of its partition (`at`).

        Raises InputError for a plan of another job, technique or memory limit.
        """
        for field, value, expected in (
            ("plan.job", plan.job, job_doc(self.job)),
            ("plan.technique", plan.technique, self.technique),
            ("plan.memory", plan.memory, self.memory.text),
        ):
            if value != expected:
                raise InputError(field, str(value), f"that of the catalog, {expected}")
        if plan.partition and plan.partition != self.job.partition:
            self.at(plan.partition).add(plan)
            return
        pattern, places = canonical_pattern(parse_workers(plan.failed), self.job)
        kept = self._plans.get(pattern)
        if kept is None or merit(plan.metrics) > merit(kept[0].metrics):
            self._plans[pattern] = plan, tuple(places)

    def find(self, failed: Iterable[Worker]) -> Plan | None:
        """The stored plan with its pipelines renamed to fit exactly `failed`; None: none stored."""
        failed = frozenset(failed)
        pattern, wanted = canonical_pattern(failed, self.job)
        found = self._plans.get(pattern)
        if found is None:
            return None
        plan, places = found
        last = self._renamed
        if last is not None and last[0] is plan and last[1] == failed:
            return last[2]
        names = inverse(wanted)
        renamed = plan.renamed([names[place] for place in places])
        if renamed is not plan:
            self._renamed = plan, failed, renamed
        return renamed

    def at(self, partition: tuple[int, ...]) -> Catalog:
        """That of the same job with its layers cut so; (): this one. Raises InputError."""
        if not partition or not self.job.layers:
            return self
        if partition not in self._elsewhere:
            other = Catalog(self.job.with_partition(partition), self.technique, self.memory)
            other._elsewhere = self._elsewhere
            self._elsewhere[partition] = other
        return self._elsewhere[partition]

    def has(self, failed: Iterable[Worker]) -> bool:
        """Is a plan stored for such failures?"""
        return canonical_pattern(failed, self.job)[0] in self._plans

    def plan_for(self, failed: Iterable[Worker]) -> tuple[Plan, str]:
        """A plan for `failed` at once, and in words where it comes from.

        Looked up, else made by the list scheduler now. Raises InfeasibleError when a stage has no
        living peer, InputError for a worker that is not of the grid.
        """
        problem = self.problem(failed)
        count = len(problem.failed)
        what = f"{count} failed worker{'' if count == 1 else 's'}" if count else "the full grid"
        plan = self.find(problem.failed)
        if plan is not None:
            return plan, f"from the catalog: planned ahead for {what} ({plan.solver.name}, {_gap(plan)})"
        plan = make_plan(problem, solver="list", look_ahead=False)
        return plan, f"no plan was made ahead for {what}: the list scheduler made one now ({_gap(plan)})"

    # -- JSON --------------------------------------------------------------------------------

    def to_json(self) -> str:
        head = CatalogDoc(job=job_doc(self.job), technique=self.technique, memory=self.memory.text, plans=())
        before, _, after = head.model_dump_json().partition(_NO_PLANS)
        return f"{before}{_NO_PLANS[:-1]}{','.join(plan.to_json() for plan in self.plans)}]{after}"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "catalog") -> Catalog:
        """Raises PlanError naming the first field that is wrong."""
        try:
            document = read_model(CatalogDoc, text)
        except ValidationError as error:
            raise PlanError(f"{source} is not a catalog: {first_problem(error)}") from None
        question = document.question
        catalog = cls(question.job, question.technique, question.memory)
        for plan in document.plans:
            catalog.add(plan)
        return catalog


def _gap(plan: Plan) -> str:
    if plan.solver.status == "optimal":
        return "proven optimal"
    return f"at most {percent(plan.metrics.gap)} above the best"
