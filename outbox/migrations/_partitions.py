"""The table of messages: partitioned on PostgreSQL, plain elsewhere. See decisions/0033-history.md."""

from __future__ import annotations

from exactly_once.sql.partitions import CreatePartitioned, Layout

LAYOUT = Layout(
    prefix="outbox",
    settled="state IN ('published', 'expired', 'cancelled', 'rolled_back')",
    key="message_id",
    indexes=(
        "CREATE INDEX outbox_history_biz_id ON {history} (topic, biz_id)",
        "CREATE INDEX outbox_history_chain ON {history} (correlation_id, id) WHERE correlation_id <> message_id::varchar",
        # A published message is found by its message id or biz-id. Only messages that can be restored need a fast search by id.
        "CREATE INDEX outbox_history_given_up ON {history} (id) WHERE state <> 'published'",
        "CREATE INDEX outbox_history_id ON {history} USING brin (id) WITH (pages_per_range = 32, autosummarize = on)",
    ),
    is_numbered=True,
)


class CreateMessages(CreatePartitioned):
    layout = LAYOUT
