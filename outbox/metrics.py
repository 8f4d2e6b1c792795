"""The metrics of the outbox, a contract: docs/reference/metrics.md describes each of them."""

from exactly_once.metrics import SIZES, counter, gauge, histogram

PUBLISHED = counter("outbox_published_total", "Messages that the broker has confirmed.", "topic")
FAILED_ATTEMPTS = counter(
    "outbox_failed_attempts_total", "Attempts that failed: nacked, returned, forbidden, refused or damaged.", "topic"
)
DEAD = counter("outbox_dead_total", "Messages that became dead: out of attempts, or damaged.", "topic")
EXPIRED = counter("outbox_expired_total", "Messages that expired before they could be published.", "topic")
LAG = histogram("outbox_lag_seconds", "Seconds from the time a message was due until the broker had confirmed it.")
PASS_SECONDS = histogram("outbox_pass_seconds", "Seconds that a pass with messages took, from claim to commit.")
PASS_MESSAGES = histogram("outbox_pass_messages", "Messages that a pass claimed.", buckets=SIZES)

MESSAGES = gauge("outbox_messages", "Messages that are not settled, by state.", "database", "state")
OLDEST_DUE = gauge("outbox_oldest_due_seconds", "How long the oldest due message has been waiting; 0 if none is.", "database")
PENDING_CALLBACKS = gauge("outbox_pending_callbacks", "Callbacks that are to be called.", "database")
PAUSED_MESSAGES = gauge("outbox_paused_messages", "Messages of a paused topic.", "database", "topic")
RELAYS = gauge("outbox_relays", "Relay processes by their heartbeats: working, waiting or silent.", "database", "state")
READABLE = gauge("outbox_table_readable", "1 if the figures of the tables could be read, else 0.", "database")
