"""What several commands of `python -m planner` share: the job of the options, and Ctrl-C."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pydantic import ValidationError
from rich.console import Console

from planner.errors import InputError
from planner.job import Job, parse_durations
from planner.plan import JobDoc, PlanError, first_problem
from planner.profiles import Profile, load_profile, shipped

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
        measured = _measured(profile)
        for option, value in sizes.items():
            if value is not None and (measured is None or option == "--durations"):
                raise InputError(option, value, "nothing, since --profile FILE says it")
        if measured is None:
            return _read_job(profile)
        own = measured.job
        given = (pipelines, stages, micro_batches)
        wanted = (own.pipelines, own.stages, own.micro_batches)
        return measured.job_for(*(w if g is None else g for g, w in zip(given, wanted, strict=True)))
    for option, value in sizes.items():
        if value is None and option != "--durations":
            raise InputError(option, None, "a whole number of at least 1 (or --profile FILE)")
    assert pipelines is not None and stages is not None and micro_batches is not None
    return Job.uniform(pipelines, stages, micro_batches, durations=parse_durations(durations or ""))


def _measured(path: Path) -> Profile | None:
    """None for the document of a job."""
    if str(path) in shipped():
        return load_profile(path)
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        named = f"; profiles by name: {', '.join(shipped())}" if not path.suffix else ""
        raise PlanError(f"{path} can't be read: {error.strerror or error}{named}") from None
    except ValueError:
        return None  # what is wrong with it is said where the job is read
    return load_profile(path) if isinstance(document, dict) and "profile_version" in document else None


def _read_job(path: Path) -> Job:
    try:
        return JobDoc.model_validate_json(path.read_bytes()).job()
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise PlanError(f"{path} is not a job document: {first_problem(error)}") from None


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
