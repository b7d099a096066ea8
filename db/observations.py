"""What was seen of jobs: measured iterations, workers' states over time, events somebody has seen.

Queries beside those of db.store; each function is one transaction.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Sequence

from sqlalchemy import delete, func, insert, select

from openrecycle.db.models import (
    EventRow,
    EventSeenRow,
    IterationRow,
    MeasuredIterationRow,
    WorkerStateRow,
    listed,
)
from openrecycle.db.session import Database, Record


class Observations:
    """Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- measured iterations ------------------------------------------------------------------

    def put_measured(
        self, job_id: str, iteration: int, document: str, at: float, *, keep: Collection[int] = ()
    ) -> None:
        """Takes the place of what was measured of the job before, but for the iterations `keep`. document: JSON."""
        row = {"job_id": job_id, "iteration": iteration, "document": zlib.compress(document.encode()), "at": at}
        left = MeasuredIterationRow.iteration.notin_(set(keep) - {iteration})
        with self._database.write() as session:
            session.execute(delete(MeasuredIterationRow).where(MeasuredIterationRow.job_id == job_id, left))
            session.execute(insert(MeasuredIterationRow).values(row))

    def measured(self, job_id: str, iteration: int | None = None) -> str | None:
        """One as JSON, else the newest; None: it is not kept."""
        query = select(MeasuredIterationRow.document).where(MeasuredIterationRow.job_id == job_id)
        if iteration is not None:
            query = query.where(MeasuredIterationRow.iteration == iteration)
        data = self._database.scalar(query.order_by(MeasuredIterationRow.at.desc()).limit(1))
        return None if data is None else zlib.decompress(data).decode()

    def measured_iterations(self, job_id: str) -> list[int]:
        """Those that are kept, in the order in which they were measured."""
        row = MeasuredIterationRow
        query = select(row.iteration).where(row.job_id == job_id).order_by(row.at, row.iteration)
        return self._database.scalars(query)

    # -- workers ------------------------------------------------------------------------------

    def states(self, job_id: str, worker: str, *, limit: int = 200) -> list[Record]:
        """The newest changes of a worker's state, oldest first: state, at."""
        query = (
            select(WorkerStateRow.state, WorkerStateRow.at)
            .where(WorkerStateRow.job_id == job_id, WorkerStateRow.worker == worker)
            .order_by(WorkerStateRow.id.desc())
            .limit(limit)
        )
        return self._database.rows(query)[::-1]

    def events_of(self, job_id: str, worker: str, *, limit: int = 20) -> list[Record]:
        """The newest events that name this worker, newest first."""
        query = (
            select(EventRow.__table__)
            .where(EventRow.job_id == job_id, EventRow.worker == worker)
            .order_by(EventRow.seq.desc())
            .limit(limit)
        )
        return self._database.rows(query)

    # -- events -------------------------------------------------------------------------------

    def see_events(self, job_id: str, seqs: Sequence[int], actor: str) -> int:
        """Marks events as seen; returns how many were not before. Those that the job does not have are left out."""
        now = time.time()
        with self._database.write() as session:
            known = select(EventRow.seq).where(EventRow.job_id == job_id, EventRow.seq.in_(seqs))
            rows: list[Record] = [
                {"job_id": job_id, "seq": seq, "actor": actor, "at": now} for seq in session.scalars(known)
            ]
            if not rows:
                return 0
            seen = select(EventSeenRow.seq).where(EventSeenRow.job_id == job_id, EventSeenRow.seq.in_(seqs))
            new = {row["seq"] for row in rows} - set(session.scalars(seen))
            session.execute(self._database.insert_new(EventSeenRow), rows)
            if new:
                detail = ", ".join(str(seq) for seq in sorted(new))
                audit = {"at": now, "actor": actor, "action": "acknowledge", "job_id": job_id, "target": "events"}
                self._database.write_audit(session, {**audit, "detail": detail})
            return len(new)

    def seen_events(self, job_id: str, seqs: Sequence[int]) -> dict[int, tuple[str, float]]:
        """Of these events those that somebody has seen: seq -> (who, when)."""
        query = select(EventSeenRow.__table__).where(EventSeenRow.job_id == job_id, EventSeenRow.seq.in_(seqs))
        return {row["seq"]: (row["actor"], row["at"]) for row in self._database.rows(query)}

    # -- iterations ---------------------------------------------------------------------------

    def iteration_sums(self, job_id: str, through: int) -> list[Record]:
        """Of each generation's iterations up to `through`: generation, living, count, seconds, how many micro-batches
        were skipped, and of the first one its number and seconds; oldest generation first."""
        where = (IterationRow.job_id == job_id, IterationRow.iteration <= through)
        sums = (
            select(
                IterationRow.generation,
                func.count().label("count"),
                func.sum(IterationRow.seconds).label("seconds"),
                func.sum(listed(IterationRow.skipped)).label("skipped"),
                func.min(IterationRow.iteration).label("first"),
            )
            .where(*where)
            .group_by(IterationRow.generation)
            .subquery()
        )
        query = (
            select(
                sums.c.generation,
                IterationRow.living,
                sums.c.count,
                sums.c.seconds,
                sums.c.skipped,
                sums.c.first,
                IterationRow.seconds.label("first_seconds"),
            )
            .join(sums, (IterationRow.job_id == job_id) & (IterationRow.iteration == sums.c.first))
            .order_by(sums.c.first)
        )
        return self._database.rows(query)

    def committed_after(self, job_id: str, at: float) -> Record | None:
        """The first iteration that was committed at this time (POSIX seconds) or later; None: there is none yet."""
        row = IterationRow
        query = select(row.iteration, row.generation, row.seconds, row.committed_at).where(
            row.job_id == job_id, row.committed_at >= at
        )
        return self._database.row(query.order_by(row.iteration).limit(1))

    def last_commit(self, job_id: str, before: int | None = None) -> float:
        """When the newest iteration was committed, of all or of those with a smaller number (POSIX seconds); 0: there
        is none."""
        row = IterationRow
        query = select(row.committed_at).where(row.job_id == job_id)
        if before is not None:
            query = query.where(row.iteration < before)
        return self._database.scalar(query.order_by(row.iteration.desc()).limit(1)) or 0.0
