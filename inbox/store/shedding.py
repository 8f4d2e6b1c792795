"""Messages that are not handled because too many wait."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.db import transaction

from inbox.models import State
from inbox.store.rows import NewRow
from inbox.store.together import begin_together
from inbox.store.trail import note


def store_shed(alias: str, rows: Sequence[NewRow], reason: str, twin_timeout: timedelta) -> list[NewRow]:
    """∅ → shed for many at once, in a transaction of their own; which of them. The others are duplicates.

    Raises:
        TwinBusy: another transaction is inserting one of them and did not end within `twin_timeout`.
    """
    # In one order everywhere: two processes that shed copies of the same messages must not wait for each other in a ring.
    ordered = sorted(rows, key=lambda row: row.biz_id)
    with transaction.atomic(using=alias, durable=True):
        begun = begin_together(alias, ordered, twin_timeout, state=State.SHED, reason=reason)
        if begun is None:
            return []
        guard, shed = begun
        note(alias, guard.rows, was="", reason=reason)
    return shed
