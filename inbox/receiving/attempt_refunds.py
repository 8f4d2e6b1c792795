"""Attempt refunds: attempts that were counted but could not be made, because their database became unavailable."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable

from inbox.transactions.persistence import DatabaseAway, decided

logger = logging.getLogger(__name__)


class Debts:
    """The pending refunds of many threads, by database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owed: defaultdict[str, deque[Callable[[], None]]] = defaultdict(deque)

    def add(self, alias: str, away: DatabaseAway) -> None:
        if away.owed is not None:
            with self._lock:
                self._owed[alias].append(away.owed)

    def settle(self, alias: str) -> None:
        """Make the pending refunds of this database.

        Raises:
            DatabaseAway: it is still unavailable, and the refunds stay pending.
        """
        while (debt := self._next(alias)) is not None:
            try:
                decided(debt, alias)
            except DatabaseAway as away:
                with self._lock:
                    self._owed[alias].appendleft(debt)
                away.refused = False  # the next message is not the cause
                raise
            except Exception:
                logger.exception("An attempt on %r cannot be given back; its message is due again after a while.", alias)

    def _next(self, alias: str) -> Callable[[], None] | None:
        with self._lock:
            owed = self._owed.get(alias)
            return owed.popleft() if owed else None
