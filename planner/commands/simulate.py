"""`openrecycle simulate`: what a job lives through under a failure trace, by policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from openrecycle.planner.catalogs.catalog_store import open_folder
from openrecycle.planner.commands.output import console
from openrecycle.planner.commands.shared import (
    Durations,
    Memory,
    MicroBatches,
    Pipelines,
    Profile,
    Stages,
    UnitSeconds,
    job_of_options,
)
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique
from openrecycle.planner.plans.models import analytic_job, model_shape
from openrecycle.planner.profiles import job_on, load
from openrecycle.planner.simulation.engine import simulate
from openrecycle.planner.simulation.outcome import SimulationOutcome, Sweep, sweep
from openrecycle.planner.simulation.planned import LAYERS_PER_STAGE, PlannedJob
from openrecycle.planner.simulation.policies.planned_policies import PLANNED, planned_policy
from openrecycle.planner.simulation.policies.published import PUBLISHED, READY_AFTER, published
from openrecycle.planner.simulation.policy_base import RecoveryCosts
from openrecycle.planner.simulation.trace import Trace
from openrecycle.planner.simulation.traces import read_trace
from openrecycle.planner.simulation.traces.generated import HOST, Domain, generated

Run = Callable[[Trace], list[SimulationOutcome]]


def simulate_command(
    policy: Annotated[
        list[str],
        typer.Option(help="Repeatable, or comma-separated: " + ", ".join({**PLANNED, **PUBLISHED}) + ", spares."),
    ],
    trace: Annotated[Path | None, typer.Option(help="A failure trace; its format is told from its content.")] = None,
    model: Annotated[str | None, typer.Option(help="Row of the tables, or a model shape such as gpt-3-6.7b.")] = None,
    throughput: Annotated[Path | None, typer.Option(help="CSV: system,model,nodes,samples_per_second.")] = None,
    costs: Annotated[Path | None, typer.Option(help="CSV of what a failure costs each system and model.")] = None,
    profile: Profile = None,
    pipelines: Pipelines = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    durations: Durations = None,
    samples: Annotated[
        float | None, typer.Option(help="Samples of one iteration; by default one a micro-batch.")
    ] = None,
    technique: Annotated[
        str, typer.Option(help="What re-routing may use: adaptive, decoupled or staggered.")
    ] = "staggered",
    memory: Memory = "uniform",
    unit_seconds: UnitSeconds = None,
    layers_per_stage: Annotated[int, typer.Option(help="What re-partition can move.")] = LAYERS_PER_STAGE,
    least_stages: Annotated[int | None, typer.Option(help="Fewest workers that hold the model.")] = None,
    catalog: Annotated[Path | None, typer.Option(help="A catalog's folder: its periods are taken.")] = None,
    cost: Annotated[
        str, typer.Option(help="Seconds: detect=1,recover=1,rejoin=5,... and dollars per worker-hour.")
    ] = "",
    spares: Annotated[int, typer.Option(help="Workers that stand by, for the policy spares.")] = 1,
    mtbf: Annotated[
        list[float] | None,
        typer.Option(help="Hours between one worker's failures, instead of --trace; several: a sweep."),
    ] = None,
    repair: Annotated[float, typer.Option(help="Hours until a failed worker is back.")] = 1.0,
    shape: Annotated[float, typer.Option(help="Weibull shape of the times between failures; 1 is Poisson.")] = 1.0,
    host_mtbf: Annotated[
        float | None, typer.Option(help=f"Hours between failures of a host of {HOST} workers.")
    ] = None,
    rack: Annotated[str | None, typer.Option(help="WORKERS:MTBF of a rack.")] = None,
    switch: Annotated[str | None, typer.Option(help="WORKERS:MTBF of what hangs on one switch.")] = None,
    hours: Annotated[float, typer.Option(help="Length of a drawn trace.")] = 168.0,
    seed: Annotated[int, typer.Option(help="Of a drawn trace.")] = 0,
    over_time: Annotated[
        bool, typer.Option("--over-time", help="With --json: the throughput over time as well.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per policy, a line each.")] = False,
) -> None:
    """Simulate a job under a failure trace.

    With --throughput and --costs: measured samples/s by node count, as published for Oobleck, Varuna,
    Bamboo and ReCycle. With --profile, sizes and --durations, or a --model shape and sizes: plans of our own.
    """
    if over_time and not as_json:
        raise InputError("--over-time", True, "--json beside it")
    names = [name for text in policy for name in text.split(",") if name]
    if not names:
        raise InputError("--policy", ",".join(policy), "at least one policy")
    if throughput is not None or costs is not None:
        given = {"--profile": profile, "--pipelines": pipelines, "--stages": stages, "--durations": durations}
        _refuse("beside --throughput and --costs", {**given, "--catalog": catalog})
        if throughput is None or costs is None or model is None:
            missing = [
                n for n, v in (("--throughput", throughput), ("--costs", costs), ("--model", model)) if v is None
            ]
            raise InputError(missing[0], None, "a value: --throughput, --costs and --model go together")
        run, label, workers, dollars = _measured(names, throughput, costs, model), model, None, None
    else:
        job = _job(model, profile, pipelines, stages, micro_batches, durations)
        charges = RecoveryCosts.parse(cost)
        planned = PlannedJob(
            job,
            samples=float(job.pipelines * job.micro_batches) if samples is None else samples,
            technique=Technique.of(technique),
            memory=MemoryLimit.parse(memory),
            unit_seconds=unit_seconds,
            layers=layers_per_stage,
            least_stages=least_stages,
            catalog=None if catalog is None else open_folder(catalog),
        )
        run = _planned(names, planned, charges, spares)
        label, workers, dollars = model or (profile.name if profile else "job"), planned.workers, charges.dollars
    show = _Show(label, dollars, as_json, over_time)
    if trace is not None:
        _refuse("beside --trace", {"--mtbf": mtbf, "--host-mtbf": host_mtbf, "--rack": rack, "--switch": switch})
        _print(run(read_trace(trace)), show)
        return
    shared = _shared_domains(host_mtbf, rack, switch, repair)
    if not mtbf and not shared:
        raise InputError("--trace", None, "a file, or --mtbf, --host-mtbf, --rack or --switch to draw a trace")
    if workers is None:
        raise InputError("--trace", None, "a file: only a job with a grid has a trace drawn for it")

    def drawn(value: float | None) -> Trace:
        own = [] if value is None else [Domain(1, value, repair, shape)]
        name = f"mtbf-{value:g}h" if value is not None else "drawn"
        return generated(workers, hours, own + shared, seed=seed, name=name)

    if mtbf and len(mtbf) > 1:
        _print_sweep(sweep(mtbf, drawn, run), show)
    else:
        _print(run(drawn(mtbf[0] if mtbf else None)), show)


# -- what is run --------------------------------------------------------------------------------------


def _measured(names: Sequence[str], throughput: Path, costs: Path, model: str) -> Run:
    def run(trace: Trace) -> list[SimulationOutcome]:
        made = [published(name, throughput, costs, model) for name in names]
        return [simulate(trace, policy, ready_after=READY_AFTER) for policy in made]

    return run


def _planned(names: Sequence[str], planned: PlannedJob, costs: RecoveryCosts, spares: int) -> Run:
    def run(trace: Trace) -> list[SimulationOutcome]:
        made = [planned_policy(name, planned, costs, spares=spares) for name in names]
        return [simulate(trace, policy) for policy in made]

    return run


def _job(
    model: str | None,
    profile: Path | None,
    pipelines: int | None,
    stages: int | None,
    micro_batches: int | None,
    durations: str | None,
) -> Job:
    """From the profile, the sizes beside it replacing its own; else from the sizes; else a model's shape."""
    if profile is not None:
        _refuse("beside --profile", {"--durations": durations})
        return job_on(load(profile), pipelines, stages, micro_batches)
    if model is not None and durations is None:
        sizes = {"--pipelines": pipelines, "--stages": stages, "--micro-batches": micro_batches}
        for option, value in sizes.items():
            if value is None:
                raise InputError(option, None, "a whole number of at least 1 (or --throughput and --costs)")
        assert pipelines is not None and stages is not None and micro_batches is not None
        return analytic_job(model_shape(model), pipelines, stages, micro_batches)
    return job_of_options(pipelines, stages, micro_batches, durations, None)


