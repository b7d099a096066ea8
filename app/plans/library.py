"""Stored plans: a cache of parsed ones (`PlanCache`), and the plans that people keep under a name, apart from any job
(`Library`)."""

from __future__ import annotations

import threading
from typing import Any

from cachetools import LRUCache

from openrecycle.app.plans.files import ReadPlan, summary_of
from openrecycle.app.runtime.errors import ConsoleError, damaged_plan, plain, storing, unknown_plan
from openrecycle.app.runtime.processes import Seldom
from openrecycle.db.plan_rows import SavedPlans
from openrecycle.db.store import Store
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.packed import packed, unpack_named
from openrecycle.planner.plans.plan import Plan

# The most ops of parsed plans in memory (about 40 MB). Each plan counts as at least _LEAST_OPS; one of more than
# _KEEP_OPS fills the cache alone.
_KEEP_OPS, _LEAST_OPS = 400_000, 2_000


class PlanCache:
    """Stored plans by fingerprint; the most recently used ones stay parsed. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._seldom = Seldom()
        self._plans: LRUCache[str, tuple[Plan, dict[str, int]]] = LRUCache(
            _KEEP_OPS, lambda found: min(max(found[0].op_count, _LEAST_OPS), _KEEP_OPS)
        )

    def get(self, fingerprint: str) -> Plan | None:
        """Returns a stored plan; None: there is none, or it is damaged, which must not stop anything else that is done
        or shown for a job."""
        found = self._whole(fingerprint)
        return found[0] if found else None

    def plan(self, fingerprint: str) -> Plan:
        """Returns a plan as it is stored now: another console, or a job, may have stored a better proof since it was
        read. Raises ConsoleError (404) if there is none, or it is damaged."""
        try:
            with storing():
                found = self._get(plain(fingerprint), anew=True)
        except PlannerError as error:
            raise damaged_plan(fingerprint, error) from None
        if found is None:
            raise unknown_plan(fingerprint)
        return found[0]

    def rerouted(self, fingerprint: str) -> dict[str, int]:
        """Returns, by worker, how many micro-batches of other pipelines it runs per iteration; {} also if `get` would
        return None."""
        found = self._whole(fingerprint)
        return found[1] if found else {}

    def _whole(self, fingerprint: str) -> tuple[Plan, dict[str, int]] | None:
        try:
            return self._get(fingerprint)
        except PlannerError as error:
            self._seldom.warn("a stored plan is not used", reason=str(error))
            return None

    def _get(self, fingerprint: str, *, anew: bool = False) -> tuple[Plan, dict[str, int]] | None:
        with self._lock:
            found = self._plans.get(fingerprint)
        if found and not anew:
            return found
        data = self._store.plan(fingerprint)
        if data is None or (found and found[0].workers.packed == data):
            return found if data else None
        plan = unpack_named(data, fingerprint)
        found = (plan, plan.rerouted())
        with self._lock:
            self._plans[fingerprint] = found
        return found

    def stored_anew(self, fingerprint: str) -> None:
        """Drops a plan from the cache, since the stored one may have a better proof (lower bound) now."""
        with self._lock:
            self._plans.pop(fingerprint, None)


MAX_NAME = 80


class Library:
    """The plans that people keep under a name. One per console (`console.plans.library`). Thread-safe. Its methods
    raise ConsoleError."""

    def __init__(self, store: Store, plans: PlanCache) -> None:
        self._rows = SavedPlans(store.database)
        self._plans = plans

    def save(self, plan: Plan, name: str) -> str:
        """Keeps `plan` and returns its fingerprint. A plan that is kept already takes the new name."""
        return self._save(plan.fingerprint, packed(plan), name, summary_of(plan))

    def save_read(self, plan: ReadPlan) -> str:
        """Does the same as `save` for a plan that a child process has read and checked."""
        return self._save(plan.fingerprint, plan.packed, plan.name, plan.summary)

    def _save(self, fingerprint: str, data: bytes, name: str, summary: dict[str, Any]) -> str:
        name = " ".join(name.split())
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise ConsoleError(
                422, "invalid", f"got {name!r}, expected 1 to {MAX_NAME} printable characters", field="name"
            )
        with storing():
            best = self._rows.save(fingerprint, data, name, summary)
            self._plans.stored_anew(fingerprint)
            if not best and (stored := self._plans.get(fingerprint)):
                self._rows.save(fingerprint, packed(stored), name, summary_of(stored))
        return fingerprint

    def saved(self) -> list[dict[str, Any]]:
        """Returns all saved plans, newest first: fingerprint, name, created (POSIX seconds), and the plan's period,
        lower_bound, gap, time_unit, failed, technique, memory, pipelines, stages, micro_batches and workers (of the
        grid)."""
        with storing():
            return self._rows.saved()

    def saved_plan(self, fingerprint: str) -> Plan:
        """Raises ConsoleError (404) when no plan is saved under that fingerprint."""
        with storing():
            is_saved = _stored(fingerprint) and self._rows.has(fingerprint)
        if not is_saved:
            raise unknown_plan(fingerprint)
        return self._plans.plan(fingerprint)

    def forget(self, fingerprint: str) -> None:
        """Removes a plan from the library; jobs that have the plan keep it. Raises ConsoleError (404)."""
        with storing():
            if not (_stored(fingerprint) and self._rows.forget(fingerprint)):
                raise unknown_plan(fingerprint)


def _stored(fingerprint: str) -> bool:
    """Says whether the database can hold such a fingerprint at all: PostgreSQL takes no NUL."""
    return "\0" not in fingerprint
