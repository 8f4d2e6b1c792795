"""The pages of the console. Importing them registers those that both halves share."""

from exactly_once.admin import alerts, audit, failures, flow, health, operations, overview, processes, traffic  # noqa: F401
