"""The messages that an open transaction has published, for a dry run of a handler."""

from collections.abc import Callable, Sequence

from django.db.models import Max

from exactly_once.half import WouldPublish
from exactly_once.sql.connections import with_table
from exactly_once.sql.days import LIVE
from exactly_once.wire.envelope import JSON
from outbox.models import OutboxMessage

_MOST = 100


def published_from_now(alias: str) -> Callable[[str], Sequence[WouldPublish]]:
    """Returns the messages with a later position than the last one now, caused by a message; none without an outbox there."""
    if not with_table(OutboxMessage, [alias])[0]:
        return lambda causation_id: ()
    live = OutboxMessage.objects.using(alias).filter(day=LIVE)
    last = live.aggregate(last=Max("pk"))["last"] or 0

    def since(causation_id: str) -> Sequence[WouldPublish]:
        return [
            WouldPublish(
                topic=row.topic, biz_id=row.biz_id, key=row.key, body=bytes(row.body), content_type=JSON, headers=row.headers
            )
            for row in live.filter(pk__gt=last, causation_id=causation_id).order_by("pk")[:_MOST]
        ]

    return since
