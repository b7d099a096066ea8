"""What the agent's commands share: errors as sentences, and options that are read from text."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from openrecycle.agent.config.options import FLAGS, GRID
from openrecycle.agent.config.settings import Leaf, spelled, without_none
from openrecycle.agent.messages.client import ConsoleRefused, ConsoleUnavailable
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.plans.plan import read_json, read_whole


def import_from_here() -> None:
    """Has modules found in the current folder, where people keep what they train: as `python -m` does, and an installed
    script does not. They come last, so that a file there stands for no package."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path and not sys.flags.safe_path:
        sys.path.append(here)


def flags_of(leaves: Iterable[Leaf]) -> dict[str, inspect.Parameter]:
    """What typer makes a command's options of, by the option's path."""
    out = {}
    for leaf in leaves:
        about = leaf.field.metadata
        if leaf.flag is None:
            continue
        kinds = without_none(leaf.annotation)
        many = get_origin(kinds[0]) is Sequence
        kind: Any = next((k for k in (bool, str, float, int) if k in kinds), str)
        declared = f"{leaf.flag}/--no-{leaf.flag[2:]}" if kind is bool else leaf.flag
        panel = leaf.path.partition(".")[0].title() if "." in leaf.path else None
        shown = typer.Option(declared, help=about["help"], envvar=about["env"], rich_help_panel=panel)
        default = None if many else leaf.default
        annotation: Any = list[str] | None if many else (kind | None if default is None else kind)
        out[leaf.path] = inspect.Parameter(
            leaf.path.replace(".", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=str(default) if kind is str and default is not None else default,
            annotation=Annotated[annotation, shown],
        )
    return out


def with_flags(leaves: Iterable[Leaf]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command, beside its own options, those of `leaves`: it gets them as `given`, by their paths."""
    added = flags_of(leaves)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            given = {path: arguments.pop(parameter.name) for path, parameter in added.items()}
            command(**arguments, given={path: value for path, value in given.items() if value is not None})

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + list(added.values())
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # typer would look there
        return run

    return decorate


@contextmanager
def sentences() -> Iterator[None]:
    """Turns every expected error into one sentence, with the options as the command line has them, and exit code 2."""
    try:
        with spelled({**FLAGS, **GRID, "profile": "--profile"}):
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


def json_object(text: str) -> dict[str, Any]:
    """Raises InputError unless `text` is a JSON object."""
    try:
        value = read_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError("--workload-options", text, 'a JSON object such as {"width": 128}')
    return value


def read_token(path: Path | None) -> str | None:
    """The console's token from a file, else from OPENRECYCLE_TOKEN. Raises InputError."""
    if path is None:
        return os.environ.get("OPENRECYCLE_TOKEN") or None
    try:
        return read_whole(path).decode().strip()
    except OSError as error:
        raise InputError("--token-file", str(path), f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError("--token-file", str(path), "a text file") from None
