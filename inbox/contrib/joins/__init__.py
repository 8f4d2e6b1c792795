"""Joins: a handler that is called once when messages of several topics have come, matched by a run id.

    @joined_handler(all_of=["orders.exported", "stock.exported"], correlate="run_id", deadline=timedelta(hours=2))
    def build_report(join: Join) -> None:
        orders, stock = join["orders.exported"], join["stock.exported"]

Each awaited message is an ordinary message of an ordinary handler, which stores it as a part of its run (`runs`). The
first part also stores the run's own inbox row, due at the deadline. The last part makes that row due now. The runner executes
it as any stored message: retries, dead letters, timeouts and the exactly-once effect are those of the inbox.

A request and its answer are a join, too, matched by the correlation id: `@correlated(request=..., answer=..., timeout=...)`.

The end of a set, `publish_many(drafts, on_done=...)`, is one over the receipts of its messages, see `when_handled`.

An optional app: add "inbox.contrib.joins" to INSTALLED_APPS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from exactly_once.packages import looked_up
from inbox.handlers.message import Message

if TYPE_CHECKING:
    from inbox.contrib.joins.decorators import correlated, joined_handler
    from inbox.contrib.joins.sets import when_handled

__all__ = ["Join", "correlated", "joined_handler", "when_handled"]

_MODULES = {"correlated": "decorators", "joined_handler": "decorators", "when_handled": "sets"}
__getattr__ = partial(looked_up, __name__, _MODULES)


@dataclass(frozen=True, kw_only=True)
class Join:
    """The messages of one run.

    Attributes:
        id: the same in every attempt; use it as the idempotency key of calls to other services.
        run_id: what the messages have in common.
        messages: by topic, in the order of `all_of`, those that have come.
        missing: the topics whose messages have not come, if an operator or `on_missing="call"` starts the run without them.
        attempt: the number of this attempt, counted from 1.
    """

    id: str
    run_id: str
    messages: Mapping[str, Message]
    missing: tuple[str, ...] = ()
    attempt: int = 1

    def __getitem__(self, topic: str) -> Message:
        """The message of a topic; raises KeyError if it has not come."""
        return self.messages[topic]
