"""A bank and a stock service in other hands: what they have done is in files, and RUNS has a line for each time.

They recognise an idempotency key. A call without one is another order.
"""

import os
import uuid
from pathlib import Path

from tests.support.crash.failpoints import record


class _Company:
    def _does(self, what, idempotency_key):
        done = Path(os.environ["RUNS"]).with_name(f"{what} {idempotency_key or uuid.uuid4()}")
        if not done.exists():
            done.touch()
            record("RUNS", what)
        return done.name


class Bank(_Company):
    def charge(self, total, idempotency_key=None):
        return {"reference": self._does("charged", idempotency_key)}


class StockService(_Company):
    def reserve(self, sku, idempotency_key=None):
        return {"shelf": self._does("reserved", idempotency_key)}
