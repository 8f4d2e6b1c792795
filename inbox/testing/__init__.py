"""Helpers for the tests of handlers.

    from inbox.testing import assert_handled, deliver, make_message, run_handler

    run_handler(reserve_stock, {"order": "1001", "sku": "pen"})

    deliver(make_message("shop.order.placed", {"order": "1001", "sku": "pen"}), times=2)
    assert_handled("shop.order.placed", payload__order="1001", duplicates=1)

They use the rows of the test's database, in the test's own transaction if it has one, and no broker. So they work in a
`TestCase`, in a `TransactionTestCase` and with pytest-django. Only `assert_effect_once` needs committed rows, because it kills
processes.

To relay what a test publishes and to run its handlers, see `outbox.testing.run_relay`. The names below are public.
`inbox.pytest_plugin` provides them as fixtures, with the prefix `inbox_`.
"""

from exactly_once.testing.database import travel
from inbox.testing.crashing import assert_effect_once
from inbox.testing.deliveries import deliver, drain, redeliver
from inbox.testing.handler_calls import run_handler
from inbox.testing.messages import ReceivedMessage, assert_duplicate, assert_handled, dead, handled, make_message
from inbox.testing.observing import HandlerFailed

__all__ = [
    "HandlerFailed",
    "ReceivedMessage",
    "assert_duplicate",
    "assert_effect_once",
    "assert_handled",
    "dead",
    "deliver",
    "drain",
    "handled",
    "make_message",
    "redeliver",
    "run_handler",
    "travel",
]
