"""Which database a table is in."""

from __future__ import annotations

from typing import Any

from django.db import DEFAULT_DB_ALIAS
from django.db.models import Model

SAVINGS = "savings"
_TABLES = {("banks", "savingsaccount"), ("banks", "withdrawal")}


class BanksRouter:
    """The tables of the savings bank are in its own database, and nothing else is."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str:
        return _home(model._meta.app_label, model._meta.model_name)

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **hints: Any) -> bool:
        return db == _home(app_label, model_name)


def _home(app_label: str, model_name: str | None) -> str:
    return SAVINGS if (app_label, model_name) in _TABLES else DEFAULT_DB_ALIAS
