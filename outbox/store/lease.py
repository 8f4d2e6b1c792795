"""A lease with a fencing token, for work of one process: relaying on SQLite, and the timer on PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q

from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import NAME_LENGTH
from outbox.models import RelayLease
from outbox.store.claiming import NOTHING_SKIPPED, UNBOUNDED_BYTES, BusyShard, RelayedMessage, claim_ready
from outbox.store.settling import SettledApart, Settlement, settle, settle_apart

_RELAY = "relay"


def in_hand(alias: str) -> set[int]:
    """The positions that the holder of the lease `relay` has claimed and not settled."""
    lease = RelayLease.objects.using(alias).filter(name=_RELAY, expires_at__gt=DatabaseTime()).first()
    return set(lease.in_hand) if lease else set()


class LeaseLost(Exception):
    """The lease expired, for example while this process was suspended. Another relay may have claimed its messages."""


class Lease:
    """The right of one process to do some work until an instant.

    The lease `relay`, for a database with one writer, is renewed by each claim. Its token is a fencing token: settling checks
    the token first, so a relay whose lease has expired settles nothing.

    Args:
        duration: how long the lease lasts after it is taken or renewed.
        name: of the lease.
    """

    def __init__(self, alias: str, duration: timedelta, *, name: str = _RELAY) -> None:
        self._alias = alias
        self._name = name
        self._duration = duration
        self._token = uuid.uuid4()

    def claim(
        self,
        shards: Sequence[BusyShard],
        limit: int,
        skipped: Mapping[int, str] = NOTHING_SKIPPED,
        most_bytes: int = UNBOUNDED_BYTES,
    ) -> Sequence[RelayedMessage] | None:
        """Take or renew the lease, and claim ready messages of the `shards`; None while another relay holds the lease.

        Args:
            skipped, most_bytes: see `claim_ready`.
        """
        with transaction.atomic(using=self._alias, durable=True):
            if not self.take():
                return None
            rows = claim_ready(self._alias, shards, limit, skipped, most_bytes).rows
            self._rows().update(in_hand=[row.position for row in rows if not row.is_blocked])
            return rows

    def settle(self, settlement: Settlement) -> int:
        """`settle`, if this process still holds the lease.

        Raises:
            LeaseLost: this process does not hold the lease; nothing was written.
        """
        with self._fenced():
            return settle(self._alias, settlement)

    def settle_apart(self, settlement: Settlement, keys: Mapping[int, str]) -> SettledApart:
        """`settle_apart`, if this process still holds the lease.

        Raises:
            LeaseLost: this process does not hold the lease; nothing was written.
        """
        with self._fenced():
            return settle_apart(self._alias, settlement, keys)

    @contextmanager
    def _fenced(self) -> Iterator[None]:
        with transaction.atomic(using=self._alias, durable=True):
            if not self._rows().filter(token=self._token, expires_at__gt=DatabaseTime()).update(in_hand=[]):
                raise LeaseLost
            yield

    def release(self) -> None:
        """Release the lease, so that another process can take it at once."""
        self._rows().filter(token=self._token).delete()

    def holder(self) -> str:
        """The name of the process that holds the lease."""
        return self._rows().values_list("holder", flat=True).first() or "another relay"

    def take(self) -> bool:
        """Take the lease, or renew it. False: another process holds it."""
        mine = {"token": self._token, "holder": process_name()[:NAME_LENGTH], "expires_at": DatabaseTime(self._duration)}
        # No lease lasts that long: the clock was set back after its holder, which would renew it, had died.
        is_ahead = Q(expires_at__gt=DatabaseTime(2 * self._duration))
        free = Q(token=self._token) | Q(expires_at__lte=DatabaseTime()) | is_ahead
        if self._rows().filter(free).update(**mine):
            return True
        _, created = RelayLease.objects.using(self._alias).get_or_create(name=self._name, defaults=mine)
        return created

    def _rows(self) -> Any:
        return RelayLease.objects.using(self._alias).filter(name=self._name)
