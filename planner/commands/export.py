"""`openrecycle export` and `compare`: plans in other formats, and side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from openrecycle.planner.check import check, further
from openrecycle.planner.commands.output import check_out, console, write_out
from openrecycle.planner.export import EXPORTERS, format_named
from openrecycle.planner.export.compare import ComparisonRow, compare
from openrecycle.planner.export.yaml_document import parse_yaml
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.files import PLAN_BYTES, read_whole
from openrecycle.planner.plans.plan import Plan, PlanError

MAX_COMPARED = 4


def export_command(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan document, JSON or YAML.")],
    format_name: Annotated[str, typer.Option("--format", help=", ".join(EXPORTERS) + ".")],
    out: Annotated[Path | None, typer.Option(help="Write to this file; otherwise to standard output.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="This pipeline alone (torch-csv, svg, png).")] = None,
) -> None:
    """Write a plan in another format.

    chrome-trace opens in Perfetto. torch-csv is one pipeline of a fault-free plan for
    torch.distributed.pipelining: a cell per slot where every op fills whole slots, otherwise each
    stage's ops in order of start.
    """
    chosen = format_named(format_name)
    if out is None and chosen.name == "png" and sys.stdout.isatty():
        raise InputError("--out", None, "a file, since png is no text for a terminal")
    check_out(out)
    write_out(out, chosen.render(_valid_plan(path), pipeline=pipeline))


def compare_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PLAN.json...", help=f"2 to {MAX_COMPARED} plans.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Show plans side by side; changes are against the first one."""
    if not 2 <= len(paths) <= MAX_COMPARED:
        raise InputError("PLAN.json", len(paths), f"2 to {MAX_COMPARED} plans")
    rows = compare([_valid_plan(path) for path in paths])
    if as_json:
        values = {row.key: row.values for row in rows}
        write_out(None, (json.dumps({"plans": [str(path) for path in paths], **values}) + "\n").encode())
        return
    console().print(_table(_short_names(paths), rows))


def _valid_plan(path: Path) -> Plan:
    """Raises PlanError for a file that is no plan, and for one that planner.check finds invalid: its
    picture and its numbers would mean nothing."""
    if path.suffix.lower() in (".yaml", ".yml"):
        try:
            plan = parse_yaml(read_whole(path, most=PLAN_BYTES), source=str(path))
        except OSError as error:
            raise PlanError(f"{path} can't be read: {error.strerror or error}") from None
    else:
        plan = Plan.load(path)
    violations = check(plan)
    if violations:
        more = f" (and {more}; see the check command)" if (more := further(violations)) else ""
        raise PlanError(f"{path} is not a valid plan: {violations[0]}{more}")
    return plan


def _short_names(paths: list[Path]) -> list[str]:
    """File names, or whole paths where two are alike."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _table(names: list[str], rows: tuple[ComparisonRow, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), caption_justify="left")
    table.caption = "Changes, and ops that moved, are against the first plan."
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    for row in rows:
        table.add_row(row.label, *(Text(row.shown(i)) for i in range(len(names))))
    return table
