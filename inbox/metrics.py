"""The metrics of the inbox, a contract: docs/reference/metrics.md describes each of them."""

from exactly_once.metrics import SIZES, counter, gauge, histogram

HANDLED = counter("inbox_handled_total", "Messages whose effect is committed.", "handler")
FAILED_ATTEMPTS = counter("inbox_failed_attempts_total", "Attempts that raised an exception.", "handler")
DEFERRALS = counter("inbox_deferrals_total", "Attempts that a handler deferred with RetryLater.", "handler")
DEAD = counter("inbox_dead_total", "Messages that became dead letters.", "handler")
DUPLICATES = counter("inbox_duplicates_total", "Duplicates that were suppressed.", "handler", "cause")
CONFLICTS = counter("inbox_conflicts_total", "Duplicates with the biz-id of a message and other content.", "handler")
SHED = counter("inbox_shed_total", "Messages that were shed.", "handler")
HANDLER_SECONDS = histogram("inbox_handler_seconds", "Seconds that one call of a handler took, successful or not.", "handler")
BEGIN_SECONDS = histogram(
    "inbox_begin_seconds",
    "Seconds to begin the run of a message, with the wait for a concurrent duplicate.",
    "handler",
    "outcome",
)
LOCKING_SECONDS = histogram(
    "inbox_locking_statement_seconds",
    "Seconds of each statement of a handler that locks rows, with the wait for them.",
    "handler",
)
LAG = histogram("inbox_lag_seconds", "Seconds from the time a message was due until its handler had returned.", "handler")
BATCH_MESSAGES = histogram("inbox_batch_messages", "Messages in one call of a batch handler.", "handler", buckets=SIZES)

MESSAGES = gauge("inbox_messages", "Messages that are not settled, by state.", "database", "state")
OLDEST_DUE = gauge("inbox_oldest_due_seconds", "How long the oldest due message has been waiting; 0 if none is.", "database")
CONSUMERS = gauge("inbox_consumers", "Consumer processes by their heartbeats: working, waiting or silent.", "database", "state")
UNATTENDED = gauge("inbox_unattended_handlers", "Handlers of this project that no live process runs.", "database")
QUEUED = gauge(
    "inbox_queue_messages",
    "Messages in the queues of a handler at the broker, as consumers read them.",
    "database",
    "handler",
)
READABLE = gauge("inbox_table_readable", "1 if the figures of the tables could be read, else 0.", "database")
