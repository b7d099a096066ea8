from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from sqlalchemy.exc import IntegrityError

from openrecycle.db.access import AuditStore, TokenStore
from openrecycle.db.session import Database
from openrecycle.db.store import Record, Store


def row(token_id: str, **more: object) -> Record:
    values: Record = {
        "id": token_id,
        "secret_hash": "0" * 64,
        "name": "ada",
        "role": "agent",
        "job_id": None,
        "created_by": "administrator",
        "created_at": 10.0,
        "expires_at": None,
        "revoked_at": None,
        "last_used_at": None,
    }
    return values | more


def job(database: Database, job_id: str) -> None:
    values: Record = {"name": "job", "spec": "{}", "state": "running", "created_at": 1.0, "idempotency_key": None}
    Store(database).create_job(job_id, workers=[], **values)


def test_tokens_are_kept_used_and_revoked(database: Database) -> None:
    tokens = TokenStore(database)
    tokens.add(row("old", created_at=5.0))
    tokens.add(row("new", expires_at=20.0))
    assert [found["id"] for found in tokens.all()] == ["new", "old"]
    assert [found["id"] for found in tokens.all(valid_at=20.0)] == ["old"]
    assert tokens.get("new") == row("new", expires_at=20.0)
    assert tokens.get("none") is None
    tokens.used({"old": 12.5, "none": 13.0})
    assert tokens.get("old") == row("old", created_at=5.0, last_used_at=12.5)
    assert (tokens.revoke("old", 14.0), tokens.revoke("old", 15.0), tokens.revoke("none", 15.0)) == (True, False, False)
    assert tokens.all(valid_at=14.0) == [row("new", expires_at=20.0)]
    with pytest.raises(IntegrityError):
        tokens.add(row("old"))


def test_a_jobs_tokens_end_with_it(database: Database) -> None:
    tokens = TokenStore(database)
    job(database, "one")
    for name, ends in (("early", 50.0), ("late", 200.0), ("open", None)):
        tokens.add(row(name, job_id="one", expires_at=ends))
    tokens.add(row("other"))
    tokens.end_job("one", 100.0)
    assert {found["id"]: found["expires_at"] for found in tokens.all()} == {
        "early": 50.0,
        "late": 100.0,
        "open": 100.0,
        "other": None,
    }
    with pytest.raises(IntegrityError):
        tokens.add(row("stray", job_id="no such job"))


def test_the_audit_log_is_read_on_from_any_line(database: Database) -> None:
    audit = AuditStore(database)
    for i in range(4):
        line = {"at": float(i), "actor": "ada", "action": "pause", "target": "", "detail": ""}
        audit.add({**line, "job_id": "one" if i % 2 else None})
    ids = [line["id"] for line in audit.read()]
    assert ids == sorted(ids)
    assert [line["id"] for line in audit.read(after=ids[1])] == ids[2:]
    assert [line["id"] for line in audit.read(limit=1)] == ids[:1]
    assert [line["at"] for line in audit.read(job_id="one")] == [1.0, 3.0]


def test_who_reads_the_audit_log_on_misses_no_line_of_a_longer_transaction(database: Database) -> None:
    audit = AuditStore(database)
    line = {"actor": "ada", "action": "pause", "job_id": None, "target": "", "detail": ""}
    with ThreadPoolExecutor(1) as pool:
        with database.write() as session:
            database.write_audit(session, {**line, "at": 1.0})
            later = pool.submit(audit.add, {**line, "at": 2.0})
            assert not wait([later], 0.1).done and audit.read() == []
        later.result()
    assert [found["at"] for found in audit.read()] == [1.0, 2.0]
