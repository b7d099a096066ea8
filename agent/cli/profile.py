"""`openrecycle profile`: measure a model on this machine and write what the planner reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from openrecycle.agent.cli.shared import import_from_here, json_object, refuse, sentences, with_flags
from openrecycle.agent.config.options import Optimization, Planning, TrainingOptions, parse_bytes
from openrecycle.agent.config.settings import build, leaves
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.output import check_out, is_stdout, write_out
from openrecycle.planner.profiles import Clock, Profile

MODELS_HELP = "gpt-3-medium, gpt-3-3.35b or gpt-3-6.7b: one layer, the embedding and the head are measured."
MAX_REPEATS = 1000


TRAINED_WITH = ("optimization.mode", "optimization.autocast", "planning.capacity")
"""Options of `train` that a profile is measured with."""


@with_flags(leaf for leaf in leaves(TrainingOptions) if leaf.path in TRAINED_WITH)
def profile_command(
    out: Annotated[Path, typer.Option(help="JSON file to write; `openrecycle plan --profile` reads it.")],
    model: Annotated[str | None, typer.Option(help=MODELS_HELP)] = None,
    workload: Annotated[
        str | None, typer.Option(help="module:factory, as for train: each of its layers is measured.")
    ] = None,
    workload_options: Annotated[str, typer.Option(help="JSON object with the factory's arguments.")] = "{}",
    pipelines: Annotated[int, typer.Option(help="Of the job; reductions are measured among up to this many.")] = 2,
    stages: Annotated[int, typer.Option(help="Stages of the job.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per pipeline and iteration.")] = 8,
    batch: Annotated[int, typer.Option(help="Samples per micro-batch, with --model.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 10,
    warm_up: Annotated[int, typer.Option(help="Rounds before them that don't count.")] = 2,
    threads: Annotated[int, typer.Option(help="Of torch; workers train with 1.")] = 1,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: processor time, where other programs disturb the machine.")
    ] = "wall",
    spread_limit: Annotated[float, typer.Option(help="Largest (p90 - p10) / median that is accepted.")] = 0.25,
    allow_spread: Annotated[bool, typer.Option(help="Write the profile however much the times vary.")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Measure op times, steps, memory, transfers and reductions of a model on this machine."""
    with sentences():
        Job.uniform(pipelines, stages, micro_batches)
        check_out(out)
        if (model is None) == (workload is None):
            got = "neither" if model is None else "both"
            raise InputError("--model, --workload", got, "one of the two")
        for option, value, least, most in (
            ("--batch", batch, 1, 1 << 20),
            ("--repeats", repeats, 1, MAX_REPEATS),
            ("--warm-up", warm_up, 0, MAX_REPEATS),
            ("--threads", threads, 1, os.cpu_count() or 1),
        ):
            if not least <= value <= most:
                raise InputError(option, value, f"a whole number from {least} to {most}")
        if clock not in get_args(Clock):
            raise InputError("--clock", clock, "wall or cpu")
        # Written so that NaN fails it too.
        if not spread_limit >= 0:
            raise InputError("--spread-limit", spread_limit, "a number of at least 0")
        optimization: Optimization = build(Optimization, given, "optimization.")
        capacity = build(Planning, given, "planning.").capacity
        capacity_bytes = 0 if capacity is None else parse_bytes(capacity)
        options = json_object(workload_options)
        import_from_here()

        # Only now: importing torch takes seconds, and bad input should not have to wait for it.
        import torch

        from openrecycle.agent.profiling import job as profile_job
        from openrecycle.agent.profiling import profiler

        torch.set_num_threads(threads)
        effort = profiler.ProfilingEffort(repeats, warm_up, clock)  # type: ignore[arg-type]
        grid = (pipelines, stages, micro_batches)
        try:
            if model is not None:
                measured = profile_job.measure_model(model, batch, grid, optimization, effort, _say)
            else:
                measured = profile_job.measure_workload(workload or "", options, grid, optimization, effort, _say)
        except profile_job.MeasuringError as error:
            refuse(str(error))
        made = measured.model_copy(update={"capacity_bytes": capacity_bytes}).profile(*grid)
        if made.spread > spread_limit and not allow_spread:
            worst = max(made.parts, key=lambda part: part.spread)
            raise InputError(
                "--spread-limit",
                spread_limit,
                f"times that vary less: those of {worst.name} vary by {made.spread:.0%} (p10 to p90, of the median). "
                "Measure on a quiet machine, with more --repeats or --clock cpu; or write it with --allow-spread",
            )
        write_out(out, (made.model_dump_json(indent=1) + "\n").encode())
    for line in _summary(made):
        typer.echo(line, err=is_stdout(out))
    typer.echo(f"written to {out}", err=is_stdout(out))


def _say(sentence: str) -> None:
    typer.echo(sentence, err=True)


def _summary(made: Profile) -> list[str]:
    """What was measured, for the terminal."""
    lines = [f"{made.model} on {made.hardware.processor}, {made.hardware.threads} threads, {made.hardware.clock} clock"]
    for part in made.parts:
        lines.append(
            f"{part.name:>10}: F {part.forward.median:.3f}  I {part.input_backward.median:.3f}  "
            f"W {part.weight_backward.median:.3f}  step {part.step.median:.3f} ms (spread {part.spread:.0%}); "
            f"holds {part.activation_bytes / 2**20:.1f} MiB until I, {part.weight_backward_bytes / 2**20:.1f} until W"
        )
    if made.transfers:
        lines.append("transfers: " + ", ".join(f"{t.median:.3f} ms" for t in made.transfers))
    if made.reductions is not None:
        times = ", ".join(f"{t.median:.3f} ms among {n}" for n, t in enumerate(made.reductions.by_peers, start=2))
        lines.append(f"reductions of {made.reductions.bytes / 2**20:.1f} MiB: {times}")
    return lines
