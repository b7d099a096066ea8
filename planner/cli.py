"""`python -m planner`: plans from the command line.

Exit status: 0 done; 1 a checked plan is invalid; 2 the input is not acceptable or unreadable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from openrecycle.planner.check import check as find_violations
from openrecycle.planner.check import checked, claim
from openrecycle.planner.commands.catalog import catalog_command, migrations_command
from openrecycle.planner.commands.export import compare_command, export_command
from openrecycle.planner.commands.output import check_out, console, is_stdout, run, write_out
from openrecycle.planner.commands.shared import (
    MEMORY,
    AsJson,
    Durations,
    Failed,
    Layers,
    MicroBatches,
    PartitionOption,
    Pipelines,
    Profile,
    Stages,
    best_at_home,
    err,
    failed_workers,
    interruptible,
    job_of_options,
)
from openrecycle.planner.commands.simulate import simulate_command
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Over, Problem, Technique, Worker
from openrecycle.planner.jobs.profile import AUTO
from openrecycle.planner.jobs.words import layers_move, plural
from openrecycle.planner.layers.partition import Layout, lay_out
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import SolverProgress
from openrecycle.planner.solvers.portfolio import make_plan, reference_plan

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


def main() -> None:
    """Runs the command line; every refusal is one sentence and exit status 2."""
    run(app)


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
    job = job_of_options(pipelines, stages, micro_batches, durations, profile, layers, partition)
    dead = failed_workers(fail, job)
    layout = None
    if reference is not None:
        _refuse_beside_reference({"--fail": fail, "--memory": memory, "--migrate": migrate or None})
        if technique not in (None, Technique.FAULT_FREE.value):
            raise InputError("--technique", technique, "fault-free beside --reference")
    else:
        of = Technique.of(technique or "staggered")
        limit = MemoryLimit.parse("uniform" if memory is None else memory)
        if partition == AUTO:
            layout = _laid_out(job, dead, of, limit, migrate=migrate)
        problem = Problem(job, dead, of, limit) if layout is None else layout.problem
    check_out(out)  # said before time is spent on solving
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
    """Say whether a plan is valid: 0 valid, 1 invalid (what clashes is named), 2 unreadable."""
    loaded = Plan.load(path)
    violations = find_violations(loaded)
    if as_json:
        found = [{"sentence": v.sentence, "ops": [str(op) for op in v.ops]} for v in violations]
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


def _refuse_beside_reference(options: dict[str, object]) -> None:
    for option, value in options.items():
        if value:
            raise InputError(option, value, "nothing beside --reference: it is fault-free and holds what it holds")


def _laid_out(job: Job, dead: frozenset[Worker], technique: Technique, memory: MemoryLimit, *, migrate: bool) -> Layout:
    at_home = best_at_home(job, technique, memory)
    over: Over = "layouts" if migrate else "partitions"
    return lay_out(at_home, dead, technique=technique, memory=memory, over=over)


def _moves(layout: Layout | None) -> list[str]:
    """What has to move for a plan."""
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
    """A line that shows the best period and the bound while solving; nothing off a terminal."""
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
    """One line per worker (at most MAX_ROWS), then the key.

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
    unit = unit if slice_of == 1 else plural(unit)
    yield Text(f"one column is {slice_of:.3g} {unit}; small letters: re-routed micro-batches; dots: bubbles", "dim")
