"""All tables, as the first release has them: until it is out, they change here."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "first_release"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:

    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(length=80), nullable=False),
        sa.Column("action", sa.String(length=40), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("target", sa.String(length=255), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_job_id_at"), "audit", ["job_id", "at"], unique=False)
    op.create_table(
        "catalog",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("info", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_catalog")),
    )
    op.create_table(
        "idempotent_request",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("request", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("media_type", sa.String(length=80), nullable=False),
        sa.Column("location", sa.String(length=255), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_idempotent_request")),
    )
    op.create_index(op.f("ix_idempotent_request_at"), "idempotent_request", ["at"], unique=False)
    op.create_table(
        "job",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("mode", sa.String(length=16), server_default="automatic", nullable=False),
        sa.Column("choice_timeout", sa.Double(), server_default="60", nullable=False),
        sa.Column("lead_term", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("lead_node", sa.Integer(), server_default="0", nullable=False),
        sa.Column("frozen_by", sa.String(length=80), server_default="", nullable=False),
        sa.Column("broken", sa.Text(), server_default="", nullable=False),
        sa.Column("moves", sa.Text(), server_default="[]", nullable=False),
        sa.Column("baseline", sa.Text(), server_default="", nullable=False),
        sa.Column("waits", sa.Text(), server_default="[]", nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_job_idempotency_key")),
    )
    leadership = op.create_table(
        "leadership",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("address", sa.String(length=255), nullable=False),
        sa.Column("renewed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leadership")),
    )
    # The only row there ever is: nobody has led yet.
    op.bulk_insert(leadership, [{"id": 1, "term": 0, "holder": "", "address": "", "renewed_at": 0.0}])
    op.create_table(
        "plan",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_plan")),
    )
    op.create_table(
        "profile",
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("saved_by", sa.String(length=80), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_profile")),
    )
    op.create_table(
        "acknowledgement",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("worker", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_acknowledgement_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "generation", "worker", "state", name=op.f("pk_acknowledgement")),
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
    op.create_table(
        "command",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("worker", sa.String(length=16), nullable=False),
        sa.Column("actor", sa.String(length=80), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_command_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_command")),
    )
    op.create_table(
        "event",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("severity", sa.String(length=8), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("worker", sa.String(length=16), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("count", sa.Integer(), server_default="1", nullable=False),
        sa.Column("last_at", sa.Double(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_event_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_event")),
    )
    op.create_table(
        "event_seen",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("actor", sa.String(length=80), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_event_seen_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_event_seen")),
    )
    op.create_table(
        "generation",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("plan_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("living", sa.Text(), nullable=False),
        sa.Column("failed", sa.Text(), nullable=False),
        sa.Column("joining", sa.Text(), nullable=False),
        sa.Column("moves", sa.Text(), server_default="[]", nullable=False),
        sa.Column("restore", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("interim_plan", sa.String(length=64), server_default="", nullable=False),
        sa.Column("interim_failed", sa.Text(), server_default="[]", nullable=False),
        sa.Column("partition", sa.Text(), server_default="[]", nullable=False),
        sa.Column("moved_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_generation_job_id_job"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["plan_fingerprint"], ["plan.fingerprint"], name=op.f("fk_generation_plan_fingerprint_plan")
        ),
        sa.PrimaryKeyConstraint("job_id", "generation", name=op.f("pk_generation")),
    )
    op.create_index(op.f("ix_generation_plan_fingerprint"), "generation", ["plan_fingerprint"], unique=False)
    op.create_table(
        "heartbeat",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
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
        unique=False,
    )
    op.create_index(op.f("ix_heartbeat_level_whole_begin"), "heartbeat", ["level", "whole", "begin"], unique=False)
    op.create_table(
        "iteration",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("loss", sa.Double(), nullable=False),
        sa.Column("loss_hex", sa.String(length=40), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("living", sa.Integer(), nullable=False),
        sa.Column("committed_at", sa.Double(), nullable=False),
        sa.Column("skipped", sa.Text(), server_default="[]", nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_iteration_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "iteration", name=op.f("pk_iteration")),
    )
    op.create_table(
        "job_plan",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("failed", sa.Text(), nullable=False),
        sa.Column("ahead", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["fingerprint"], ["plan.fingerprint"], name=op.f("fk_job_plan_fingerprint_plan")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_job_plan_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "fingerprint", name=op.f("pk_job_plan")),
    )
    op.create_index(op.f("ix_job_plan_fingerprint"), "job_plan", ["fingerprint"], unique=False)
    op.create_table(
        "measured_iteration",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_measured_iteration_job_id_job"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "iteration", name=op.f("pk_measured_iteration")),
    )
    op.create_table(
        "plan_columns",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["fingerprint"], ["plan.fingerprint"], name=op.f("fk_plan_columns_fingerprint_plan"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_plan_columns")),
    )
    op.create_table(
        "recovery",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("worker", sa.String(length=16), nullable=False),
        sa.Column("generation", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("detected_ms", sa.Double(), nullable=False),
        sa.Column("unblocked_ms", sa.Double(), nullable=False),
        sa.Column("reformed_ms", sa.Double(), nullable=False),
        sa.Column("resumed_ms", sa.Double(), nullable=False),
        sa.Column("death_known", sa.Boolean(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_recovery_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "worker", "generation", name=op.f("pk_recovery")),
    )
    op.create_table(
        "saved_plan",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["fingerprint"], ["plan.fingerprint"], name=op.f("fk_saved_plan_fingerprint_plan")),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_saved_plan")),
    )
    op.create_table(
        "token",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("created_by", sa.String(length=80), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_token_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_token")),
    )
    op.create_index(op.f("ix_token_job_id"), "token", ["job_id"], unique=False)
    op.create_table(
        "worker",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("incarnation", sa.String(length=64), nullable=True),
        sa.Column("retired", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("leaving", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("member_generation", sa.BigInteger(), nullable=False),
        sa.Column("processes", sa.Text(), server_default="[]", nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("op_milliseconds", sa.Text(), nullable=False),
        sa.Column("resident_bytes", sa.BigInteger(), nullable=False),
        sa.Column("heard_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_worker_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "name", name=op.f("pk_worker")),
    )
    op.create_table(
        "worker_state",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("worker", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_worker_state_job_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_state")),
    )
    op.create_index(op.f("ix_worker_state_job_id_worker"), "worker_state", ["job_id", "worker"], unique=False)


def downgrade() -> None:

    op.drop_index(op.f("ix_worker_state_job_id_worker"), table_name="worker_state")
    op.drop_table("worker_state")
    op.drop_table("worker")
    op.drop_index(op.f("ix_token_job_id"), table_name="token")
    op.drop_table("token")
    op.drop_table("saved_plan")
    op.drop_table("recovery")
    op.drop_table("plan_columns")
    op.drop_table("measured_iteration")
    op.drop_index(op.f("ix_job_plan_fingerprint"), table_name="job_plan")
    op.drop_table("job_plan")
    op.drop_table("iteration")
    op.drop_index(op.f("ix_heartbeat_level_whole_begin"), table_name="heartbeat")
    op.drop_index(op.f("ix_heartbeat_job_id_level_worker_group_begin"), table_name="heartbeat")
    op.drop_table("heartbeat")
    op.drop_index(op.f("ix_generation_plan_fingerprint"), table_name="generation")
    op.drop_table("generation")
    op.drop_table("event_seen")
    op.drop_table("event")
    op.drop_table("command")
    op.drop_table("catalog_plan")
    op.drop_table("acknowledgement")
    op.drop_table("profile")
    op.drop_table("plan")
    op.drop_table("leadership")
    op.drop_table("job")
    op.drop_index(op.f("ix_idempotent_request_at"), table_name="idempotent_request")
    op.drop_table("idempotent_request")
    op.drop_table("catalog")
    op.drop_index(op.f("ix_audit_job_id_at"), table_name="audit")
    op.drop_table("audit")
