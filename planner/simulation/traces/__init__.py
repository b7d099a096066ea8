"""Reading traces: one module per source; `read_trace` tells files apart by what is in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.files import read_whole
from openrecycle.planner.simulation.trace import Trace
from openrecycle.planner.simulation.traces import counts, events, gpu_hours, replay

MAX_BYTES = 64_000_000

Lines = list[tuple[int, str]]  # (line number, text), blank lines left out

# In the order in which they are tried: (does the first line look like it?, reader).
FORMATS: tuple[tuple[Callable[[str], bool], Callable[[str, Lines], Trace]], ...] = (
    (replay.looks_like, replay.read),
    (gpu_hours.looks_like, gpu_hours.read),
    (events.looks_like, events.read),
    (counts.looks_like_dated, counts.read_dated),
    (counts.looks_like_steps, counts.read_steps),
)


def read_trace(path: Path) -> Trace:
    """A trace from a file. Raises InputError naming file, line, value and what was expected."""
    try:
        text = read_whole(path, most=MAX_BYTES).decode()
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "a trace file that can be read") from None
    except UnicodeDecodeError:
        raise InputError(str(path), "bytes that are not UTF-8", "a text file") from None
    return parse_trace(text, name=path.name)


def parse_trace(text: str, *, name: str) -> Trace:
    """The same from text; `name` is what errors and the trace call it."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError(name, "an empty file", "a trace")
    for fits, read in FORMATS:
        if fits(lines[0][1]):
            return read(name, lines)
    raise InputError(
        f"{name} line {lines[0][0]}",
        lines[0][1][:80],
        "`milliseconds,add|remove,node`, `date, time, count`, `seconds,count`, `hours,count`, "
        "`hour:GPUs hour:GPUs ...`, or a JSON array of a replay segment",
    )


@cache
def public_traces() -> dict[str, Trace]:
    """By `folder/name`, such as `recycle/gcp-6h`; sources and licences stand beside the files."""
    out: dict[str, Trace] = {}
    for folder in sorted(files("openrecycle.planner.simulation").joinpath("data").iterdir(), key=lambda f: f.name):
        if not folder.is_dir():
            continue
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            if not file.name.endswith((".csv", ".txt")):
                continue
            try:
                trace = parse_trace(file.read_text(encoding="utf-8"), name=file.name)
            except InputError:
                continue  # a table, not a trace
            out[f"{folder.name}/{file.name.rsplit('.', 1)[0]}"] = trace
    return out
