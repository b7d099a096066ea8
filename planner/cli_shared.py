"""What several commands of `python -m planner` share: the job of the options, and Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from openrecycle.planner.errors import InputError
from openrecycle.planner.job import Job, parse_durations
from openrecycle.planner.plan import JobDoc
from openrecycle.planner.profiles import job_on, load

_err = Console(stderr=True, highlight=False, soft_wrap=True)


def job_of_options(
    pipelines: int | None,
    stages: int | None,
    micro_batches: int | None,
    durations: str | None,
    profile: Path | None,
) -> Job:
    """The job that `--profile`, or the sizes and `--durations`, describe. Raises InputError.

    A measured profile (by its file, or a shipped one by its name) takes other sizes too.
    """
    sizes = {"--pipelines": pipelines, "--stages": stages, "--micro-batches": micro_batches, "--durations": durations}
    if profile is not None:
        document = load(profile)
        for option, value in sizes.items():
            if value is not None and (isinstance(document, JobDoc) or option == "--durations"):
                raise InputError(option, value, "nothing, since --profile FILE says it")
        return job_on(document, pipelines, stages, micro_batches)
    for option, value in sizes.items():
        if value is None and option != "--durations":
            raise InputError(option, None, "a whole number of at least 1 (or --profile FILE)")
    assert pipelines is not None and stages is not None and micro_batches is not None
    return Job.uniform(pipelines, stages, micro_batches, durations=parse_durations(durations or ""))


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C only marks the list that is yielded; the second one ends the program."""
    stop: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(number)
        _err.print("stopping; keeping the best plan so far")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
