"""Plan documents in the `plan` table, which jobs and saved plans share."""

from __future__ import annotations

import time
import zlib

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from db.models import PlanRow
from db.session import Database


def keep_plan(database: Database, session: Session, fingerprint: str, document: str) -> None:
    """Stores a plan that is not stored already, and holds its row until the transaction ends.

    Without the hold, whoever forgets the plan at the same moment would delete it under the row that
    is about to refer to it. SQLite has one writer, and needs none.
    """
    row = {"fingerprint": fingerprint, "document": zlib.compress(document.encode()), "created_at": time.time()}
    if database.is_sqlite:
        session.execute(database.insert_new(PlanRow).values(row))
        return
    insert = postgresql.insert(PlanRow).values(row)
    held = {"created_at": PlanRow.created_at}
    session.execute(insert.on_conflict_do_update(index_elements=[PlanRow.fingerprint], set_=held))


def plan_document(session: Session | Connection, fingerprint: str) -> str | None:
    """As JSON."""
    data = session.scalar(select(PlanRow.document).where(PlanRow.fingerprint == fingerprint))
    return None if data is None else zlib.decompress(data).decode()
