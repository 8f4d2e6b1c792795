"""On SQLite, which has one writer, one relay works at a time, under a lease with a fencing token."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from django.db import transaction

from exactly_once.models import Lease
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.loop_leases import TableLease
from outbox.store.claiming import BusyShard, claim_ready
from outbox.store.messages import RelayedMessage

RELAYING = "outbox: relaying"


def in_hand(alias: str) -> set[int]:
    """The positions that the holder of the lease has claimed and not settled."""
    lease = Lease.objects.using(alias).filter(name=RELAYING, expires_at__gt=DatabaseTime()).first()
    return set(lease.in_hand) if lease else set()


class LeaseLost(Exception):
    """The lease expired, for example while this process was suspended. Another relay may have claimed its messages."""


class RelayLease(TableLease):
    """The right of one relay to relay a database until an instant; each claim renews it.

    Its token is a fencing token: settling checks the token first, so a relay whose lease has expired settles nothing.

    Args:
        duration: how long it lasts after it is taken or renewed.
    """

    def __init__(self, alias: str, duration: timedelta) -> None:
        super().__init__(alias, RELAYING)
        self._duration = duration

    def claim(self, shards: Sequence[BusyShard], limit: int, skipped: Mapping[int, str]) -> Sequence[RelayedMessage] | None:
        """Take or renew the lease, and claim ready messages of the `shards`; None while another relay holds the lease.

        Args:
            skipped: see `claim_ready`.
        """
        with transaction.atomic(using=self._alias, durable=True):
            if not self.take(self._duration):
                return None
            rows = claim_ready(self._alias, shards, limit, skipped).rows
            self._own().update(in_hand=[row.position for row in rows if not row.is_blocked])
            return rows

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """A transaction that settles what was claimed.

        Raises:
            LeaseLost: this process does not hold the lease; nothing is written.
        """
        with transaction.atomic(using=self._alias, durable=True):
            if not self._own().filter(expires_at__gt=DatabaseTime()).update(in_hand=[]):
                raise LeaseLost
            yield

    def holder(self) -> str:
        """The name of the process that holds the lease."""
        held = self._rows().filter(expires_at__gt=DatabaseTime())
        return held.values_list("holder", flat=True).first() or "another relay"
