"""Stored plans: read in the quickest way there is, and those that people keep under a name, apart from any job.

Large ones are put into columns (planner.plans.packed), in processes of their own, one after the other, and the most
recently used ones stay parsed.
"""

from __future__ import annotations

import gc
import queue
import threading
import zlib
from collections.abc import Callable
from typing import Any

import structlog
from cachetools import LRUCache
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.app.jobs.job_plans import stored_plan
from openrecycle.app.plans.uploading import ReadPlan, summary_of
from openrecycle.app.runtime.errors import ConsoleError, plain, storing, unknown_plan
from openrecycle.app.runtime.patches import LARGE_OPS
from openrecycle.app.runtime.processes import Channel, ChildEnded, Children
from openrecycle.db.plan_rows import PlanColumns, SavedPlans
from openrecycle.db.store import Store
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.packed import Packed, decode_header, pack, storable
from openrecycle.planner.plans.plan import Plan

log = structlog.get_logger()

# Ops of the parsed plans that are kept in memory, about 40 MB; a small plan counts as so many, a larger one fills it.
_KEEP_OPS, _LEAST_OPS = 400_000, 2_000
# Beyond this a process has gone astray.
TIMEOUT = 600.0


class PlanCache:
    """Plans by fingerprint, out of the store; the most recently used ones stay parsed. Thread-safe.

    Large ones are packed once they are asked for, and are read in no time from then on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._packing = Packing(PlanColumns(store.database), self.stored_anew)
        self._lock = threading.Lock()
        self._plans: LRUCache[str, tuple[Plan, dict[str, int]]] = LRUCache(
            _KEEP_OPS, lambda found: min(max(found[0].op_count, _LEAST_OPS), _KEEP_OPS)
        )

    def get(self, fingerprint: str) -> Plan | None:
        found = self._get(fingerprint)
        return found[0] if found else None

    def plan(self, fingerprint: str) -> Plan:
        """Raises ConsoleError (404)."""
        with storing():
            found = self.get(plain(fingerprint))
        if found is None:
            raise unknown_plan(fingerprint)
        return found

    def rerouted(self, fingerprint: str) -> dict[str, int]:
        """worker -> micro-batches of other pipelines that it runs per iteration."""
        found = self._get(fingerprint)
        return found[1] if found else {}

    def _get(self, fingerprint: str) -> tuple[Plan, dict[str, int]] | None:
        with self._lock:
            if found := self._plans.get(fingerprint):
                return found
        plan = stored_plan(self._store, fingerprint)
        if plan is None:
            return None
        if not any(plan.workers.stored):
            self._packing.want(fingerprint, plan.op_count)
        found = (plan, plan.rerouted())
        with self._lock:
            self._plans[fingerprint] = found
        return found

    def will_be_asked_for(self, fingerprint: str, ops: int) -> None:
        """A document that nobody has read here has been stored, and need not be read as one."""
        self._packing.want(fingerprint, ops)

    def close(self) -> None:
        """Ends what is done in the background."""
        self._packing.close()

    def stored_anew(self, fingerprint: str) -> None:
        """Whoever asks next gets what is stored now: its columns, which take a tenth of the memory, or its proof."""
        with self._lock:
            self._plans.pop(fingerprint, None)


class Packing:
    """Thread-safe. on_packed: called with the fingerprint of each plan whose columns have been stored."""

    def __init__(self, columns: PlanColumns, on_packed: Callable[[str], None]) -> None:
        self._columns = columns
        self._on_packed = on_packed
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._thread: threading.Thread | None = None
        self._children = Children(put_into_columns, name="packing")
        self._closed = False

    def want(self, fingerprint: str, ops: int) -> None:
        """Asks once for each plan; small ones are read quickly enough as they are."""
        with self._lock:
            if ops <= LARGE_OPS or self._closed or fingerprint in self._asked:
                return
            self._asked.add(fingerprint)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="packing", daemon=True)
                self._thread.start()
        self._queue.put(fingerprint)

    def close(self) -> None:
        """Ends what runs; plans that have no columns yet are read as documents."""
        with self._lock:
            self._closed = True
        self._children.close()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        while (fingerprint := self._queue.get()) is not None and not self._closed:
            try:
                document = self._columns.deflated_document(fingerprint)
                data = self._children.ask(document, timeout=TIMEOUT) if document is not None else None
                if document is not None and data:
                    self._columns.put(fingerprint, document, data)
                    self._on_packed(fingerprint)
            except (ChildEnded, SQLAlchemyError) as error:
                if not self._closed:
                    log.warning("a plan has no columns; it is read as a document", reason=type(error).__name__)


def put_into_columns(channel: Channel, document: bytes) -> None:
    """In a child."""
    gc.disable()  # a million lists would be looked through again and again, and all goes with the process
    if data := packed(document):
        channel.say(data)


def packed(document: bytes) -> bytes:
    """The columns of a deflated document; empty: they can't hold it."""
    try:
        data = pack(Plan.from_json(zlib.decompress(document)))
        return data if decode_header(data).form == "columns" else b""
    except (PlannerError, zlib.error, MemoryError) as error:
        log.warning("a stored plan can't be put into columns", reason=str(error))
        return b""


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
            best = self._rows.save(fingerprint, document(), name, summary)
            self._plans.stored_anew(fingerprint)
            if not best and (stored := self._plans.get(fingerprint)):
                self._rows.save(fingerprint, storable(stored), name, summary_of(stored))
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
