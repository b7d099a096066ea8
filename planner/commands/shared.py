"""What several commands of `python -m planner` share: the job of the options, and Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.failures import parse_failed
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker, parse_durations
from openrecycle.planner.jobs.profile import AUTO, parse_partition
from openrecycle.planner.layers.partition import lay_out
from openrecycle.planner.plans.plan import JobDoc
from openrecycle.planner.profiles import job_on, load

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

# What is not the result: progress, and what Ctrl-C does.
err = Console(stderr=True, highlight=False, soft_wrap=True)


def job_of_options(
    pipelines: int | None,
    stages: int | None,
    micro_batches: int | None,
    durations: str | None,
    profile: Path | None,
    layers: int | None = None,
    partition: str | None = None,
) -> Job:
    """The job that `--profile`, or the sizes, `--layers` and `--durations`, describe. Raises InputError.

    A measured profile (by its file, or a shipped one by its name) takes other sizes too. With a partition its layers
    are those that were measured. `auto` leaves the job at the partition that spreads work most evenly.
    """
    sizes = {"--pipelines": pipelines, "--stages": stages, "--micro-batches": micro_batches, "--durations": durations}
    if profile is not None:
        document = load(profile)
        if layers is not None:
            raise InputError("--layers", layers, "nothing, since --profile FILE says it")
        for option, value in sizes.items():
            if value is not None and (isinstance(document, JobDoc) or option == "--durations"):
                raise InputError(option, value, "nothing, since --profile FILE says it")
        return _cut(job_on(document, pipelines, stages, micro_batches, by_layers=partition is not None), partition)
    for option, value in sizes.items():
        if value is None and option != "--durations":
            raise InputError(option, None, "a whole number of at least 1 (or --profile FILE)")
    assert pipelines is not None and stages is not None and micro_batches is not None
    if layers is not None and layers < 1:
        raise InputError("--layers", layers, "a whole number of at least 1")
    times = parse_durations(durations or "")
    return _cut(Job.uniform(pipelines, stages, micro_batches, durations=times, layers=layers or 0), partition)


def _cut(job: Job, partition: str | None) -> Job:
    """As `--partition` says."""
    counts = () if partition is None or partition == AUTO else parse_partition(partition, field="--partition")
    if partition is not None and not job.layers:
        raise InputError("--partition", partition, "--layers beside it, or a profile by layers")
    if partition is None or partition == AUTO:
        return job
    given = job.check_partition(counts, field="--partition")
    return replace(job, partition=given, home=given, profiles=(), transfers=(), backward_transfers=())


def best_at_home(job: Job, technique: Technique, memory: MemoryLimit) -> Job:
    """With the partition that is best without failures: what they move layers from, and are compared with."""
    home = lay_out(job, technique=technique, memory=memory).partition
    return replace(job, partition=home, home=home, profiles=(), transfers=(), backward_transfers=())


def failed_workers(given: list[str] | None, job: Job) -> frozenset[Worker]:
    """Of `--fail`, which may be repeated or list several. Raises InputError."""
    return parse_failed((name for text in given or [] for name in text.split(",")), job)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C only marks the list that is yielded; the second one ends the program."""
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
