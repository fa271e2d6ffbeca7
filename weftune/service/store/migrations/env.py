"""Alembic's environment, which `weftune.service.store.database` runs at every upgrade."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table=context.config.attributes["version_table"],
    # Each revision and its number are one transaction: one that is killed half-way begins again.
    transactional_ddl=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
