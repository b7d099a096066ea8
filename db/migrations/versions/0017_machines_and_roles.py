"""processes apart from the places that they hold, what a job is measured by, and when it waited for a person"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_WORKER = sa.table(
    "worker", *map(sa.column, ("job_id", "name", "state", "incarnation", "detail", "host", "pid", "processes"))
)


def upgrade() -> None:
    op.add_column("job", sa.Column("baseline", sa.Text(), nullable=False, server_default=""))
    op.add_column("job", sa.Column("waits", sa.Text(), nullable=False, server_default="[]"))
    op.add_column("worker", sa.Column("processes", sa.Text(), nullable=False, server_default="[]"))
    connection, row = op.get_bind(), _WORKER.c
    for worker in connection.execute(sa.select(_WORKER).where(row.incarnation.is_not(None))).all():
        ended = "failed" if worker.state == "failed" else ""
        process = [worker.incarnation, worker.host, worker.pid, [[worker.name, 0.0]], ended, worker.detail]
        where = (row.job_id == worker.job_id, row.name == worker.name)
        connection.execute(sa.update(_WORKER).where(*where).values(processes=json.dumps([process])))
    with op.batch_alter_table("worker") as batch:
        batch.drop_column("host")
        batch.drop_column("pid")


def downgrade() -> None:
    op.add_column("worker", sa.Column("host", sa.String(length=255), nullable=False, server_default=""))
    op.add_column("worker", sa.Column("pid", sa.BigInteger(), nullable=False, server_default="0"))
    op.drop_column("worker", "processes")
    op.drop_column("job", "waits")
    op.drop_column("job", "baseline")
