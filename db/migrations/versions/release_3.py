"""Jobs on several nodes have a lead, which the console knows by its term."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "release_3"
down_revision = "release_2"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.add_column(sa.Column("lead_term", sa.BigInteger(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("lead_node", sa.Integer(), server_default="0", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.drop_column("lead_node")
        batch_op.drop_column("lead_term")
