"""A trial write: can a database store now? Made after a failure to store, and when a process first uses the database."""

import os
import uuid

from django.db import connections, transaction

from inbox.store.arrivals import begin_fresh
from inbox.store.dialect import LONGEST_LOCK_WAIT
from inbox.store.rows import NewRow, with_body_only

_LARGER_THAN_A_PAGE = 10_000
"""In bytes. On a full disk small rows may still fit into existing pages; this one does not."""


def try_to_store(alias: str) -> None:
    """Insert a row as for a delivery, on a new session, and roll it back.

    Raises:
        ConcurrentDuplicate: another session has locked the table.
        django.db.Error: nothing can be stored, for this reason.
    """
    if not connections[alias].in_atomic_block:
        connections[alias].close()
    with transaction.atomic(using=alias):
        begin_fresh(alias, [_trial_row()], LONGEST_LOCK_WAIT)
        transaction.set_rollback(True, using=alias)


def _trial_row() -> NewRow:
    return with_body_only("", "", f"trial:{uuid.uuid4()}", os.urandom(_LARGER_THAN_A_PAGE), digest="")
