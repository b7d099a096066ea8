"""measured iterations that links name, beside the newest one"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_TABLE, _KEY = "measured_iteration", op.f("pk_measured_iteration")


def upgrade() -> None:
    with op.batch_alter_table(_TABLE) as batch:
        batch.drop_constraint(_KEY, type_="primary")
        batch.create_primary_key(_KEY, ["job_id", "iteration"])


def downgrade() -> None:
    rows = sa.table(_TABLE, sa.column("job_id"), sa.column("iteration"), sa.column("at"))
    newest = rows.alias("newest")
    # One of a job: the newest.
    op.execute(
        sa.delete(rows).where(
            sa.exists().where(
                newest.c.job_id == rows.c.job_id,
                sa.or_(
                    newest.c.at > rows.c.at,
                    sa.and_(newest.c.at == rows.c.at, newest.c.iteration > rows.c.iteration),
                ),
            )
        )
    )
    with op.batch_alter_table(_TABLE) as batch:
        batch.drop_constraint(_KEY, type_="primary")
        batch.create_primary_key(_KEY, ["job_id"])
