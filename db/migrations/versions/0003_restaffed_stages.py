"""epochs in which workers change their stage and all go back to a checkpoint"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("epoch", sa.Column("moves", sa.Text(), nullable=False, server_default="[]"))
    op.add_column("epoch", sa.Column("restore", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("epoch", "restore")
    op.drop_column("epoch", "moves")
