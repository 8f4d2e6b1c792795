"""What a handler begins, it must end: the `atomic()` blocks of its thread's connections.

Django keeps a stack of them for each connection, and whoever leaves one leaves the topmost. With a block left open, leaving the
inbox's own would only release a savepoint: nothing would be committed, and all that this thread does afterwards would be part
of a transaction that never ends. So what is left open is taken off the stacks, and the handler has failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.db import connections

from inbox.errors import TransactionBroken


@contextmanager
def none_left_open() -> Iterator[None]:
    """Leave every connection of this thread in as many blocks as it is in now.

    Raises:
        TransactionBroken: the block has ended and left one open. What was written in it is rolled back, here or by the caller.
    """
    before = {connection.alias: _depth(connection) for connection in connections.all(initialized_only=True)}
    try:
        yield
    except BaseException:
        _close(before)
        raise
    if left_open := _close(before):
        raise TransactionBroken(
            f"The handler returned and left a transaction open on {', '.join(map(repr, left_open))}, so what it wrote in it "
            "was rolled back. Use `with transaction.atomic():`."
        )


def abandon(connection: Any) -> None:
    """Close a connection with whatever transaction it is in; its next use connects anew."""
    connection.in_atomic_block = False
    connection.atomic_blocks, connection.savepoint_ids = [], []
    connection.close()
    # It stays when somebody had closed it inside a transaction, which nobody else will end now.
    connection.connection = None


def _close(before: Mapping[str, tuple[int, int]]) -> list[str]:
    left_open = []
    for connection in connections.all(initialized_only=True):
        blocks, savepoints = before.get(connection.alias, (0, 0))
        # A handler that is struck by its timeout inside atomic() may leave one of the two, or no more than the flag.
        higher = len(connection.atomic_blocks) > blocks or len(connection.savepoint_ids) > savepoints
        if not higher and (blocks or not connection.in_atomic_block):
            continue
        left_open.append(connection.alias)
        if blocks:
            # Whoever began the block around it rolls back, and this with it.
            del connection.atomic_blocks[blocks:], connection.savepoint_ids[savepoints:]
        else:
            abandon(connection)
    return left_open


def _depth(connection: Any) -> tuple[int, int]:
    return len(connection.atomic_blocks), len(connection.savepoint_ids)
