"""The table of messages: partitioned on PostgreSQL, plain elsewhere. See docs/adr/0038-history.md.

    outbox_outboxmessage                      all messages, by day
      outbox_outboxmessage_live               day 0: messages that are not settled; Django's own table, with all its indexes
      outbox_outboxmessage_history            settled messages
        outbox_outboxmessage_2026_11_22       one day of them, created and dropped by the relay's housekeeping
        outbox_outboxmessage_history_default  days without their own partition

History is partitioned again, so that creating and dropping a day locks neither the table nor the live partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from django.db import migrations, transaction

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

AUTOVACUUM = {
    # Every message is inserted into this table and deleted from it. It needs a vacuum after a number of dead rows, not after a
    # fraction of its size; and at full speed, because dead rows slow down the relay.
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 5000,
    "autovacuum_vacuum_cost_delay": 0,
    "autovacuum_analyze_scale_factor": 0.05,
}
SETTLED = "state IN ('published', 'expired', 'cancelled', 'rolled_back')"


def partitioning(table: str) -> list[str]:
    """The statements that make Django's table the live partition of a partitioned table."""
    live, history, sequence = f"{table}_live", f"{table}_history", f"{table}_id_seq"
    return [
        # An identity column cannot be that of a partition (before PostgreSQL 17), so the ids come from a plain sequence.
        f"ALTER TABLE {live} ALTER COLUMN id DROP IDENTITY",
        f"CREATE SEQUENCE {sequence} AS bigint",
        f"ALTER TABLE {live} ALTER COLUMN id SET DEFAULT nextval('{sequence}')",
        f"CREATE TABLE {table} (LIKE {live} INCLUDING DEFAULTS INCLUDING CONSTRAINTS) PARTITION BY RANGE (day)",
        f"ALTER SEQUENCE {sequence} OWNED BY {table}.id",
        f"ALTER TABLE {table} ATTACH PARTITION {live} FOR VALUES FROM (0) TO (1)",
        f"ALTER TABLE {live} SET ({', '.join(f'{name} = {value}' for name, value in AUTOVACUUM.items())})",
        # Because of this constraint a query for other states excludes history, and a settled row that is made ready by hand
        # without its day is refused, instead of never being sent.
        f"CREATE TABLE {history} PARTITION OF {table} (CONSTRAINT outbox_history_is_settled CHECK ({SETTLED})) "
        "FOR VALUES FROM (1) TO (MAXVALUE) PARTITION BY RANGE (day)",
        f"CREATE INDEX outbox_history_message_id ON {history} (message_id)",
        f"CREATE INDEX outbox_history_biz_id ON {history} (topic, biz_id)",
        f"CREATE INDEX outbox_history_chain ON {history} (correlation_id, id) WHERE correlation_id <> message_id::varchar",
        # A published message is found by its message id or biz-id. Only messages that can be restored need a fast search by id.
        f"CREATE INDEX outbox_history_given_up ON {history} (id) WHERE state <> 'published'",
        f"CREATE INDEX outbox_history_id ON {history} USING brin (id) WITH (pages_per_range = 32, autosummarize = on)",
        # It also detects messages that a transaction with an older snapshot cannot see, see `store.unique`.
        f"CREATE UNIQUE INDEX outbox_history_unique ON {history} (topic, biz_id, day) WHERE is_unique AND state = 'published'",
        f"CREATE TABLE {history}_default PARTITION OF {history} DEFAULT",
    ]


class CreateMessages(migrations.CreateModel):
    """Create the model's table, on PostgreSQL in partitions."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = to_state.apps.get_model(app_label, self.name)
        alias = schema_editor.connection.alias
        if schema_editor.connection.vendor != "postgresql" or not self.allow_migrate_model(alias, model):
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        table = model._meta.db_table
        with _called(model, f"{table}_live"):
            schema_editor.create_model(model)
        for statement in partitioning(table):
            schema_editor.execute(statement, params=None)


def partition_plain_table(connection: BaseDatabaseWrapper, table: str) -> None:
    """Partition a table that Django has created without migrations, for example for tests that run without them."""
    with connection.cursor() as cursor, transaction.atomic(using=connection.alias):
        cursor.execute("SELECT relkind = 'r' FROM pg_class WHERE oid = to_regclass(%s)", [table])
        if cursor.fetchone() == (True,):
            for statement in (f"ALTER TABLE {table} RENAME TO {table}_live", *partitioning(table)):
                cursor.execute(statement)


@contextmanager
def _called(model: Any, table: str) -> Iterator[None]:
    ours = model._meta.db_table
    model._meta.db_table = table
    try:
        yield
    finally:
        model._meta.db_table = ours
