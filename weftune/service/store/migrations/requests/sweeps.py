"""Adds the sweep of a submitted job, and the values in which a trial differs."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("submissions", sa.Column("sweep", sa.String(length=64), nullable=True))
    op.add_column("submissions", sa.Column("trial", sa.JSON(), nullable=True))
    op.create_index("submissions_of_sweep", "submissions", ["sweep"], unique=False)