def _shared_domains(host_mtbf: float | None, rack: str | None, switch: str | None, repair: float) -> list[Domain]:
    out = [] if host_mtbf is None else [Domain(HOST, host_mtbf, repair)]
    for option, text in (("--rack", rack), ("--switch", switch)):
        if text is None:
            continue
        size, _, mean = text.partition(":")
        try:
            out.append(Domain(int(size), float(mean), repair))
        except ValueError:
            raise InputError(option, text, "WORKERS:MTBF, such as 32:5000") from None
    return out


def _refuse(where: str, options: dict[str, object]) -> None:
    for option, value in options.items():
        if value:
            raise InputError(option, value if isinstance(value, (int, float, str)) else str(value), f"nothing {where}")


# -- what is printed ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Show:
    """How to print. dollars: per worker and hour, None where no price is known."""

    model: str
    dollars: float | None
    as_json: bool
    over_time: bool

    def line(self, outcome: SimulationOutcome, **more: float) -> None:
        document: dict[str, Any] = outcome.document(self.model, price=self.dollars, over_time=self.over_time)
        sys.stdout.write(json.dumps({**document, **more}) + "\n")


def _print(outcomes: Sequence[SimulationOutcome], show: _Show) -> None:
    model, dollars = show.model, show.dollars
    if show.as_json:
        for outcome in outcomes:
            show.line(outcome)
        return
    first = outcomes[0]
    table = Table(title=f"{model} on {first.trace}: {first.hours:.4g} h, {first.failures} workers lost", box=None)
    columns = ["policy", "samples/s", "goodput", "ETTR", "iterations lost", "extra worker-hours"]
    if dollars is not None:
        columns.append("$ per million samples")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for outcome in outcomes:
        row = [
            outcome.policy,
            f"{outcome.average_samples_per_second:.4g}",
            f"{outcome.goodput:.1%}",
            f"{outcome.ettr:.1%}",
            f"{outcome.lost:,}",
            f"{outcome.worker_hours_wasted:,.1f}",
        ]
        if dollars is not None:
            price = outcome.dollars_per_million_samples(dollars)
            row.append("-" if price is None else f"{price:,.2f}")
        table.add_row(*row)
    console().print(table)


def _print_sweep(made: Sweep, show: _Show) -> None:
    if show.as_json:
        for value, row in zip(made.hours, made.outcomes, strict=True):
            for outcome in row:
                show.line(outcome, mtbf_hours=value)
        return
    table = Table(title=f"{show.model}: samples/s by one worker's mean time between failures", box=None)
    table.add_column("MTBF")
    for outcome in made.outcomes[0]:
        table.add_column(outcome.policy, justify="right")
    for value, row in zip(made.hours, made.outcomes, strict=True):
        table.add_row(f"{value:g} h", *(f"{outcome.trace_samples_per_second:.4g}" for outcome in row))
    shown = console()
    shown.print(table)
    for crossing in made.crossings:
        shown.print(f"{crossing.after} overtakes {crossing.before} at an MTBF of about {crossing.hours:.3g} h")
