"""The schedules of the plans that pages show, each read once."""

from __future__ import annotations

import streamlit as st

from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule, shared by all viewers."""
    return st.cache_resource(_schedule, max_entries=16, show_spinner="Reading the plan …")(plan.fingerprint, plan)  # type: ignore[no-any-return]


def _schedule(fingerprint: str, _plan: Plan) -> Schedule:
    """Keyed by the fingerprint; the plan itself is not hashed."""
    return _plan.schedule()
