"""Plans side by side: one row per number, one value per plan. The command line and the console show it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

from openrecycle.planner.jobs.words import counts
from openrecycle.planner.plans.plan import MEASURED, Plan
from openrecycle.planner.plans.schedule import Schedule

Value = str | int | float | None
Kind = Literal["text", "time", "fraction", "count", "bytes"]

# (F, I or W; home pipeline; micro-batch; stage): identifies an op, wherever and whenever it runs.
_Key = tuple[str, int, int | None, int]


@dataclass(frozen=True)
class ComparisonRow:
    """One number of all plans. key: for programs. kind: how values are formatted; a time is in its plan's unit.

    values: one per plan; None where the plan can't be compared with the first one.
    changes: for times, the difference to the first plan's as a fraction (-0.1 = 10 % less), where plans are
    `comparable`.
    """

    key: str
    label: str
    kind: Kind
    values: tuple[Value, ...]
    changes: tuple[float | None, ...] = ()

    def shown(self, index: int) -> str:
        """Formats a value; times with their change against the first plan."""
        value = self.values[index]
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        if self.kind == "fraction":
            return f"{value:.2%}" if self.key in ("gap", "bubble_fraction") else f"{value:+.2%}"
        if self.kind == "count":
            return f"{value:,}"
        if self.kind == "bytes":
            return f"{value / 2**30:,.4g} GiB"
        change = self.changes[index] if index else None
        return f"{value:,.6g}" + ("" if change is None else f" ({change:+.1%})")


_NUMBERS: tuple[tuple[str, str, Kind, Callable[[Plan], Value]], ...] = (
    ("grid", "pipelines, stages, micro-batches", "text", lambda p: _grid(p)),
    ("failed", "workers out", "text", lambda p: _listed(p.failed)),
    ("partition", "layers per stage", "text", lambda p: counts(p.partition) or None),
    ("technique", "technique", "text", lambda p: p.technique.value),
    ("memory", "memory limit", "text", lambda p: p.memory),
    ("time_unit", "time unit", "text", lambda p: p.job.time_unit),
    ("period", "period", "time", lambda p: p.metrics.period),
    ("makespan", "makespan", "time", lambda p: p.metrics.makespan),
    ("lower_bound", "lower bound", "time", lambda p: p.metrics.lower_bound),
    ("gap", "gap", "fraction", lambda p: p.metrics.gap),
    ("bubble_fraction", "bubbles", "fraction", lambda p: p.metrics.bubble_fraction),
    ("slowdown_vs_1f1b", "slowdown vs fault-free 1F1B", "fraction", lambda p: p.metrics.slowdown_vs_1f1b),
    ("peak_activations", "most activations on a worker", "count", lambda p: _peak(p)),
    ("peak_bytes", "most memory on a worker", "bytes", lambda p: _peak_bytes(p)),
    ("ops", "ops", "count", lambda p: p.op_count),
    ("rerouted_ops", "re-routed ops", "count", lambda p: int(p.schedule().away.sum())),
    ("solver", "solver", "text", lambda p: _solver(p)),
    ("fingerprint", "fingerprint", "text", lambda p: p.fingerprint[:12]),
)


_MOVED = (
    ("moved_worker", "ops on another worker"),
    ("moved_start", "ops at another time only"),
    ("split_otherwise", "backwards split in one only"),
)


@dataclass(frozen=True)
class StageFigures:
    """The numbers of one stage of a schedule. Times in ticks; `end` is that of its optimizer steps.

    living: number of workers. busy: of the busiest worker, O included. bubble_fraction: 1 - the stage's busy time /
    (living x period). peak: most activations on a worker. limit: of these. rerouted: number of micro-batches.
    """

    stage: int
    living: int
    busy: int
    bubble_fraction: float
    start: int
    end: int
    peak: int
    limit: int | None
    rerouted: int


def by_stage(schedule: Schedule) -> list[StageFigures]:
    """Compute the numbers of each stage, as planner.plans.schedule defines them."""
    out = []
    for stage in range(schedule.problem.job.stages):
        workers = [w for w in schedule.ops if w.stage == stage]
        rows = [schedule.ops[w] for w in workers]
        busy = [schedule.busy(w) for w in workers]
        out.append(
            StageFigures(
                stage,
                len(workers),
                max(busy),
                1 - sum(busy) / (len(workers) * schedule.period),
                min(row[0].start for row in rows),
                max(row[-1].end for row in rows),
                max(schedule.peak_activations[w] for w in workers),
                schedule.problem.most_held[stage][1],
                sum(schedule.rerouted_forwards[w] for w in workers),
            )
        )
    return out


def comparable(first: Plan, other: Plan) -> bool:
    """Can the plans' times be compared? They must have the same unit, and the same grid with as many micro-batches."""
    return first.job.time_unit == other.job.time_unit and _grid(first) == _grid(other)


