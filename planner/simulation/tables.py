"""Measured throughput by node count, and the constants of what a failure costs: the two input tables.

    system,model,nodes,samples_per_second
    system,model,samples_per_iteration,failure_pause_s,checkpoint_save_s,checkpoint_every_iterations,notes

The form is that of the Oobleck artefact's tables.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from openrecycle.planner.jobs.errors import InputError

THROUGHPUT = ("system", "model", "nodes", "samples_per_second")
COSTS = (
    "system",
    "model",
    "samples_per_iteration",
    "failure_pause_s",
    "checkpoint_save_s",
    "checkpoint_every_iterations",
)
RESTARTS = ("system", "model", "nodes", "restart_s")
DATA = Path(__file__).parent / "data"
MOST_SECONDS = 1e7


@dataclass(frozen=True)
class NodeTable:
    """A number by node count. Beyond the counts that it has, that of the nearest one holds."""

    by_nodes: Mapping[int, float]

    def at(self, nodes: int) -> float:
        return self.by_nodes[min(max(nodes, min(self.by_nodes)), max(self.by_nodes))]

    @property
    def best(self) -> float:
        """At the most nodes."""
        return self.by_nodes[max(self.by_nodes)]


@dataclass(frozen=True)
class Costs:
    """samples: per iteration. pause: seconds per failure by node count; None: out of memory, never run.

    checkpoint: seconds to save one; every: iterations between two.
    """

    samples: float
    pause: NodeTable | None
    checkpoint: float | None
    every: int | None


def read_throughput(path: Path, system: str, model: str) -> NodeTable:
    """Samples per second of one system and model; 0 where it runs out of memory. Raises InputError."""
    return _by_nodes(path, THROUGHPUT, system, model)


def read_costs(path: Path, system: str, model: str) -> Costs:
    """The row of one system and model. Raises InputError.

    A pause that is a range, 49.1-112, depends on the node count; which count has which is in
    data/oobleck/restart-by-node-count.csv for the systems where it is known.
    """
    for where, row in _rows(path, COSTS):
        if (row["system"], row["model"]) != (system, model):
            continue
        every = _number(row, "checkpoint_every_iterations", where, least=1)
        if every is not None and every != int(every):
            raise InputError(f"{where} checkpoint_every_iterations", every, "a whole number of at least 1")
        samples = _number(row, "samples_per_iteration", where)
        if not samples:
            raise InputError(f"{where} samples_per_iteration", row["samples_per_iteration"], "a number above 0")
        return Costs(
            samples=samples,
            pause=_pause(row, where, system, model),
            checkpoint=_number(row, "checkpoint_save_s", where),
            every=None if every is None else int(every),
        )
    raise InputError(str(path), f"no row for {system}, {model}", _known(path, COSTS, system))


def _pause(row: dict[str, str], where: str, system: str, model: str) -> NodeTable | None:
    text = row["failure_pause_s"]
    low, dash, high = text.partition("-")
    if not (dash and low and high):
        seconds = _number(row, "failure_pause_s", where)
        return None if seconds is None else NodeTable({1: seconds})
    bounds = [_number({"failure_pause_s": part}, "failure_pause_s", where) for part in (low, high)]
    try:
        table = _by_nodes(DATA / "oobleck" / "restart-by-node-count.csv", RESTARTS, system, model)
    except InputError:
        raise InputError(
            f"{where} failure_pause_s", text, f"one number of seconds: by node count {system}, {model} is not known"
        ) from None
    if bounds != [min(table.by_nodes.values()), max(table.by_nodes.values())]:
        known = f"{min(table.by_nodes.values()):g}-{max(table.by_nodes.values()):g}"
        raise InputError(
            f"{where} failure_pause_s", text, f"{known}, the only range known by node count, or one number"
        )
    return table


def _by_nodes(path: Path, columns: tuple[str, ...], system: str, model: str) -> NodeTable:
    out: dict[int, float] = {}
    for where, row in _rows(path, columns):
        if (row["system"], row["model"]) != (system, model):
            continue
        nodes, value = _number(row, "nodes", where, least=1), _number(row, columns[3], where)
        if nodes is None or nodes != int(nodes):
            raise InputError(f"{where} nodes", row["nodes"], "a whole number of at least 1")
        if value is None:
            raise InputError(f"{where} {columns[3]}", "", "a number")
        if int(nodes) in out:
            raise InputError(f"{where} nodes", int(nodes), f"one row per node count of {system}, {model}")
        out[int(nodes)] = value
    if not out:
        raise InputError(str(path), f"no row for {system}, {model}", _known(path, columns, system))
    return NodeTable(out)


def _rows(path: Path, columns: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    """(file and line, fields) of each row."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or [])]
            if missing:
                raise InputError(f"{path} line 1", ",".join(reader.fieldnames or [])[:120], ",".join(columns))
            out = []
            for row in reader:
                where = f"{path} line {reader.line_num}"
                fields = {column: (row[column] or "").strip() for column in columns}
                if any(row[column] is None for column in columns):
                    raise InputError(where, f"{sum(v is not None for v in row.values())} fields", ",".join(columns))
                out.append((where, fields))
            return out
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "a CSV file that can be read") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), str(error), "a CSV file in UTF-8") from None


def _number(row: dict[str, str], column: str, where: str, *, least: float = 0) -> float | None:
    """None for an empty field. Raises InputError."""
    text = row[column]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= MOST_SECONDS:
        raise InputError(f"{where} {column}", text, f"a number from {least:g} to {MOST_SECONDS:g}")
    return value


def _known(path: Path, columns: tuple[str, ...], system: str) -> str:
    pairs = sorted({(row["system"], row["model"]) for _, row in _rows(path, columns)})
    models = [model for of, model in pairs if of == system]
    if models:
        return f"for {system} one of {', '.join(models)}"
    return "one of the systems " + ", ".join(dict.fromkeys(of for of, _ in pairs))
