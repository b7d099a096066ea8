"""jobs that wait for an operator to choose how they go on"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("mode", sa.String(length=16), nullable=False, server_default="automatic"))
    op.add_column("job", sa.Column("patience", sa.Double(), nullable=False, server_default="60"))


def downgrade() -> None:
    op.drop_column("job", "patience")
    op.drop_column("job", "mode")
