"""The connection of a handler that runs outside any transaction: each of its statements commits by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from django.db import connections

from inbox.errors import TransactionBroken
from inbox.transactions.atomic_guard import abandon, none_left_open
from outbox.database.connections import has_begun


def is_inside_a_transaction(alias: str) -> bool:
    """Is there an `atomic()` on this connection, other than that of a test case?"""
    # The same check as Django's atomic(durable=True).
    return any(not getattr(block, "_from_testcase", False) for block in connections[alias].atomic_blocks)


@contextmanager
def autocommit(alias: str) -> Iterator[None]:
    """Refuse a transaction on `alias` that the handler leaves open: its writes are not committed, and our next write would join
    it, also after a failure.

    Raises:
        TransactionBroken: one was open. The connection is closed, and that transaction rolled back.
    """
    try:
        with none_left_open():
            yield
    except BaseException:
        with suppress(TransactionBroken):
            _refuse_left_open(alias)
        raise
    _refuse_left_open(alias)


def _refuse_left_open(alias: str) -> None:
    """Refuse a transaction that Django does not know of."""
    connection = connections[alias]
    in_a_test_case = connection.in_atomic_block
    if connection.connection is None or in_a_test_case:
        return
    if not connection.autocommit or has_begun(connection):
        abandon(connection)
        raise TransactionBroken(
            "The handler returned and left a transaction open, so what it wrote in it was rolled back. Use "
            "`with transaction.atomic():`."
        )
