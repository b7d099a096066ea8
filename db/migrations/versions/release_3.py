"""Jobs on several nodes have a lead, which the console knows by its term."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "release_3"
down_revision = "release_2"
branch_labels = None
depends_on = None


# Not in a batch, which on SQLite makes the table anew: with the old one all that refers to its jobs would go.


def upgrade() -> None:
    op.add_column("job", sa.Column("lead_term", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("job", sa.Column("lead_node", sa.Integer(), server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("job", "lead_node")
    op.drop_column("job", "lead_term")
