"""Reporting dead letters: the transaction in which a message dies also stores a message for its handler's `on_dead`.

That is a message of another handler, which a runner runs: with attempts, retries and an outcome of its own. It has the content
of the dead letter; how it died is in a header, because the dead letter may have been retried until then.
"""

from collections.abc import Sequence
from typing import Any

from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.text import fit
from inbox import deaths
from inbox.models import InboxMessage
from inbox.states import State
from inbox.store import receipts
from inbox.store.message_rows import DEATH, business_id

_SAME = ("topic", "message_id", "content_type", "body", "digest", "source", "key", "correlation_id", "causation_id")
_ALSO_SAME = ("traceparent", "created_at")


def report(alias: str, rows: Sequence[int]) -> None:
    """∅ → received, due now, for the `on_dead` of the handler of each dead letter among these rows, if it has one.

    In the transaction in which they have died. A message that dies again has another fence, and is reported again.
    """
    dead = InboxMessage.objects.using(alias).filter(pk__in=rows, day=LIVE, state=State.DEAD, handler__in=deaths.reported)
    for row in dead.order_by("pk"):
        receipts.create(
            alias,
            **{name: getattr(row, name) for name in _SAME + _ALSO_SAME},
            handler=f"{row.handler}{deaths.SUFFIX}",
            biz_id=fit(f"{row.pk}.{row.fence}:{business_id(row.biz_id)}"),
            headers={**row.headers, DEATH: _death(row)},
            state=State.RECEIVED,
            next_attempt_at=DatabaseTime(),
        )


def _death(row: InboxMessage) -> dict[str, Any]:
    return {
        "biz_id": business_id(row.biz_id),
        "at": (row.failed_at or row.received_at).isoformat(),
        "attempt": row.attempts,
        "class": row.error_class,
        "error": row.last_error,
        "traceback": row.traceback,
    }
