"""What the inbox needs to handle messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exactly_once.cli.health import Check, check_database, check_processes, of_this_host
from inbox.handlers.registry import registry
from inbox.store import heartbeats

KIND = "consumer"


def service_checks(alias: str) -> list[Check]:
    """Are the messages for the handlers of this database handled, by a consumer on any host?"""
    return _checks(alias, everywhere=True)


def process_checks(alias: str) -> list[Check]:
    """Do the consumers of this host receive for all handlers?"""
    return _checks(alias, everywhere=False)


def _checks(alias: str, *, everywhere: bool) -> list[Check]:
    database = check_database(alias, "inbox")
    if not database.is_ok:
        return [database]
    rows = list(heartbeats.consumers.rows(alias))
    chosen = rows if everywhere else of_this_host(rows, KIND)
    return [database, *check_processes("consumers", chosen), _check_handlers(alias, chosen)]


def _check_handlers(alias: str, rows: Sequence[Any]) -> Check:
    """Does a live process run each handler of this project on this database?"""
    attended = {name for row in rows if not row.silent for name in row.facts["handlers"]}
    missing = sorted(handler.name for handler in registry.all() if handler.using == alias and handler.name not in attended)
    if not missing:
        return Check(name="handlers")
    return Check(name="handlers", status="unattended", detail=", ".join(missing))
