"""May anything be stored now? Asked of a database that could not, and of one that a process begins with."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta

from django.db import connections, transaction

from inbox.store.fresh import begin_fresh
from inbox.store.rows import NewRow

_LOCK_WAIT = timedelta(seconds=2)
_MORE_THAN_A_PAGE = 10_000
"""Bytes: what a full disk has no room for, even where small rows still fit between others."""


def try_to_store(alias: str) -> None:
    """Insert a row as for a delivery, on a new session, and take it back.

    Raises:
        TwinBusy: another session has locked the table.
        django.db.Error: nothing can be stored, for this reason.
    """
    if not connections[alias].in_atomic_block:
        connections[alias].close()
    with transaction.atomic(using=alias):
        begin_fresh(alias, _a_row(), _LOCK_WAIT)
        transaction.set_rollback(True, using=alias)


def _a_row() -> NewRow:
    return NewRow(
        handler="",
        topic="",
        biz_id=f"trial:{uuid.uuid4()}",
        message_id="",
        key="",
        content_type="application/octet-stream",
        body=os.urandom(_MORE_THAN_A_PAGE),
        digest="",
        headers="{}",
        source="",
        correlation_id="",
        causation_id="",
        traceparent="",
        created_at=None,
    )
