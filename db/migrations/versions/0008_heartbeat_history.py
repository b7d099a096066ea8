"""the history of heartbeats; who refers to a plan"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0010"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "heartbeat",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("worker_group", sa.Integer(), nullable=False),
        sa.Column("begin", sa.BigInteger(), nullable=False),
        sa.Column("end", sa.BigInteger(), nullable=False),
        sa.Column("whole", sa.Boolean(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_heartbeat_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_heartbeat")),
    )
    op.create_index(
        op.f("ix_heartbeat_job_id_level_worker_group_begin"),
        "heartbeat",
        ["job_id", "level", "worker_group", "begin"],
    )
    op.create_index(op.f("ix_heartbeat_level_whole_begin"), "heartbeat", ["level", "whole", "begin"])
    # Who refers to a plan is asked before it is deleted.
    op.create_index(op.f("ix_job_plan_fingerprint"), "job_plan", ["fingerprint"])
    op.create_index(op.f("ix_epoch_plan_fingerprint"), "epoch", ["plan_fingerprint"])


def downgrade() -> None:
    op.drop_index(op.f("ix_epoch_plan_fingerprint"), table_name="epoch")
    op.drop_index(op.f("ix_job_plan_fingerprint"), table_name="job_plan")
    op.drop_index(op.f("ix_heartbeat_level_whole_begin"), table_name="heartbeat")
    op.drop_index(op.f("ix_heartbeat_job_id_level_worker_group_begin"), table_name="heartbeat")
    op.drop_table("heartbeat")
