"""The plans that people keep under a name, apart from any job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openrecycle.app.jobs.stored_plans import PlanCache
from openrecycle.app.plans.uploading import ReadPlan, summary_of
from openrecycle.app.runtime.errors import ConsoleError, storing, unknown_plan
from openrecycle.db.saved_plans import SavedPlans
from openrecycle.db.store import Store
from openrecycle.planner.plans.packed import Packed, storable
from openrecycle.planner.plans.plan import Plan

MAX_NAME = 80


class Library:
    """One per console (`console.plans.library`). Thread-safe. Its methods raise ConsoleError."""

    def __init__(self, store: Store, plans: PlanCache) -> None:
        self._rows = SavedPlans(store.database)
        self._plans = plans

    def save(self, plan: Plan, name: str) -> str:
        """Keeps `plan` and returns its fingerprint. A plan that is kept already takes the new name."""
        return self._save(plan.fingerprint, lambda: storable(plan), name, summary_of(plan))

    def save_read(self, plan: ReadPlan) -> str:
        """As `save`, of one that a process of its own has read and checked."""
        fingerprint = self._save(plan.fingerprint, lambda: plan.document, plan.name, plan.summary)
        self._plans.will_be_asked_for(plan.fingerprint, plan.ops)
        return fingerprint

    def _save(self, fingerprint: str, document: Callable[[], str | Packed], name: str, summary: dict[str, Any]) -> str:
        name = " ".join(name.split())
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise ConsoleError(422, "invalid", f"name: got {name!r}, expected 1 to {MAX_NAME} printable characters")
        with storing():
            self._rows.save(fingerprint, document(), name, summary)
        return fingerprint

    def saved(self) -> list[dict[str, Any]]:
        """Newest first: fingerprint, name, created (POSIX seconds), and of the plan its period, lower_bound,
        gap, time_unit, failed, technique, memory, pipelines, stages, micro_batches and workers (of the grid)."""
        with storing():
            return self._rows.saved()

    def saved_plan(self, fingerprint: str) -> Plan:
        """Raises ConsoleError (404) when no plan is saved under that fingerprint."""
        plan = self._plans.get(fingerprint) if self._is_saved(fingerprint) else None
        if plan is None:
            raise unknown_plan(fingerprint)
        return plan

    def document(self, fingerprint: str) -> str:
        """The stored JSON, as it is. Raises ConsoleError (404)."""
        with storing():
            document = self._rows.document(fingerprint) if _stored(fingerprint) else None
        if document is None:
            raise unknown_plan(fingerprint)
        return document

    def forget(self, fingerprint: str) -> None:
        """Jobs that have the plan keep it. Raises ConsoleError (404)."""
        with storing():
            if not (_stored(fingerprint) and self._rows.forget(fingerprint)):
                raise unknown_plan(fingerprint)

    def _is_saved(self, fingerprint: str) -> bool:
        with storing():
            return _stored(fingerprint) and self._rows.has(fingerprint)


def _stored(fingerprint: str) -> bool:
    """Can the database have it at all? PostgreSQL takes no NUL."""
    return "\0" not in fingerprint
