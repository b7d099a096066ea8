"""All tables, as db.models has them: until the first release, db.models alone defines them. At the release this file is
written out (`alembic revision --autogenerate` on an empty database), and does not change any more.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import insert

from openrecycle.db.models import Base, LeadershipRow

revision = "first_release"
down_revision = None


def upgrade() -> None:
    # A table of that name that is there already is somebody else's.
    Base.metadata.create_all(op.get_bind(), checkfirst=False)
    # The only row there ever is: nobody has led yet.
    op.execute(insert(LeadershipRow).values(id=1, term=0, holder="", address="", renewed_at=0.0))
