"""Attempt refunds: attempts that were counted but could not be made, because their database became unavailable.

The runner, or the next task, makes them before it claims a message.
"""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable

from inbox.transactions.persistence import DatabaseUnavailable, committed

logger = logging.getLogger(__name__)


class AttemptRefunds:
    """The refunds of many threads.

    Attributes:
        pending: by database; empty if there has been none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pending: defaultdict[str, deque[Callable[[], None]]] = defaultdict(deque)

    def add(self, alias: str, refund: Callable[[], None]) -> None:
        with self._lock:
            self.pending[alias].append(refund)

    def settle(self, alias: str) -> None:
        """Make the pending refunds of this database.

        Raises:
            DatabaseUnavailable: it is still unavailable, and the refunds stay pending.
        """
        while (refund := self._next(alias)) is not None:
            try:
                committed(refund, alias)
            except DatabaseUnavailable as outage:
                with self._lock:
                    self.pending[alias].appendleft(refund)
                outage.refused = False  # the next message is not the cause
                raise
            except Exception:
                logger.exception(
                    "inbox: an attempt on %r could not be refunded; its message is due again after REDELIVERY_AFTER.", alias
                )

    def _next(self, alias: str) -> Callable[[], None] | None:
        with self._lock:
            refund = self.pending.get(alias)
            return refund.popleft() if refund else None


refunds = AttemptRefunds()
