"""catalogs of plans made ahead"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "catalog",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("info", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_catalog")),
    )
    op.create_table(
        "catalog_plan",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["fingerprint"],
            ["catalog.fingerprint"],
            name=op.f("fk_catalog_plan_fingerprint_catalog"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("fingerprint", "name", name=op.f("pk_catalog_plan")),
    )


def downgrade() -> None:
    op.drop_table("catalog_plan")
    op.drop_table("catalog")
