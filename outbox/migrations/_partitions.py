"""The table of messages: partitioned on PostgreSQL, plain elsewhere. See docs/adr/0038-history.md."""

from __future__ import annotations

from exactly_once.sql.partitions import CreatePartitioned, Layout

LAYOUT = Layout(
    prefix="outbox",
    settled="state IN ('published', 'expired', 'cancelled', 'rolled_back')",
    # Every message is inserted into this table and deleted from it. It needs a vacuum after a number of dead rows, not after a
    # fraction of its size; and at full speed, because dead rows slow down the relay.
    storage=(
        "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0, "
        "autovacuum_analyze_scale_factor = 0.05"
    ),
    indexes=(
        "CREATE INDEX outbox_history_message_id ON {history} (message_id)",
        "CREATE INDEX outbox_history_biz_id ON {history} (topic, biz_id)",
        "CREATE INDEX outbox_history_chain ON {history} (correlation_id, id) WHERE correlation_id <> message_id::varchar",
        # A published message is found by its message id or biz-id. Only messages that can be restored need a fast search by id.
        "CREATE INDEX outbox_history_given_up ON {history} (id) WHERE state <> 'published'",
        "CREATE INDEX outbox_history_id ON {history} USING brin (id) WITH (pages_per_range = 32, autosummarize = on)",
        # It also detects messages that a transaction with an older snapshot cannot see, see `store.unique`.
        "CREATE UNIQUE INDEX outbox_history_unique ON {history} (topic, biz_id, day) WHERE is_unique AND state = 'published'",
    ),
    is_numbered=True,
)


class CreateMessages(CreatePartitioned):
    layout = LAYOUT
