"""The pages of the console. Importing them registers those that both halves share."""

from exactly_once.console.admin import (  # noqa: F401
    alerts,
    audit,
    database_health,
    failure_groups,
    operations,
    overview,
    processes,
    traffic,
    trail,
)
