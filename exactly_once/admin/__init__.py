"""The pages of the console. Importing them registers those that both halves share."""

from exactly_once.admin import alerts, audit, busy, failures, flow, operations, processes, traffic  # noqa: F401
