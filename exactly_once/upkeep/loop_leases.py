"""Leases in a table, for work that one process of a project does at a time.

The alerts of an app and its housekeeping; on PostgreSQL the timer.
"""

import uuid
from datetime import timedelta

from django.db import DatabaseError, InterfaceError
from django.db.models import Q, QuerySet

from exactly_once.models import Lease
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import NAME_LENGTH

logger = escaping_logger(__name__)


class TableLease:
    """A lease on some work in one database; an instance is one process that asks for it.

    Args:
        name: of the work: its app and what it is.
    """

    def __init__(self, alias: str, name: str) -> None:
        self._alias = alias
        self._name = name
        self._token = uuid.uuid4()

    def take(self, duration: timedelta) -> bool:
        """Take the lease, or renew it. False: another process holds it."""
        mine = {
            "token": self._token,
            "holder": process_name()[:NAME_LENGTH],
            "valid_from": DatabaseTime(-duration),
            "expires_at": DatabaseTime(duration),
        }
        # Before `valid_from`, the clock was set back after its holder had died, which would renew it. The row has that instant,
        # because the holder may have been started with another duration.
        is_over = Q(expires_at__lte=DatabaseTime()) | Q(valid_from__gt=DatabaseTime())
        if self._rows().filter(Q(token=self._token) | is_over).update(**mine):
            return True
        _, created = Lease.objects.using(self._alias).get_or_create(name=self._name, defaults=mine)
        return created

    def record_done(self) -> None:
        """Record that the work was done now."""
        self._own().update(done_at=DatabaseTime())

    def release(self) -> None:
        """Let another process take it at once. It never raises: a lease that is not released expires."""
        try:
            self._own().update(expires_at=DatabaseTime())
        except (DatabaseError, InterfaceError) as error:
            logger.debug("The lease %r on %r was not released: %s", self._name, self._alias, error)

    def _own(self) -> QuerySet[Lease]:
        return self._rows().filter(token=self._token)

    def _rows(self) -> QuerySet[Lease]:
        return Lease.objects.using(self._alias).filter(name=self._name)
