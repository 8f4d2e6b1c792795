"""Handlers of the kinds that no broker but RabbitMQ takes, or that need a lease, beside those of `worker`."""

NAMED_AND_ORDERED = "named.ordered"
NAMED_AND_LEASED = "named.leased"
