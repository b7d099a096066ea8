"""What the agent's commands share: errors as sentences, and options that are read from text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from openrecycle.agent.client import ConsoleRefused, ConsoleUnavailable
from openrecycle.planner.errors import InputError, PlannerError
from openrecycle.planner.plan import read_json
from openrecycle.planner.words import printable

# The limits of agent.timeouts, as options; the defaults are those of Timeouts.
FormTimeout = Annotated[float, typer.Option(help="Seconds in which the workers of a generation must have connected.")]
TransferTimeout = Annotated[
    float, typer.Option(help="Seconds to wait for a peer's data; longer than any silence that is borne.")
]
GroupTimeout = Annotated[
    float, typer.Option(help="Seconds to wait for a sum over a stage's workers; longer than for a transfer.")
]
SilenceTimeout = Annotated[
    float, typer.Option(help="Seconds of silence after which a worker process that does not compute is ended.")
]
StartTimeout = Annotated[float, typer.Option(help="Seconds in which a new worker process must have said something.")]
OpTimeout = Annotated[
    float, typer.Option(help="Seconds that an op may always take; beyond, 20 times its longest so far.")
]
FirstOpTimeout = Annotated[
    float, typer.Option(help="Seconds for an op that was not measured yet: it may be compiled first.")
]


@contextmanager
def sentences() -> Iterator[None]:
    """Turns every expected error into one sentence and exit code 2."""
    try:
        yield
    except PlannerError as error:
        refuse(str(error))
    except ConsoleUnavailable as error:
        refuse(f"--console: {error}; start one with `openrecycle serve`")
    except ConsoleRefused as error:
        refuse(f"the console refused the job: {error}")


def refuse(sentence: str) -> None:
    typer.echo(printable(f"error: {sentence}", keep="\n"), err=True)
    raise typer.Exit(2)


def json_object(text: str, *, field: str = "--workload-options") -> dict[str, Any]:
    """Raises InputError unless `text` is a JSON object."""
    try:
        value = read_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(field, text, 'a JSON object such as {"width": 128}')
    return value


def read_token(path: Path | None) -> str | None:
    """The console's token from a file, else from OPENRECYCLE_TOKEN. Raises InputError."""
    if path is None:
        return os.environ.get("OPENRECYCLE_TOKEN") or None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise InputError("--token-file", str(path), f"a readable file ({error.strerror})") from None
