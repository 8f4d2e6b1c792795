"""The atomic guard: a handler must close the `atomic()` blocks that it opens on its thread's connections.

Django keeps a stack of blocks for each connection, and leaving a block leaves the topmost one. With a block left open, leaving
the inbox's own block would only release a savepoint: nothing would be committed, and all later work of this thread would be
part of a transaction that never ends. So the guard removes such blocks, and the handler fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import connections

from inbox.errors import TransactionBroken


class NoneLeftOpen:
    """A context: at its exit, close the blocks that were opened on the connections of this thread.

    Raises:
        TransactionBroken: the handler returned with an open block. Its writes are rolled back, here or by the caller.
    """

    def __enter__(self) -> None:
        self._before = {connection.alias: _depth(connection) for connection in connections.all(initialized_only=True)}

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        left_open = _close(self._before)
        if left_open and error is None:
            raise TransactionBroken(
                f"The handler returned with an open transaction on {', '.join(map(repr, left_open))}, so its writes in it were "
                "rolled back. Use `with transaction.atomic():`."
            )


def abandon(connection: Any) -> None:
    """Close a connection and any transaction that it is in; its next use reconnects."""
    connection.in_atomic_block = False
    connection.atomic_blocks, connection.savepoint_ids = [], []
    connection.close()
    # Django keeps the driver's connection if it was closed inside a transaction, which would then never end.
    connection.connection = None


def _close(before: Mapping[str, tuple[int, int]]) -> list[str]:
    left_open = []
    for connection in connections.all(initialized_only=True):
        blocks, savepoints = before.get(connection.alias, (0, 0))
        # A handler that times out inside atomic() may leave only one of the two, or only the flag.
        higher = len(connection.atomic_blocks) > blocks or len(connection.savepoint_ids) > savepoints
        if not higher and (blocks or not connection.in_atomic_block):
            continue
        left_open.append(connection.alias)
        if blocks:
            # The caller rolls back the enclosing block, including this one.
            del connection.atomic_blocks[blocks:], connection.savepoint_ids[savepoints:]
        else:
            abandon(connection)
    return left_open


def _depth(connection: Any) -> tuple[int, int]:
    return len(connection.atomic_blocks), len(connection.savepoint_ids)
