"""plans in force that operators have frozen"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("frozen_by", sa.String(length=80), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("job", "frozen_by")
