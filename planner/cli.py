"""The planner's command line, `python -m planner` and `openrecycle`.

The file begins with what several commands share: the job that the options describe, and Ctrl-C. Then come `catalog` and
`migrations`, `export` and `compare`, `simulate`, and last `plan`, `check` and `schema`.

Exit status: 0 done; 1 a checked plan is invalid; 2 the input is not acceptable or unreadable.
"""

from __future__ import annotations

import json
import math
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from openrecycle.planner.catalogs.catalog import open_folder
from openrecycle.planner.catalogs.catalog_build import build_catalog, make_engine
from openrecycle.planner.check import check as find_violations
from openrecycle.planner.check import checked, claim, further
from openrecycle.planner.export import EXPORTERS, format_named
from openrecycle.planner.export.compare import ComparisonRow, compare
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.failures import parse_failed
from openrecycle.planner.jobs.job import (
    AUTO,
    SECONDS,
    Job,
    MemoryLimit,
    Over,
    Problem,
    Technique,
    Worker,
    parse_durations,
    parse_partition,
)
from openrecycle.planner.jobs.words import count, gigabytes, layers_move, number_of, plural
from openrecycle.planner.layers.migration import COPY_BANDWIDTH, best_migrations, check_copy_cost
from openrecycle.planner.layers.partition import Layout, best_at_home, best_relayout, lay_out
from openrecycle.planner.output import check_out, console, is_stdout, run, write_out
from openrecycle.planner.plans.packed import CatalogQuestion, Effort
from openrecycle.planner.plans.plan import JobDoc, Plan, PlanError
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.profiles import analytic_job, job_on, load, model_shape
from openrecycle.planner.simulation.engine import RecoveryCosts, SimulationOutcome, Sweep, simulate, sweep
from openrecycle.planner.simulation.planned import LAYERS_PER_STAGE, PlannedJob, check_sizes, evened
from openrecycle.planner.simulation.policies import (
    CUT_ANEW,
    PLANNED,
    PUBLISHED,
    READY_AFTER,
    check_spares,
    planned_policy,
    published,
)
from openrecycle.planner.simulation.traces import HOST, MAX_HOURS, Domain, Trace, generated, read_trace
from openrecycle.planner.solvers.base import SolverProgress
from openrecycle.planner.solvers.portfolio import check_effort, make_plan, reference_plan

# -- what several commands of `python -m planner` share -----------------------------------------

