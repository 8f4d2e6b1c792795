"""Leases in a table, for work that one process of a project does at a time: the alerts of an app, its housekeeping."""

from __future__ import annotations

import uuid
from datetime import timedelta

from django.db.models import Q

from exactly_once.models import Lease
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import NAME_LENGTH


class TableLease:
    """A lease on some work in one database; an instance is one process that asks for it.

    Args:
        name: of the work.
    """

    def __init__(self, alias: str, name: str) -> None:
        self._alias = alias
        self._name = name
        self._token = uuid.uuid4()

    def take(self, duration: timedelta) -> bool:
        """Take the lease, or renew it. False: another process holds it."""
        leases = Lease.objects.using(self._alias)
        mine = {"token": self._token, "holder": process_name()[:NAME_LENGTH], "expires_at": DatabaseTime(duration)}
        if leases.filter(Q(token=self._token) | Q(expires_at__lte=DatabaseTime()), name=self._name).update(**mine):
            return True
        _, created = leases.get_or_create(name=self._name, defaults=mine)
        return bool(created)

    def record_done(self) -> None:
        """Record that the work was done now."""
        Lease.objects.using(self._alias).filter(name=self._name, token=self._token).update(done_at=DatabaseTime())

    def release(self) -> None:
        """Let another process take it at once."""
        Lease.objects.using(self._alias).filter(token=self._token).update(expires_at=DatabaseTime())
