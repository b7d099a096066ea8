"""A job's history as a zip file: one file of JSON lines per table, its plans, and a manifest of them all.

    manifest.json            what follows, each with its bytes and SHA-256; the tables with their rows
    tables/<table>.jsonl     a row per line, in the order of the table's key, without the job's id
    plans/<fingerprint>.json the Plan documents that the job has or has run

The form of the rows is app.history.tables'; app/docs/store.md says it in words.
"""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from openrecycle.app.history.tables import Fingerprint, format_of
from openrecycle.db.job_rows import MODELS, JobRows
from openrecycle.db.session import Database
from openrecycle.planner.plans.plan import INTEGER

MANIFEST = "manifest.json"
# The audit log is this console's own: it goes along to be read, and is never taken from a file.
EXPORTED = ("job", *MODELS, "audit")
IMPORTED = ("job", *MODELS)

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=2**50, strict=True)]


class Entry(BaseModel):
    """bytes, sha256: of the unpacked file."""

    model_config = ConfigDict(extra="forbid")

    bytes: Size
    sha256: Sha256


class TableEntry(Entry):
    rows: Size


class Manifest(BaseModel):
    """job: its id where it was exported. exported_at: POSIX seconds."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["openrecycle-history"]
    version: Annotated[Literal[1], INTEGER]
    job: str
    exported_at: float
    tables: dict[str, TableEntry]
    plans: dict[Fingerprint, Entry]


def table_file(name: str) -> str:
    return f"tables/{name}.jsonl"


def plan_file(fingerprint: str) -> str:
    return f"plans/{fingerprint}.json"


def export(database: Database, job_id: str, out: Path) -> Manifest | None:
    """Writes the file; it is there when it is whole, and not before. None: there is no such job.

    Takes little memory, however long the history is: rows are written as they are read. Raises OSError,
    SQLAlchemyError.
    """
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with JobRows(database).snapshot() as snapshot:
            job = snapshot.job(job_id)
            if job is None:
                return None
            with zipfile.ZipFile(part, "x", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
                tables, plans = {}, {}
                for name in EXPORTED:
                    form = format_of(name)
                    rows = [job] if name == "job" else snapshot.rows(name, job_id)
                    lines = (orjson.dumps(form.to_line(row)) + b"\n" for row in rows)
                    digest, size, count = _write(archive, table_file(name), lines)
                    tables[name] = TableEntry(bytes=size, sha256=digest, rows=count)
                for fingerprint in snapshot.fingerprints(job_id):
                    document = snapshot.plan(fingerprint)
                    assert document is not None, "a foreign key holds it"
                    digest, size, _ = _write(archive, plan_file(fingerprint), [document.encode()])
                    plans[fingerprint] = Entry(bytes=size, sha256=digest)
                manifest = Manifest(
                    format="openrecycle-history",
                    version=1,
                    job=job_id,
                    exported_at=time.time(),
                    tables=tables,
                    plans=plans,
                )
                archive.writestr(MANIFEST, manifest.model_dump_json(indent=1))
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return manifest


def _write(archive: zipfile.ZipFile, name: str, chunks: Iterable[bytes]) -> tuple[str, int, int]:
    """(SHA-256, bytes, chunks) of what was written."""
    digest, size, count = hashlib.sha256(), 0, 0
    with archive.open(name, "w", force_zip64=True) as handle:
        for chunk in chunks:
            handle.write(chunk)
            digest.update(chunk)
            size, count = size + len(chunk), count + 1
    return digest.hexdigest(), size, count
