"""Stored plans, read in the quickest way there is."""

from __future__ import annotations

import structlog

from openrecycle.app.runtime.garbage_collection import OP_BYTES, building
from openrecycle.db.plan_columns import PlanColumns
from openrecycle.db.store import Store
from openrecycle.planner.packed import unpack
from openrecycle.planner.plan import Plan, PlanError

log = structlog.get_logger()


def stored_plan(store: Store, fingerprint: str) -> Plan | None:
    """In columns where it has any. Raises PlanError for a document that can't be read, SQLAlchemyError."""
    data = PlanColumns(store.database).get(fingerprint)
    if data is not None:
        try:
            return unpack(data, source=f"plan {fingerprint}")
        except PlanError as error:
            log.warning("the columns of a plan can't be read; its document is", reason=str(error))
    document = store.plan(fingerprint)
    if document is None:
        return None
    with building(len(document) // OP_BYTES):
        return Plan.from_json(document, source=fingerprint)
