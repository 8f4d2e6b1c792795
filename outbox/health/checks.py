"""What the outbox needs to carry messages."""

from __future__ import annotations

from exactly_once.cli.health import Check, check_database, check_processes, of_this_host
from outbox.store import heartbeats

KIND = "relay"


def service_checks(alias: str) -> list[Check]:
    """Is the outbox of this database relayed, by a relay on any host?"""
    return _checks(alias, everywhere=True)


def process_checks(alias: str) -> list[Check]:
    """Do the relays of this host relay it?"""
    return _checks(alias, everywhere=False)


def _checks(alias: str, *, everywhere: bool) -> list[Check]:
    database = check_database(alias, "outbox")
    if not database.is_ok:
        return [database]
    rows = list(heartbeats.relays.rows(alias))
    return [database, *check_processes("relays", rows if everywhere else of_this_host(rows, KIND))]
