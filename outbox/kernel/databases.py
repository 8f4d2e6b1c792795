"""Which databases both halves can keep their promises on."""

from __future__ import annotations

from django.db import connections, router
from django.db.models import Model

SUPPORTED_VENDORS = ("postgresql", "sqlite")
UNSUPPORTED_HINT = "Use PostgreSQL, or SQLite to begin with."


def unsupported(model: type[Model], aliases: list[str]) -> list[str]:
    """Those of `aliases` that would hold `model` but cannot keep the promises."""
    return [alias for alias in _holding(model, aliases) if connections[alias].vendor not in SUPPORTED_VENDORS]


def deferred_sqlite(model: type[Model]) -> list[str]:
    """SQLite databases for `model` whose transactions begin as readers: two that want to write then fail at once."""
    return [
        alias
        for alias in _holding(model, list(connections))
        if connections[alias].vendor == "sqlite"
        and connections[alias].settings_dict["OPTIONS"].get("transaction_mode") not in {"IMMEDIATE", "EXCLUSIVE"}
    ]


def immediate_hint(alias: str) -> str:
    """What to write into the settings instead."""
    return (
        f"Set DATABASES[{alias!r}]['OPTIONS'] = {{'transaction_mode': 'IMMEDIATE', 'timeout': 20, 'init_command': "
        "'PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;'}."
    )


def _holding(model: type[Model], aliases: list[str]) -> list[str]:
    return [alias for alias in aliases if router.allow_migrate_model(alias, model)]
