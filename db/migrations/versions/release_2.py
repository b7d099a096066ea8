"""Generations have a partition: layers move between stages."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "release_2"
down_revision = "release_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("generation", schema=None) as batch_op:
        batch_op.add_column(sa.Column("partition", sa.Text(), server_default="[]", nullable=False))
        batch_op.add_column(sa.Column("moved_at", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("generation", schema=None) as batch_op:
        batch_op.drop_column("moved_at")
        batch_op.drop_column("partition")
