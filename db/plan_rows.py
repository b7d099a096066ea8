"""Plan documents in the `plan` table, which jobs and saved plans share."""

from __future__ import annotations

import time
import zlib

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from openrecycle.db.models import PlanColumnsRow, PlanRow
from openrecycle.db.session import Database
from openrecycle.planner.packed import Packed


def keep_plan(database: Database, session: Session, fingerprint: str, document: str | Packed) -> None:
    """Stores a plan that is not stored already, and holds its row until the transaction ends. document: JSON; or what
    a process has packed, which is stored as it is.

    Without the hold, whoever forgets the plan at the same moment would delete it under the row that
    is about to refer to it. SQLite has one writer, and needs none.
    """
    data = document.document if isinstance(document, Packed) else zlib.compress(document.encode())
    row = {"fingerprint": fingerprint, "document": data, "created_at": time.time()}
    if database.is_sqlite:
        session.execute(database.insert_new(PlanRow).values(row))
    else:
        insert = postgresql.insert(PlanRow).values(row)
        held = {"created_at": PlanRow.created_at}
        session.execute(insert.on_conflict_do_update(index_elements=[PlanRow.fingerprint], set_=held))
    if isinstance(document, Packed) and document.columns:
        columns = {"fingerprint": fingerprint, "data": document.columns}
        session.execute(database.insert_new(PlanColumnsRow).values(columns))


def plan_document(session: Session | Connection, fingerprint: str) -> str | None:
    """As JSON."""
    data = session.scalar(select(PlanRow.document).where(PlanRow.fingerprint == fingerprint))
    return None if data is None else zlib.decompress(data).decode()
