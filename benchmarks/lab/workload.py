"""The fixed workload: the form of every message unless a benchmark changes it.

Message number n has the biz-id `order-<n>` and a payload that is 512 bytes as JSON. Numbers begin at 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

TOPIC = "shop.order.placed"
TOPICS = (TOPIC, *(f"shop.reminder.{kind}" for kind in range(1, 8)))
"""What scheduled messages are about, in turn."""
NEXT_TOPIC = "shop.order.noted"
"""What a handler that publishes publishes."""
EXCHANGE = "outbox"
QUEUE = "benchmark"
HANDLER = "shop.write_effect"
"""The name of the handler in `benchmarks.shop`, whichever it is."""
PAST = "past-"
"""Begins the biz-id of every message that an inbox remembers from before a benchmark."""
CUSTOMERS = 1000
ACCOUNTS = 10_000
"""What business transactions change: so many that they seldom wait for each other."""
BODY_BYTES = 512

Keys = Callable[[int], str]
"""The ordering key of message number n; "" promises no order."""
Topics = Callable[[int], str]
"""The topic of message number n."""
Due = Callable[[int], float]
"""When message number n is due: seconds, by the database's clock."""


def payload(number: int) -> dict[str, Any]:
    filler = BODY_BYTES - len(serialised({"order": number, "filler": ""}))
    return {"order": number, "filler": "x" * filler}


def serialised(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def biz_id(number: int) -> str:
    return f"order-{number}"


def number_of(biz_id: str) -> int:
    return int(biz_id.removeprefix("order-"))


def many_customers(number: int) -> str:
    """A thousand keys in turn."""
    return f"customer-{number % CUSTOMERS}"


def one_customer(number: int) -> str:
    """One hot key."""
    return "customer-0"


def no_customer(number: int) -> str:
    """No key, no order."""
    return ""


def one_topic(number: int) -> str:
    """All are about the same."""
    return TOPIC


def many_topics(number: int) -> str:
    """Several topics in turn."""
    return TOPICS[number % len(TOPICS)]
