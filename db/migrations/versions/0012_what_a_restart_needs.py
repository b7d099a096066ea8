"""what a console that is started again has to know of changes that are not done"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("broken", sa.Text(), nullable=False, server_default=""))
    op.add_column("job", sa.Column("moves", sa.Text(), nullable=False, server_default="[]"))
    op.add_column("worker", sa.Column("leaving", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("worker", "leaving")
    op.drop_column("job", "moves")
    op.drop_column("job", "broken")