def against_best(plans: Sequence[Plan]) -> tuple[float, ...]:
    """Return by how much each plan's period exceeds the best known fault-free period of its job, as a fraction.

    The best is over all techniques at each memory limit of the given plans of that job, and over these plans
    themselves. So plans side by side have one mark, while a plan's own `slowdown_vs_best` knows only its own limit.
    """

    def best(of: Plan) -> float:
        own = [p.metrics for p in plans if p.job == of.job and p.solver.name != MEASURED] or [of.metrics]
        return min(min(m.period / (1 + m.slowdown_vs_best), m.period) for m in own)

    return tuple(plan.metrics.period / best(plan) - 1 for plan in plans)


def compare(plans: Sequence[Plan], only: Container[str] | None = None) -> tuple[ComparisonRow, ...]:
    """Return the numbers of all plans, then what moved against the first. only: just the rows with these keys. There is
    no row for memory where no profile says what a worker holds, and none for layers where no job has any.

    Ops are matched by kind, micro-batch and stage; a B is matched with an I, since both begin the backward. Ops are
    counted only for plans with the grid of the first one, and other starts only for plans with its time unit as well.
    """
    rows = []
    for key, label, kind, read in _NUMBERS:
        if only is None or key in only:
            rows.append(_row(plans, key, label, kind, read))
        if key == "slowdown_vs_1f1b" and (only is None or "slowdown_vs_best" in only):
            rows.append(
                ComparisonRow("slowdown_vs_best", "slowdown vs best fault-free", "fraction", against_best(plans))
            )
    rows = [row for row in rows if any(value is not None for value in row.values)]
    wanted = [(i, key, label) for i, (key, label) in enumerate(_MOVED) if only is None or key in only]
    moved = [_moved(plans[0], plan) for plan in plans] if wanted else []
    rows += [ComparisonRow(key, label, "count", tuple(numbers[i] for numbers in moved)) for i, key, label in wanted]
    return tuple(rows)


def _row(plans: Sequence[Plan], key: str, label: str, kind: Kind, read: Callable[[Plan], Value]) -> ComparisonRow:
    values = tuple(map(read, plans))
    if kind != "time":
        return ComparisonRow(key, label, kind, values)
    first = values[0]
    alike = [comparable(plans[0], plan) for plan in plans]
    return ComparisonRow(
        key,
        label,
        kind,
        values,
        tuple(
            value / first - 1
            if same and isinstance(value, int | float) and isinstance(first, int | float) and first
            else None
            for value, same in zip(values, alike, strict=True)
        ),
    )


def _moved(first: Plan, other: Plan) -> tuple[int | None, int | None, int | None]:
    """Count ops on another worker, ops on the same one at another start, and backwards split in one plan only."""
    if _grid(first) != _grid(other):
        return None, None, None
    before, after = _places(first), _places(other)
    common = before.keys() & after.keys()
    workers = sum(before[key][0] != after[key][0] for key in common)
    starts = sum(before[key][0] == after[key][0] and before[key][1] != after[key][1] for key in common)
    same_unit = first.job.time_unit == other.job.time_unit
    return workers, starts if same_unit else None, len(before.keys() ^ after.keys())


def _places(plan: Plan) -> dict[_Key, tuple[str, float]]:
    """Return worker and start of each op. O is left out, since it always runs on its own worker."""
    schedule = plan.schedule()
    return {
        ("I" if op.kind == "B" else op.kind, op.pipeline, op.micro_batch, op.stage): (
            str(op.worker),
            schedule.problem.job.units(op.start),
        )
        for op in schedule.compute_ops()
    }


def _solver(plan: Plan) -> str:
    if plan.solver.name == MEASURED:
        return "none: as it ran"
    return f"{plan.solver.name}, {plan.solver.status}, {plan.solver.seconds:.2f} s"


def _grid(plan: Plan) -> str:
    return f"{plan.job.pipelines} x {plan.job.stages} x {plan.job.micro_batches}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return shown or "none"


def _peak(plan: Plan) -> int:
    return max(plan.metrics.peak_activations.values(), default=0)


def _peak_bytes(plan: Plan) -> int | None:
    if not any(profile.counts_bytes for profile in plan.job.job().profiles):
        return None
    return max(plan.schedule().peak_bytes.values())
