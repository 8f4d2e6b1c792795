"""What becomes of the requests of idempotent views."""

from exactly_once.metrics import counter

REQUESTS = counter(
    "exactly_once_idempotent_requests_total",
    "Requests with an Idempotency-Key, by outcome: stored, failed, replayed, running, mismatch or invalid.",
    "view",
    "outcome",
)
