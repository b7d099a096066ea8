"""An iteration as it ran: puts the workers' records on one time axis (`assemble`), and makes a Schedule and a Plan of
them, so that the charts for plans can draw it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from pydantic import BaseModel, Field

from openrecycle.agent.messages.protocol import MeasuredOps, OpColumns
from openrecycle.planner.jobs.job import SECONDS, Job, Problem, StageProfile, Worker
from openrecycle.planner.plans.plan import MEASURED, MetricsDoc, Plan, SolverDoc
from openrecycle.planner.plans.schedule import Op, Schedule


class WorkerOps(OpColumns):
    """starts_us: microseconds since the iteration's first op of all. Clocks that differ may make them as large as what
    a worker may say of its clock."""

    starts_us: tuple[Annotated[int, Field(ge=-(2**55), le=2**55)], ...]


class IterationAsRun(BaseModel):
    """One iteration as it ran. at: POSIX seconds. uncertainty_us: by how much times of workers of
    different hosts may be shifted against each other (0: one host)."""

    iteration: int
    generation: int
    plan_fingerprint: str
    at: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
    uncertainty_us: int
    workers: dict[str, WorkerOps]


@dataclass(frozen=True)
class MeasuredIteration:
    """An iteration of a job as it ran. Times are milliseconds; the schedule's unit is ms too.

    plan: the ops as a Plan document; its period is that of the schedule, by the
    planner's definition, and its references and bound are those of `planned`, the plan it ran.
    period_ms: median time from commit to commit, of the iterations around it; None before they are in.
    planned_ms: the plan's period; None where its unit is no time (slots).
    at: POSIX seconds. uncertainty_ms: by how much workers of different hosts may be shifted.
    """

    job_id: str
    iteration: int
    generation: int
    at: float
    uncertainty_ms: float
    schedule: Schedule
    plan: Plan
    planned: Plan
    period_ms: float | None
    planned_ms: float | None

    @property
    def over_plan(self) -> float | None:
        """Real period / planned period - 1."""
        if self.period_ms is None or not self.planned_ms:
            return None
        return self.period_ms / self.planned_ms - 1


def assemble(parts: Mapping[str, MeasuredOps], plan_fingerprint: str, at: float) -> IterationAsRun:
    """Puts the workers' parts of one iteration on one time axis.

    Workers that share a clock need no alignment. Different clocks are aligned by the best reading of each. at: POSIX
    seconds.
    """
    clocks: dict[str, MeasuredOps] = {}
    for part in parts.values():
        best = clocks.setdefault(part.clock, part)
        if part.uncertainty_us < best.uncertainty_us:
            clocks[part.clock] = part
    begins = {name: part.started_us + clocks[part.clock].offset_us for name, part in parts.items()}
    first = min(begins[name] + min(part.starts_us) for name, part in parts.items())
    uncertain = sorted((part.uncertainty_us for part in clocks.values()), reverse=True)
    any_part = next(iter(parts.values()))
    return IterationAsRun(
        iteration=any_part.iteration,
        generation=any_part.generation,
        plan_fingerprint=plan_fingerprint,
        at=at,
        uncertainty_us=sum(uncertain[:2]) if len(uncertain) > 1 else 0,
        workers={
            name: WorkerOps(
                kinds=part.kinds,
                pipelines=part.pipelines,
                micro_batches=part.micro_batches,
                starts_us=tuple(begins[name] - first + start for start in part.starts_us),
                durations_us=part.durations_us,
            )
            for name, part in sorted(parts.items())
        },
    )


def as_schedule(found: IterationAsRun, planned: Plan) -> Schedule:
    """Returns the ops with their measured times as a schedule. Its job's op times are the medians by stage.

    A worker alone can't tell its reduction from its wait for peers. With the times of all workers this is possible: a
    stage's steps begin when its last worker has finished its last other op, as in the planner's definition.
    """
    found = _without_waiting(found)
    problem = planned.problem()
    job = _measured_job(found, problem.job)
    scale = job.ticks_per_unit / 1000  # ticks per microsecond
    ops = {}
    for name, own in found.workers.items():
        worker = Worker.parse(name)
        columns = zip(own.kinds, own.pipelines, own.micro_batches, own.starts_us, own.durations_us, strict=True)
        ops[worker] = tuple(
            Op(
                k,
                p,
                m,
                worker.stage,
                worker,
                round(start * scale),
                round((start + took) * scale) - round(start * scale),
            )
            for k, p, m, start, took in columns
        )
    failed = frozenset(job.workers()) - frozenset(ops)
    return Schedule(Problem(job, failed, problem.technique, problem.memory), ops)


def _without_waiting(found: IterationAsRun) -> IterationAsRun:
    """Removes the wait for peers from each step: it begins when the last other op of its stage has ended, or later."""
    ready: dict[int, int] = {}
    for name, own in found.workers.items():
        stage = Worker.parse(name).stage
        ends = [s + d for k, s, d in zip(own.kinds, own.starts_us, own.durations_us, strict=True) if k != "O"]
        ready[stage] = max([ready.get(stage, 0), *ends])
    workers = {}
    for name, own in found.workers.items():
        end = own.starts_us[-1] + own.durations_us[-1]
        begin = min(end, max(own.starts_us[-1], ready[Worker.parse(name).stage]))
        workers[name] = own.model_copy(
            update={
                "starts_us": (*own.starts_us[:-1], begin),
                "durations_us": (*own.durations_us[:-1], end - begin),
            }
        )
    return found.model_copy(update={"workers": workers})


def as_plan(schedule: Schedule, planned: Plan) -> Plan:
    """Returns the schedule as a plan. Its bound and the plans that it is compared with are those of `planned`."""
    metrics = planned.metrics
    unit, scale = _unit_ms(schedule, planned), schedule.problem.job.ticks_per_unit
    return Plan.of(
        schedule,
        metrics=MetricsDoc.of(
            schedule,
            bound=min(round(metrics.lower_bound * unit, 6) * scale, schedule.period),
            reference=metrics.fault_free * unit * scale,
            best=metrics.period / (1 + metrics.slowdown_vs_best) * unit * scale,
        ),
        solver=SolverDoc(name=MEASURED, status="feasible", seconds=0.0, message="An iteration as it ran."),
    )


def _measured_job(found: IterationAsRun, planned: Job) -> Job:
    """Returns the job with the median op times of each stage, in milliseconds rounded to microseconds."""
    times: list[dict[str, list[int]]] = [{} for _ in range(planned.stages)]
    for name, own in found.workers.items():
        stage = times[Worker.parse(name).stage]
        for kind, took in zip(own.kinds, own.durations_us, strict=True):
            stage.setdefault(kind, []).append(took)
    profiles = []
    for stage, profile in zip(times, planned.profiles, strict=True):
        both = profile.input_backward + profile.weight_backward
        share = profile.input_backward / both if both else 0.5
        fused = _ms(stage.get("B", ()))
        profiles.append(
            StageProfile(
                forward=_ms(stage.get("F", ())),
                input_backward=_ms(stage["I"]) if "I" in stage else round(fused * share, 3),
                weight_backward=_ms(stage["W"]) if "W" in stage else round(fused * (1 - share), 3),
                optimizer=_ms(stage.get("O", ())),
                activation_bytes=profile.activation_bytes,
                weight_backward_bytes=profile.weight_backward_bytes,
                weight_bytes=profile.weight_bytes,
                optimizer_bytes=profile.optimizer_bytes,
            )
        )
    return Job(
        planned.pipelines,
        planned.stages,
        planned.micro_batches,
        profiles=tuple(profiles),
        time_unit="ms",
        capacity_bytes=planned.capacity_bytes,
    )


def _unit_ms(schedule: Schedule, planned: Plan) -> float:
    """Returns the milliseconds of the plan's time unit; for slots, the measured time of all ops / their slots."""
    if (seconds := SECONDS.get(planned.job.time_unit)) is not None:
        return 1000 * seconds
    ran = sum(schedule.problem.job.units(op.duration) for op in schedule.compute_ops())
    slots = sum(op.duration for ops in planned.workers.values() for op in ops if op.kind != "O")
    return ran / slots if ran and slots else 1.0


def _ms(microseconds: Iterable[int]) -> float:
    values = list(microseconds)
    return round(median(values) / 1000, 3) if values else 0.0
