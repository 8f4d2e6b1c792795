"""Helpers for the tests of code that publishes.

    from outbox.testing import assert_published, run_relay, travel

    place_order("1001", "pen")
    assert_published("shop.order.placed", payload__order="1001")
    run_relay()

They read and relay the real rows of the test's database, in the test's own transaction if it has one. So they work in a
`TestCase`, in a `TransactionTestCase` and with pytest-django. They use no broker.

The names below are public. `outbox.pytest_plugin` provides them as fixtures, with the prefix `outbox_`.
"""

from exactly_once.testing.database import travel
from outbox.testing.messages import CapturedMessage, assert_nothing_published, assert_published, published
from outbox.testing.relaying import SentMessage, run_relay

__all__ = [
    "CapturedMessage",
    "SentMessage",
    "assert_nothing_published",
    "assert_published",
    "published",
    "run_relay",
    "travel",
]
