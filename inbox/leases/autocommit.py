"""The connection of a handler that runs outside any transaction: each of its statements commits by itself."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from django.db import connections

from exactly_once.sql.connections import has_begun
from inbox.errors import TransactionBroken
from inbox.transactions.sessions import NoneLeftOpen, abandon


def is_inside_a_transaction(alias: str) -> bool:
    """Is there an `atomic()` on this connection, other than that of a test case?"""
    # The same check as Django's atomic(durable=True).
    return any(not getattr(block, "_from_testcase", False) for block in connections[alias].atomic_blocks)


@contextmanager
def autocommit(alias: str) -> Iterator[None]:
    """Refuse a transaction on `alias` that the handler leaves open: the inbox's next write would become part of it.

    Raises:
        TransactionBroken: a transaction was open. It is rolled back, and the connection is closed.
    """
    try:
        with NoneLeftOpen():
            yield
    except BaseException:
        with suppress(TransactionBroken):
            _refuse_left_open(alias)
        raise
    _refuse_left_open(alias)


def _refuse_left_open(alias: str) -> None:
    """Refuse an open transaction, including one that Django does not know."""
    connection = connections[alias]
    in_a_test_case = connection.in_atomic_block
    if connection.connection is None or in_a_test_case:
        return
    if not connection.autocommit or has_begun(connection):
        abandon(connection)
        raise TransactionBroken(
            "The handler returned with an open transaction, so its writes in it were rolled back. Use "
            "`with transaction.atomic():`."
        )
