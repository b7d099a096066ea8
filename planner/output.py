"""Writes a command's result to the file of `--out` or to standard output. All commands of all rooms use it."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

import typer
from rich.console import Console

from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.words import NUMBER, printable

# -- where a command's result goes --------------------------------------------------------------

_STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
# An empty file can be created even on a full disk, so `check_out` writes this many bytes.
_PAGE = 4096
# Wider than any line: where there is no terminal, tables must not be cut.
_WIDE = 10_000
# The base class of typer's errors about a command line; it has no public name.
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

# The form that a number must have on a command line, by its type.
_PLAIN: dict[Any, tuple[str, re.Pattern[str]]] = {
    int: ("a whole number", re.compile(r"[+-]?[0-9]+")),
    float: ("a number", NUMBER),
}


def is_stdout(path: Path) -> bool:
    """Does `--out` name standard output?"""
    return str(path) in _STDOUT


def destination(path: Path) -> Path:
    """Return the file that will be written: `path`, or what it points at if it is a link. Nothing is written yet.

    Raises InputError for a device, a pipe or a folder, and where the folder is missing or can't be written.
    """
    try:
        target = path.resolve()
        there = target.stat() if target.exists() else None
    except (OSError, RuntimeError) as error:  # a link to itself
        raise InputError("--out", str(path), f"a file that can be written ({error})") from None
    if there is not None and not stat.S_ISREG(there.st_mode):
        expected = "a regular file, or - for standard output; this is a device, pipe or folder"
        raise InputError("--out", str(path), expected)
    if not target.parent.is_dir():
        raise InputError("--out", str(path), "a file in a folder that exists")
    if not os.access(target.parent, os.W_OK):
        raise InputError("--out", str(path), f"a file that can be written ({target.parent} can't)")
    return target


def check_out(path: Path | None) -> None:
    """Check before time is spent on the result whether it can be written, also for a full disk. Raises InputError."""
    if path is not None and not is_stdout(path):
        with _part_of(destination(path), path) as part:
            part.write_bytes(bytes(_PAGE))


@contextmanager
def _part_of(target: Path, path: Path) -> Iterator[Path]:
    """Yield a new file beside `target` to write to. It is removed at the end, unless the block has moved it. path: as
    the user gave it. Raises InputError."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    with writing(path):
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise InputError for an OSError of the block, which writes what `--out` names. path: as the user gave it."""
    try:
        yield
    except OSError as error:
        raise InputError("--out", str(path), f"a file that can be written ({error.strerror or error})") from None


def write_out(path: Path | None, content: bytes) -> None:
    """Write all of it or nothing; to standard output where `path` is None or names it. Raises InputError."""
    if path is None or is_stdout(path):
        try:
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the reader (head, a pager) has closed the pipe
            _no_more()
        return
    target = destination(path)
    with _part_of(target, path) as part:  # it replaces the target once it is complete
        part.write_bytes(content)
        if target.exists():
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        part.replace(target)


def console() -> Console:
    """Make a console for tables on standard output: as wide as the terminal, and without a limit where there is
    none."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_WIDE if wide else None)


def _with_plain_numbers(app: typer.Typer) -> Any:
    """Return the command of `app`, and make it accept plain digits only: pydantic, which reads the numbers, accepts
    1_000, 4.0 and ' 12 ' for whole numbers, and digits of all scripts."""
    command: Any = typer.main.get_command(app)
    waiting = [command]
    while waiting:
        one = waiting.pop()
        waiting += getattr(one, "commands", {}).values()
        for option in one.params:
            annotation = option.type_descriptor.annotation if hasattr(option, "type_descriptor") else None
            kind = next(iter(get_args(annotation)), annotation)
            if kind in _PLAIN:
                option.process_value = partial(_plain, option, option.process_value, *_PLAIN[kind])
    return command


def _plain(
    option: Any, process: Callable[..., Any], expected: str, form: re.Pattern[str], context: Any, given: Any
) -> Any:
    for text in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(text, str) and not form.fullmatch(text):
            raise typer.BadParameter(f"got {text!r}, expected {expected}", context, option)
    return process(context, given)


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (a Typer app) and end the process: 0 done, 2 refused with one sentence. arguments: None: those
    of the process.

    Errors of standard output are also reported in a sentence, except that its reader (head, a pager) has closed it.
    """
    try:
        # For `python -m openrecycle`, click would show the name of a module that does not exist.
        name = sys.argv[0] if sys.argv[0].startswith("openrecycle") else None
        status = _with_plain_numbers(app)(arguments, standalone_mode=False, prog_name=name)
        sys.stdout.flush()
    except PlannerError as error:
        _refuse(str(error))
    except _UsageError as error:
        text = error.format_message()
        if not text or error.__class__.__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        _refuse(" ".join(text.split()))
    except (KeyboardInterrupt, typer.Abort):
        _say("stopped")
        sys.exit(130)
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        _no_more()
        if error.errno == errno.EPIPE:
            sys.exit(0)
        _refuse(f"standard output can't be written: {error.strerror}")
    sys.exit(status if isinstance(status, int) else 0)


def _no_more() -> None:
    """Make sure that nothing more is flushed to standard output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(sentence: str) -> NoReturn:
    _say(f"error: {sentence}")
    sys.exit(2)


def _say(sentence: str) -> None:
    with suppress(OSError):
        print(printable(sentence, keep="\n"), file=sys.stderr, flush=True)