Pipelines = Annotated[int | None, typer.Option(help="Data-parallel pipelines.")]
Stages = Annotated[int | None, typer.Option(help="Stages of each pipeline.")]
MicroBatches = Annotated[int | None, typer.Option(help="Micro-batches per pipeline and iteration.")]
Durations = Annotated[str | None, typer.Option(help="Op times, F=1,I=1,W=1,O=0,transfer=0.")]
Layers = Annotated[int | None, typer.Option(help="Layers of the model, alike; --durations are then those of one.")]
PartitionOption = Annotated[
    str | None, typer.Option(help="Layers per stage: auto (the default with --layers) or numbers such as 11,11,11,11.")
]
Profile = Annotated[
    Path | None,
    typer.Option(
        help="Op times: a file of `openrecycle profile`, a shipped profile's name (gpt-3-medium), or a JSON file with "
        "the document of a job."
    ),
]
Failed = Annotated[list[str] | None, typer.Option(help="A failed worker such as W1_2; repeatable.")]
MEMORY = typer.Option(
    help="Activations per worker: 1f1b, uniform (the default), none, a number, or bytes (what fits by the profile)."
)
Memory = Annotated[str, MEMORY]
UnitSeconds = Annotated[
    float | None, typer.Option(help="Seconds of one time unit, where its name does not say it (default 1).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

# For what is not part of the result: progress, and the answer to Ctrl-C.
err = Console(stderr=True, highlight=False, soft_wrap=True)


def job_of_options(
    pipelines: int | None,
    stages: int | None,
    micro_batches: int | None,
    durations: str | None,
    profile: Path | None,
    layers: int | None = None,
    partition: str | None = None,
    *,
    moved: bool = False,
) -> Job:
    """Make the job that `--profile`, or the sizes, `--layers` and `--durations`, describe. Raises InputError.

    A measured profile (a file, or a shipped one by its name) can be used with other sizes too. If a partition is given,
    the job has the measured layers. `auto` leaves the job at the partition that spreads work most evenly.
    moved: if the profile has a partition, that stays the job's home, and the given one is where layers have moved to.
    """
    sizes = {"--pipelines": pipelines, "--stages": stages, "--micro-batches": micro_batches, "--durations": durations}
    if profile is not None:
        document = load(profile)
        if layers is not None:
            raise InputError("--layers", layers, "nothing, since --profile FILE says it")
        for option, value in sizes.items():
            if value is not None and (isinstance(document, JobDoc) or option == "--durations"):
                raise InputError(option, value, "nothing, since --profile FILE says it")
        job = job_on(document, pipelines, stages, micro_batches, by_layers=partition is not None)
        cut = _cut(job, partition)
        return (
            job.with_partition(cut.partition) if moved and isinstance(document, JobDoc) and document.partition else cut
        )
    for option, value in sizes.items():
        if value is None and option != "--durations":
            raise InputError(option, None, "a whole number of at least 1 (or --profile FILE)")
    assert pipelines is not None and stages is not None and micro_batches is not None
    if layers is not None and layers < 1:
        raise InputError("--layers", layers, "a whole number of at least 1")
    times = parse_durations(durations or "")
    return _cut(Job.uniform(pipelines, stages, micro_batches, durations=times, layers=layers or 0), partition)


def _cut(job: Job, partition: str | None) -> Job:
    """Apply `--partition`."""
    counts = () if partition is None or partition == AUTO else parse_partition(partition, field="--partition")
    if partition is not None and not job.layers:
        raise InputError("--partition", partition, "--layers beside it, or a profile by layers")
    if partition is None or partition == AUTO:
        return job
    return job.begun_with(job.check_partition(counts, field="--partition"))


def failed_workers(given: list[str] | None, job: Job) -> frozenset[Worker]:
    """Parse `--fail`, which may be repeated or list several workers. Raises InputError."""
    return parse_failed((name for text in given or [] for name in text.split(",")), job)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Let the first Ctrl-C only add to the list that is yielded; the second one ends the program."""
    stop: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(number)
        err.print("stopping; keeping the best plan so far")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


# -- `openrecycle catalog` and `migrations` -----------------------------------------------------


def migrations_command(
    pipelines: Pipelines = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    fail: Failed = None,
    technique: Annotated[str, typer.Option(help="adaptive, decoupled or staggered.")] = "staggered",
    memory: Memory = "uniform",
    durations: Durations = None,
    layers: Layers = None,
    partition: PartitionOption = None,
    profile: Profile = None,
    state_bytes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of weights and optimizer state to copy; one number, or one per stage: 1e9,2e9. Without it, "
            "what the profile says."
        ),
    ] = None,
    bandwidth: Annotated[float, typer.Option(help="Bytes per second of one copy.")] = COPY_BANDWIDTH,
    heals_in: Annotated[float | None, typer.Option(help="Seconds until the failed workers return, if known.")] = None,
    unit_seconds: UnitSeconds = None,
    as_json: AsJson = False,
) -> None:
    """Say which workers should change their stage, and why."""
    if layers is not None and partition is None:
        partition = AUTO
    job = job_of_options(pipelines, stages, micro_batches, durations, profile, layers, partition, moved=True)
    dead, of, limit = failed_workers(fail, job), Technique.of(technique), MemoryLimit.parse(memory)
    copied = None if state_bytes is None else _byte_counts(state_bytes)
    cost = check_copy_cost(job, copied, bandwidth)
    if partition == AUTO:
        result = best_relayout(
            best_at_home(job, of, limit),
            dead,
            technique=of,
            memory=limit,
            cost=lambda cut: check_copy_cost(cut, copied, bandwidth),
            heals_in=heals_in,
            unit_seconds=unit_seconds,
        )
    else:
        result = best_migrations(
            job, dead, technique=of, memory=limit, cost=cost, heals_in=heals_in, unit_seconds=unit_seconds
        )
    if as_json:
        sys.stdout.write(result.document(job).model_dump_json() + "\n")
        return
    print(result.reason)
    for migration in result.migrations:
        print(f"  {migration}")
    now, afterwards = ("/".join(map(str, counts)) for counts in (result.present, result.counts))
    print(f"failures per stage: {now} now, {afterwards} afterwards")
    if result.partition:
        print(f"layers per stage afterwards: {','.join(map(str, result.partition))}")
    if heals_in is not None and unit_seconds is None and job.time_unit not in SECONDS:
        print(f"one {job.time_unit} is taken to last 1 s; --unit-seconds says otherwise")


def _byte_counts(text: str) -> list[int]:
    out = []
    for part in text.split(","):
        value = number_of(part.strip())
        if value is None or not math.isfinite(value):
            raise InputError("--state-bytes", part, "a number of bytes, such as 2e9")
        out.append(int(value))
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
    check_effort(solver, time_limit)
    if time_limit == math.inf:
        raise InputError("--time-limit", time_limit, "a finite number of seconds")
    of, limit = Technique.of(technique), MemoryLimit.parse(memory)
    if layers is not None and partition is None:
        partition = AUTO
    job = job_of_options(pipelines, stages, micro_batches, durations, profile, layers, partition)
    if relayout not in (None, "auto", "never"):
        raise InputError("--relayout", relayout, "auto or never")
    if relayout == "auto" and not job.layers:
        raise InputError("--relayout", relayout, "--layers beside it, or a profile by layers")
    if job.layers and partition == AUTO:
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
        f"{count(len(headers), 'plan')} for up to {count(tolerance, 'failure')} in {document['folder']}\n"
        f"{report.planned} planned now in {report.seconds:.1f} s, {report.kept} were there; {gigabytes(size)}\n"
        f"{document['optimal']} proven optimal, worst gap {document['worst_gap']:.2%}"
    )
    if not report.finished:
        print(f"stopped with {report.total - report.planned - report.kept} to go: the same command goes on from here")


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on a terminal; nothing elsewhere."""
    if quiet or not err.is_terminal:
        yield None
        return
    columns = (TextColumn("planning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("planning", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# -- `openrecycle export` and `compare` ---------------------------------------------------------

MAX_COMPARED = 4


def export_command(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan document.")],
    format_name: Annotated[str, typer.Option("--format", help=", ".join(EXPORTERS) + ".")],
    out: Annotated[Path | None, typer.Option(help="Write to this file; otherwise to standard output.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="This pipeline alone (torch-csv, svg, png).")] = None,
) -> None:
    """Write a plan in another format.

    chrome-trace opens in Perfetto. torch-csv is one pipeline of a fault-free plan for
    torch.distributed.pipelining: a cell per slot where every op fills whole slots, otherwise each
    stage's ops in order of start.
    """
    chosen = format_named(format_name)
    if out is None and chosen.name == "png" and sys.stdout.isatty():
        raise InputError("--out", None, "a file, since png is no text for a terminal")
    check_out(out)
    write_out(out, chosen.render(_valid_plan(path), pipeline=pipeline))


def compare_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PLAN.json...", help=f"2 to {MAX_COMPARED} plans.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Show plans side by side; changes are against the first one."""
    if not 2 <= len(paths) <= MAX_COMPARED:
        raise InputError("PLAN.json", len(paths), f"2 to {MAX_COMPARED} plans")
    rows = compare([_valid_plan(path) for path in paths])
    if as_json:
        values = {row.key: row.values for row in rows}
        write_out(None, (json.dumps({"plans": [str(path) for path in paths], **values}) + "\n").encode())
        return
    console().print(_table(_short_names(paths), rows))


def _valid_plan(path: Path) -> Plan:
    """Load a plan. Raises PlanError for a file that is no plan, and for a plan that planner.check finds invalid, whose
    picture and numbers would mean nothing."""
    plan = Plan.load(path)
    violations = find_violations(plan)
    if violations:
        more = f" (and {more}; see the check command)" if (more := further(violations)) else ""
        raise PlanError(f"{path} is not a valid plan: {violations[0]}{more}")
    return plan


def _short_names(paths: list[Path]) -> list[str]:
    """Return the file names, or whole paths where two names are equal."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _table(names: list[str], rows: tuple[ComparisonRow, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), caption_justify="left")
    table.caption = "Changes, and ops that moved, are against the first plan."
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    for row in rows:
        table.add_row(row.label, *(Text(row.shown(i)) for i in range(len(names))))
    return table


# -- `openrecycle simulate` ---------------------------------------------------------------------

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
    # Options that this simulation does not use are checked too: a wrong one is a mistake.
    check_spares(spares)
    check_sizes(samples, layers_per_stage, least_stages, unit_seconds)
    charges, of, limit = RecoveryCosts.parse(cost), Technique.of(technique), MemoryLimit.parse(memory)
    _domain("--repair", Domain(1, 1.0, repair, shape))
    if not 0 < hours <= MAX_HOURS:
        raise InputError("--hours", hours, f"a number above 0, at most {MAX_HOURS}")
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
        cutting = [name for name in names if name in CUT_ANEW]
        if catalog is None or cutting:
            even = evened(
                job, technique=of if of.reroutes else Technique.STAGGERED, memory=limit, layers=layers_per_stage
            )
            if catalog is not None and even is not job:  # its plans are for another partition
                what = (
                    f"none with {' or '.join(cutting)}: its plans are for the stages as they are given, and what these "
                    "policies gain would be a better partition, which the job could begin with"
                )
                raise InputError("--catalog", str(catalog), what)
            job = even
        planned = PlannedJob(
            job,
            samples=float(job.pipelines * job.micro_batches) if samples is None else samples,
            technique=of,
            memory=limit,
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
        own = [] if value is None else [_domain("--mtbf", Domain(1, value, repair, shape))]
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
    """Make the job from the profile, with the given sizes in place of its own; else from the sizes, or else from a
    model's shape."""
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
    out = [] if host_mtbf is None else [_domain("--host-mtbf", Domain(HOST, host_mtbf, repair))]
    for option, text in (("--rack", rack), ("--switch", switch)):
        if text is None:
            continue
        size, _, mean = text.partition(":")
        mtbf = number_of(mean)
        if not re.fullmatch("[0-9]{1,9}", size) or mtbf is None:
            raise InputError(option, text, "WORKERS:MTBF, such as 32:5000")
        out.append(_domain(option, Domain(int(size), mtbf, repair)))
    return out


def _domain(option: str, domain: Domain) -> Domain:
    """Check the domain of an option. Raises InputError."""
    try:
        domain.check("")
    except InputError as error:
        name = error.field.strip()
        raise InputError(f"--{name}" if name in ("repair", "shape") else option, error.value, error.expected) from None
    return domain


def _refuse(where: str, options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value is not None and value is not False and value != []:
            got = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            raise InputError(option, got, f"nothing {where}")


# -- what is printed ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Show:
    """How to print. dollars: price per worker and hour; None where it is not known."""

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


# -- `python -m planner` ------------------------------------------------------------------------

SHOWN_VIOLATIONS = 20

app = typer.Typer(
    name="planner",
    help="Plan pipeline-parallel training around failed workers, and check such plans.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("migrations")(migrations_command)
app.command("catalog")(catalog_command)
app.command("export")(export_command)
app.command("compare")(compare_command)
app.command("simulate")(simulate_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every refusal is one sentence and exit status 2."""
    run(app, arguments)


@app.command()
def plan(
    pipelines: Pipelines = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    fail: Failed = None,
    technique: Annotated[
        str | None, typer.Option(help="fault-free, adaptive, decoupled or staggered (which is the default).")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="A fault-free schedule as published: 1f1b, gpipe, zb-h1 or zb-h2.")
    ] = None,
    memory: Annotated[str | None, MEMORY] = None,
    durations: Durations = None,
    layers: Layers = None,
    partition: PartitionOption = None,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="With --partition auto: workers may change their stage, too.")
    ] = False,
    profile: Profile = None,
    solver: Annotated[str, typer.Option(help="auto, list, cp-sat or milp.")] = "auto",
    time_limit: Annotated[float, typer.Option(help="Seconds at most.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="Write the plan document here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan document.")] = False,
) -> None:
    """Make a plan. Ctrl-C keeps the best one found so far."""
    if layers is not None and partition is None:
        partition = AUTO
    if migrate and partition != AUTO:
        raise InputError("--migrate", True, "--partition auto beside it")
    check_effort(solver, time_limit)
    job = job_of_options(pipelines, stages, micro_batches, durations, profile, layers, partition, moved=True)
    dead = failed_workers(fail, job)
    layout = None
    if reference is not None:
        given = {"--fail": fail, "--memory": memory, "--migrate": migrate}
        _refuse("beside --reference: it is fault-free and holds what it holds", given)
        if technique not in (None, Technique.FAULT_FREE.value):
            raise InputError("--technique", technique, "fault-free beside --reference")
    else:
        of = Technique.of("staggered" if technique is None else technique)
        limit = MemoryLimit.parse("uniform" if memory is None else memory)
        if partition == AUTO:
            layout = _laid_out(job, dead, of, limit, migrate=migrate)
        problem = Problem(job, dead, of, limit) if layout is None else layout.problem
    check_out(out)  # before time is spent on solving
    if reference is not None:
        made = reference_plan(job, reference)
    else:
        with interruptible() as stop, _progress(job, quiet=as_json) as report:
            made = make_plan(
                problem,
                solver=solver,
                time_limit=time_limit,
                on_progress=report,
                cancelled=lambda: bool(stop),
                layout=layout,
            )
    document = (checked(made).to_json() + "\n").encode()
    if out is not None and is_stdout(out):
        as_json = True
    elif out is not None:
        write_out(out, document)
    if as_json:
        write_out(None, document)
        return
    shown = console()
    for line in [*_summary(made), *_moves(layout)]:
        shown.print(line, markup=False, soft_wrap=True)
    if out is not None:
        shown.print(f"written to {out}", markup=False, soft_wrap=True)
        return
    shown.print()
    for text in gantt_lines(made.schedule(), width=Console().width):
        shown.print(text, soft_wrap=True)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json")],
    as_json: AsJson = False,
) -> None:
    """Say whether a plan is valid.

    Exit status: 0 valid, 1 invalid (what clashes is named), 2 not a plan (the field is named).
    """
    loaded = Plan.load(path)
    violations = find_violations(loaded)
    if as_json:
        found = [{"rule": v.rule, "sentence": v.sentence, "ops": [str(op) for op in v.ops]} for v in violations]
        believed = None if violations else claim(loaded)
        sys.stdout.write(json.dumps({"valid": not violations, "violations": found, "claim": believed}) + "\n")
    elif violations:
        for violation in violations[:SHOWN_VIOLATIONS]:
            print(f"{path}: {violation}")
        if len(violations) > SHOWN_VIOLATIONS:
            print(f"{path}: and {len(violations) - SHOWN_VIOLATIONS} more")
    else:
        print(f"{path} is valid")
        print("\n".join(filter(None, [*_summary(loaded), claim(loaded)])))
    raise typer.Exit(1 if violations else 0)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the plan document."""
    sys.stdout.write(json.dumps(Plan.model_json_schema(), indent=2, sort_keys=True) + "\n")


def _laid_out(job: Job, dead: frozenset[Worker], technique: Technique, memory: MemoryLimit, *, migrate: bool) -> Layout:
    at_home = best_at_home(job, technique, memory)
    over: Over = "layouts" if migrate else "partitions"
    return lay_out(at_home, dead, technique=technique, memory=memory, over=over)


def _moves(layout: Layout | None) -> list[str]:
    """Say which layers and workers have to move for a plan."""
    if layout is None or not layout.problem.job.layers:
        return []
    moved = layers_move(layout.moved) if layout.moved else ""
    return [line for line in (moved, *map(str, layout.migrations)) if line]


_BOUND_OVER = {
    "schedules": "",
    "partitions": " over every partition of the layers",
    "layouts": " over every partition and every number of workers per stage",
}


def _summary(made: Plan) -> list[str]:
    m, job = made.metrics, made.job
    failed = ", ".join(made.failed[:8]) + (f" and {len(made.failed) - 8} more" if len(made.failed) > 8 else "")
    unit = plural(job.time_unit)
    proof = "optimal" if made.solver.status == "optimal" else f"gap {m.gap:.2%}"
    lines = [
        f"{job.pipelines} pipelines x {job.stages} stages x {job.micro_batches} micro-batches, "
        f"failed: {failed or 'none'}",
        f"technique {made.technique.value}, memory {made.memory}, "
        f"most activations on a worker {max(m.peak_activations.values())}",
        f"period {m.period} {unit}, lower bound {m.lower_bound}{_BOUND_OVER[m.bound_over]} ({proof}), "
        f"makespan {m.makespan}",
        f"slowdown {m.slowdown_vs_1f1b:+.1%} against fault-free 1F1B, "
        f"{m.slowdown_vs_best:+.1%} against the best fault-free plan",
        f"bubbles {m.bubble_fraction:.1%}; solver {made.solver.name}, {made.solver.seconds:.2f} s; "
        f"fingerprint {made.fingerprint}",
    ]
    if made.partition:
        lines.insert(1, f"layers per stage {','.join(map(str, made.partition))}")
    return [*lines, made.solver.message] if made.solver.message else lines


@contextmanager
def _progress(job: Job, *, quiet: bool) -> Iterator[Any]:
    """Show the best period and the bound in one line while solving; nothing where there is no terminal."""
    if quiet or not err.is_terminal:
        yield None
        return
    with err.status("planning") as status:

        def report(progress: SolverProgress) -> None:
            best = "none yet" if progress.incumbent is None else job.units(progress.incumbent)
            status.update(
                f"{progress.solver}: period {best}, bound {job.units(progress.bound)}, {progress.elapsed:.1f} s"
            )

        yield report


MAX_ROWS = 48
_STYLE = {"F": "blue", "I": "green", "W": "yellow", "B": "cyan", "O": "magenta", ".": "dim"}


def gantt_lines(schedule: Schedule, *, width: int) -> Iterator[Text]:
    """Yield one line per worker (at most MAX_ROWS), then the legend.

    A column shows the op that runs in the middle of its slice; small letters are re-routed
    micro-batches, a dot is a bubble. width: columns of the terminal.
    """
    names = max(len(str(worker)) for worker in schedule.ops) + 1
    end = max(ops[-1].end for ops in schedule.ops.values())
    columns = min(end, max(20, width - names - 1))
    for worker, ops in sorted(schedule.ops.items())[:MAX_ROWS]:
        line = Text(f"{worker!s:<{names}}")
        at = 0
        for column in range(columns):
            middle = (2 * column + 1) * end / (2 * columns)
            while at < len(ops) and ops[at].end <= middle:
                at += 1
            kind = ops[at].kind if at < len(ops) and ops[at].start <= middle else "."
            rerouted = kind != "." and ops[at].rerouted
            line.append(kind.lower() if rerouted else kind, _STYLE[kind] + (" reverse" if rerouted else ""))
        yield line
    if len(schedule.ops) > MAX_ROWS:
        yield Text(f"... and {len(schedule.ops) - MAX_ROWS} more workers", "dim")
    slice_of = schedule.problem.job.units(end / columns)
    unit = schedule.problem.job.time_unit
    if unit == "ms" and slice_of >= 1000:
        slice_of, unit = slice_of / 1000, "s"
    unit = unit if slice_of == 1 else plural(unit)
    yield Text(f"one column is {slice_of:.3g} {unit}; small letters: re-routed micro-batches; dots: bubbles", "dim")
