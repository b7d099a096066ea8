"""how often a line of the feed was repeated"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("event", sa.Column("count", sa.Integer(), server_default="1", nullable=False))
    op.add_column("event", sa.Column("last_at", sa.Double(), server_default="0", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("event") as batch:
        batch.drop_column("last_at")
        batch.drop_column("count")
