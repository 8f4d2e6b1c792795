"""The table of messages: partitioned on PostgreSQL, plain elsewhere. See decisions/0046-inbox-history.md."""

from __future__ import annotations

from typing import Any

from exactly_once.sql.partitions import CreatePartitioned, Layout

LAYOUT = Layout(
    prefix="inbox",
    settled="state IN ('done', 'skipped', 'shed')",
    key="id",
    indexes=(
        # A message is inserted into history with its receipt, so every index of all rows costs each delivery.
        "CREATE INDEX inbox_history_handler ON {history} (handler, id)",
        "CREATE INDEX inbox_history_message_id ON {history} (message_id)",
        "CREATE INDEX inbox_history_chain ON {history} (correlation_id, id) "
        "WHERE correlation_id <> '' AND correlation_id <> message_id",
        "CREATE INDEX inbox_history_unhandled ON {history} (state, id) WHERE state <> 'done'",
        "CREATE INDEX inbox_history_duplicates ON {history} (id) WHERE duplicates > 0",
        "CREATE INDEX inbox_history_conflicts ON {history} (handler, id) WHERE conflicts > 0",
        "CREATE INDEX inbox_history_replaces ON {history} (replaces_id) WHERE replaces_id IS NOT NULL",
    ),
)


class CreateMessages(CreatePartitioned):
    layout = LAYOUT

    def defer(self, schema_editor: Any, live: str) -> None:
        # After all other indexes. Without statistics, as after a vacuum beside a large open transaction, all indexes that
        # have `id` cost the same, and PostgreSQL takes the newest: `inbox_handler`, all of it for each message.
        remade = f"DROP CONSTRAINT {live}_pkey, ADD CONSTRAINT {live}_pkey PRIMARY KEY (id)"
        schema_editor.deferred_sql.append(f"ALTER TABLE {live} {remade}")
