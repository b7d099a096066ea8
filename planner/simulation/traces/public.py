"""The public traces that come with the product."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from openrecycle.planner.errors import InputError
from openrecycle.planner.simulation.trace import Trace
from openrecycle.planner.simulation.traces import parse_trace


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
