"""What is owed to a database that became unavailable: attempts that were counted and could not be made are to be given back."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable

from inbox.transactions.persistence import DatabaseAway, decided

logger = logging.getLogger(__name__)


class Debts:
    """What many threads owe, by database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owed: defaultdict[str, deque[Callable[[], None]]] = defaultdict(deque)

    def add(self, alias: str, away: DatabaseAway) -> None:
        if away.owed is not None:
            with self._lock:
                self._owed[alias].append(away.owed)

    def settle(self, alias: str) -> None:
        """Do what is owed to this database, and what is still owed another time.

        Raises:
            DatabaseAway: it is still unavailable.
        """
        while (debt := self._next(alias)) is not None:
            try:
                decided(debt, alias)
            except DatabaseAway as away:
                with self._lock:
                    self._owed[alias].appendleft(debt)
                away.refused = False  # what comes next is not to blame
                raise
            except Exception:
                logger.exception("An attempt on %r cannot be given back; its message is due again after a while.", alias)

    def _next(self, alias: str) -> Callable[[], None] | None:
        with self._lock:
            owed = self._owed.get(alias)
            return owed.popleft() if owed else None
