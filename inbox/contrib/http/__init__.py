"""The HTTP API of the inbox: clients in other languages read messages under a lease and acknowledge them.

    # shop/handlers.py                                # urls.py
    from inbox.contrib.http import subscribe          path("api/inbox/", include("inbox.contrib.http.urls"))

    subscribe("shop.order.placed", name="erp.orders")

A subscription is a handler without a function: the consumer, or the relay with local://, stores its messages as those of any
handler, and `queries` gives them to clients. States, duplicates, retries, dead letters and order are those of the inbox.

`inbox.contrib.http.urls` needs the extra `http` (Django Ninja), and tokens in `INBOX["HTTP"]` or `OUTBOX["HTTP"]`.
"""

from __future__ import annotations

import re

from inbox.handlers.decorator import registering
from inbox.handlers.kinds import Pulled
from inbox.handlers.message import BizId, Message
from inbox.handlers.options import Ordered, Retry, StartFrom

__all__ = ["subscribe"]

_NAME = re.compile(r"[\w.~-]+", re.ASCII)


def subscribe(
    topic: str,
    *,
    name: str = "",
    biz_id: BizId | str | None = None,
    using: str | None = None,
    retry: Retry | None = None,
    ordered: bool | Ordered = False,
    start_from: StartFrom = "now",
) -> None:
    """Store every message of `topic` until a client of the HTTP API has acknowledged it. Call it in a `handlers.py`.

    Each subscription gets all messages of its topic; the clients of one subscription share them.

    Args:
        topic: the exact name of the topic.
        name: of the subscription, in URLs and in the scope `read:<name>`; letters, digits and `._~-`. Default: the topic.
            It is used for deduplication and for the queue, so it must not change.
        retry: the maximum attempts, and the delays after an error that a client reports. An attempt begins when a client gets
            the message; a client that dies has used one.

    The other arguments and the exceptions are those of `idempotent_handler`.

    Raises:
        ValueError: the name, or the topic if there is none, cannot be part of a URL.
    """
    name = name or topic
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"The name {name!r} cannot be part of a URL: set name= to letters, digits, dots, hyphens, underscores and tildes."
        )
    register = registering(
        [topic], biz_id=biz_id, name=name, using=using, retry=retry, start_from=start_from, ordered=ordered, kind=Pulled()
    )
    register(_of_clients)


def _of_clients(message: Message) -> None:
    raise RuntimeError("The messages of a subscription are handled by clients of the HTTP API, not in this project.")
