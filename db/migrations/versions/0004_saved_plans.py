"""plans that are kept under a name"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "saved_plan",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["fingerprint"], ["plan.fingerprint"], name=op.f("fk_saved_plan_fingerprint_plan")),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_saved_plan")),
    )


def downgrade() -> None:
    op.drop_table("saved_plan")
