"""The pages of the console. Importing them registers those that both halves share."""

from exactly_once.admin import alerts, audit, failures, health, operations, overview, processes, traffic, trail  # noqa: F401
