"""`openrecycle catalog` and `migrations`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from openrecycle.planner.catalogs.catalog_build import build_catalog
from openrecycle.planner.catalogs.catalog_engines import make_engine
from openrecycle.planner.commands.shared import (
    AsJson,
    Durations,
    Failed,
    Layers,
    Memory,
    MicroBatches,
    PartitionOption,
    Pipelines,
    Profile,
    Stages,
    UnitSeconds,
    best_at_home,
    err,
    failed_workers,
    interruptible,
    job_of_options,
)
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import MemoryLimit, Over, Technique
from openrecycle.planner.jobs.profile import AUTO
from openrecycle.planner.layers.distribution import COPY_BANDWIDTH, check_copy_cost
from openrecycle.planner.layers.migration import SECONDS, MigrationPlan, best_migrations
from openrecycle.planner.plans.packed import CatalogQuestion, Effort
from openrecycle.planner.solvers.portfolio import SOLVERS


def migrations_command(
    pipelines: Pipelines = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    fail: Failed = None,
    technique: Annotated[str, typer.Option(help="adaptive, decoupled or staggered.")] = "staggered",
    memory: Memory = "uniform",
    durations: Durations = None,
    profile: Profile = None,
    state_bytes: Annotated[
        str, typer.Option(help="Bytes of weights and optimizer state to copy; one number, or one per stage: 1e9,2e9.")
    ] = "0",
    bandwidth: Annotated[float, typer.Option(help="Bytes per second of one copy.")] = COPY_BANDWIDTH,
    heals_in: Annotated[float | None, typer.Option(help="Seconds until the failed workers return, if known.")] = None,
    unit_seconds: UnitSeconds = None,
    as_json: AsJson = False,
) -> None:
    """Say whether failures should move to other stages, which workers to migrate, and why."""

    job = job_of_options(pipelines, stages, micro_batches, durations, profile)
    result = best_migrations(
        job,
        failed_workers(fail, job),
        technique=Technique.of(technique),
        memory=MemoryLimit.parse(memory),
        cost=check_copy_cost(job, _byte_counts(state_bytes), bandwidth),
        heals_in=heals_in,
        unit_seconds=unit_seconds,
    )
    units = {"period_now": None if result.period_now is None else job.units(result.period_now)}
    if as_json:
        document = {
            "failures_per_stage": {"now": result.present, "after": result.counts},
            "migrations": [
                {"worker": str(m.worker), "takes": str(m.takes), "source": str(m.source) if m.source else "checkpoint"}
                for m in result.migrations
            ],
            "failed": [str(w) for w in sorted(result.failed)],
            **units,
            "period": job.units(result.period),
            "pause_seconds": result.pause,
            "iterations_gained": result.iterations_gained,
            "reason": result.reason,
        }
        sys.stdout.write(json.dumps(document) + "\n")
        return
    print("\n".join(_lines(result)))
    if heals_in is not None and unit_seconds is None and job.time_unit not in SECONDS:
        print(f"one {job.time_unit} is taken to last 1 s; --unit-seconds says otherwise")


def _lines(result: MigrationPlan) -> list[str]:
    return [
        result.reason,
        *(f"  {migration}" for migration in result.migrations),
        f"failures per stage: {_numbers(result.present)} now, {_numbers(result.counts)} afterwards",
    ]


def _numbers(counts: tuple[int, ...]) -> str:
    return "/".join(map(str, counts))


def _byte_counts(text: str) -> list[int]:
    out = []
    for part in text.split(","):
        try:
            out.append(int(float(part)))
        except (ValueError, OverflowError):
            raise InputError("--state-bytes", part, "a number of bytes, such as 2e9") from None
    return out


def catalog_command(
    out: Annotated[Path, typer.Option(help="Folder for catalogs; each lies in it under its fingerprint.")],
    tolerance: Annotated[int, typer.Option(help="Plan for up to so many failures.")],
    pipelines: Pipelines = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    technique: Annotated[str, typer.Option(help="fault-free, adaptive, decoupled or staggered.")] = "staggered",
    memory: Memory = "uniform",
    durations: Durations = None,
    layers: Layers = None,
    partition: PartitionOption = None,
    relayout: Annotated[
        str | None, typer.Option(help="auto: each plan has a partition of its own (where there are layers); or never.")
    ] = None,
    profile: Profile = None,
    solver: Annotated[str, typer.Option(help="list, auto, cp-sat or milp.")] = "list",
    time_limit: Annotated[float, typer.Option(help="Seconds per plan, for other solvers than list.")] = 10.0,
    per: Annotated[str, typer.Option(help="A plan per failure `pattern`, per `count`, or `auto`.")] = "auto",
    jobs: Annotated[int | None, typer.Option(help="Processes; by default one per core.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan ahead, one plan per failure count or pattern. Ctrl-C keeps what is done; the same command goes on."""
    if solver not in SOLVERS:
        raise InputError("--solver", solver, "one of " + ", ".join(SOLVERS))
    if not 0 < time_limit < float("inf"):
        raise InputError("--time-limit", time_limit, "a number of seconds above 0")
    of, limit = Technique.of(technique), MemoryLimit.parse(memory)
    if layers is not None and partition is None:
        partition = AUTO
    job = job_of_options(pipelines, stages, micro_batches, durations, profile, layers, partition)
    if relayout not in (None, "auto", "never"):
        raise InputError("--relayout", relayout, "auto or never")
    if relayout == "auto" and not job.layers:
        raise InputError("--relayout", relayout, "--layers beside it, or a profile by layers")
    if job.layers and partition in (None, AUTO):
        job = best_at_home(job, of, limit)
    over: Over = "partitions" if job.layers and relayout != "never" else "schedules"
    question = CatalogQuestion(job, of, limit, over)
    with interruptible() as stop, _bar(quiet=as_json) as progress:
        report = build_catalog(
            question,
            tolerance,
            out,
            engine=make_engine(jobs),
            effort=Effort(solver=solver, time_limit=None if solver == "list" else time_limit),
            per=per,
            on_progress=progress,
            cancelled=lambda: bool(stop),
        )
    catalog = report.catalog
    known = catalog.headers()
    headers = list(known.values())
    size = sum(len(catalog.blobs.get(name) or b"") for name in known)
    document = {
        "fingerprint": catalog.info.fingerprint,
        "folder": str(out / catalog.info.fingerprint),
        "plans": len(headers),
        "wanted": report.total,
        "planned": report.planned,
        "kept": report.kept,
        "finished": report.finished,
        "bytes": size,
        "seconds": round(report.seconds, 3),
        "optimal": sum(h.solver.status == "optimal" for h in headers),
        "worst_gap": max((h.metrics.gap for h in headers), default=0.0),
    }
    if as_json:
        sys.stdout.write(json.dumps(document) + "\n")
        return
    print(
        f"{document['plans']} plans for up to {tolerance} failures in {document['folder']}\n"
        f"{report.planned} planned now in {report.seconds:.1f} s, {report.kept} were there; {size / 1e6:.1f} MB\n"
        f"{document['optimal']} proven optimal, worst gap {document['worst_gap']:.2%}"
    )
    if not report.finished:
        print(f"stopped with {report.total - report.planned - report.kept} to go: the same command goes on from here")


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal; nothing elsewhere."""
    if quiet or not err.is_terminal:
        yield None
        return
    columns = (TextColumn("planning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("planning", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
