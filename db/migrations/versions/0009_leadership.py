"""which console leads"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    table = op.create_table(
        "leadership",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("address", sa.String(length=255), nullable=False),
        sa.Column("renewed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leadership")),
    )
    # The only row there ever is: nobody has led yet.
    op.bulk_insert(table, [{"id": 1, "term": 0, "holder": "", "address": "", "renewed_at": 0.0}])


def downgrade() -> None:
    op.drop_table("leadership")
