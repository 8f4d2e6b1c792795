"""The connection of a handler that has no transaction around it: each of its statements commits by itself."""

from __future__ import annotations

from typing import Any

from django.db import connections

from inbox.errors import TransactionBroken


def is_inside_a_transaction(alias: str) -> bool:
    """Is there an `atomic()` on this connection, other than that of a test case?"""
    # As Django's own atomic(durable=True) looks at it.
    return any(not getattr(block, "_from_testcase", False) for block in connections[alias].atomic_blocks)


def refuse_left_open(alias: str) -> None:
    """A handler that began a transaction behind Django's back and left it open has written nothing, and would take our own
    next write into it.

    Raises:
        TransactionBroken: it has. The connection is closed, and that transaction rolled back.
    """
    connection = connections[alias]
    inside = is_inside_a_transaction(alias)
    in_a_test_case = connection.in_atomic_block and not inside
    if connection.connection is None or in_a_test_case:
        return
    if inside or not connection.autocommit or _is_open(connection.vendor, connection.connection):
        # An atomic() that was entered and never left would keep the connection from being closed.
        connection.in_atomic_block = False
        connection.close()
        raise TransactionBroken(
            "The handler returned and left a transaction open, so what it wrote in it was rolled back. Use "
            "`with transaction.atomic():`."
        )


def _is_open(vendor: str, driver: Any) -> bool:
    if vendor == "sqlite":
        return bool(driver.in_transaction)
    # Of psycopg 3 and of psycopg2; 0 is idle.
    return int(driver.info.transaction_status) != 0
