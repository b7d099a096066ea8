"""Plans on their way between processes and into the database: large ones in columns, and the document beside them.

A process that has a plan of 8,192 workers made reads one kilobyte of columns in milliseconds; its document of 16 MB
takes a second, in which nothing else of that process runs. So whoever makes a plan also writes its document, and the
others hand that on as it is, deflated.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import NamedTuple

from planner.check import check
from planner.check_columns import check_columns
from planner.columnar import ColumnarPlan, pack, unpack
from planner.errors import PlannerError
from planner.plan import Plan, PlanError
from planner.plan_columns import Columns, NotColumnar
from planner.solvers.base import Solution
from planner.solvers.portfolio import metrics_of, plan_of, solver_of

# Documents of fewer ops are read in ten milliseconds.
SMALL_OPS = 3_000
_COLUMNS, _DOCUMENT = b"C", b"D"
# As small as by the usual 6, in half the time.
_LEVEL = 5


class Packed(NamedTuple):
    """A plan to be stored. columns: as planner.columnar.pack makes them. document: its JSON, deflated."""

    columns: bytes
    document: bytes


def checked(plan: Plan) -> Plan:
    """The plan, which breaks no rule. Raises PlannerError: whoever made it is at fault."""
    wrong = check_columns(plan) if isinstance(plan, ColumnarPlan) else [str(found) for found in check(plan)]
    if wrong:
        raise PlannerError(f"the plan of {plan.solver.name} is not valid, and is not used: {wrong[0]}")
    return plan


def packed_plan_of(solution: Solution, *, seconds: float) -> Plan:
    """As planner.solvers.portfolio.plan_of, for the `form` of `make_plan`: in columns where the plan is large and they
    can hold it, and checked. Raises PlannerError for one that breaks a rule."""
    return checked(_plan_of(solution, seconds))


def _plan_of(solution: Solution, seconds: float) -> Plan:
    job = solution.schedule.problem.job
    if 3 * job.pipelines * job.stages * job.micro_batches <= SMALL_OPS:
        return plan_of(solution, seconds=seconds)
    try:
        columns = Columns.of(solution.schedule)
    except NotColumnar:
        return plan_of(solution, seconds=seconds)
    summed = replace(solution, schedule=columns.summary())
    return ColumnarPlan.of_columns(columns, metrics_of(summed), solver_of(solution, seconds=seconds))


def to_bytes(plan: Plan) -> bytes:
    """What `from_bytes` reads."""
    if not isinstance(plan, ColumnarPlan):
        return _DOCUMENT + plan.to_json().encode()
    columns, document = packed(plan)
    return _COLUMNS + struct.pack("<I", len(columns)) + columns + document


def from_bytes(data: bytes, *, source: str = "plan") -> Plan:
    """Raises PlanError. The document beside columns is not looked at, and handed on by `packed`."""
    if data[:1] == _DOCUMENT:
        return Plan.from_json(data[1:], source=source)
    if data[:1] != _COLUMNS or len(data) < 5:
        raise PlanError(f"{source} is not a plan: it begins with {data[:1]!r}, expected C or D")
    end = 5 + int(struct.unpack("<I", data[1:5])[0])
    columns = data[5:end]
    plan = unpack(columns, source=source)
    plan.came_with(columns, data[end:])
    return plan


def packed(plan: ColumnarPlan) -> Packed:
    """All that is to be stored of it."""
    columns, document = plan.stored
    if not columns:
        columns = pack(plan) or b""
    return Packed(columns, document or zlib.compress(plan.to_json().encode(), _LEVEL))


def storable(plan: Plan) -> str | Packed:
    """What db.store takes of a plan."""
    return packed(plan) if isinstance(plan, ColumnarPlan) else plan.to_json()
