"""The plan document itself: `Plan.from_json` of it gives an equal plan."""

from __future__ import annotations

from openrecycle.planner.plan import Plan


def to_json(plan: Plan) -> str:
    return plan.to_json() + "\n"
