"""large plans in columns"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "plan_columns",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["fingerprint"], ["plan.fingerprint"], name=op.f("fk_plan_columns_fingerprint_plan"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_plan_columns")),
    )


def downgrade() -> None:
    op.drop_table("plan_columns")
