"""The messages that an open transaction has published, for a dry run of a handler."""

from collections.abc import Sequence

from django.db.models import Max

from exactly_once.console.operators.dry_run import WouldPublish
from exactly_once.sql.connections import with_table
from exactly_once.sql.days import LIVE
from exactly_once.wire.envelope import JSON
from outbox.models import OutboxMessage

_MOST = 100


def mark(alias: str) -> int | None:
    """The last position before the messages to come; None if this database has no outbox."""
    if not with_table(OutboxMessage, [alias])[0]:
        return None
    found: int | None = OutboxMessage.objects.using(alias).filter(day=LIVE).aggregate(last=Max("pk"))["last"]
    return found or 0


def since(alias: str, mark: int | None, causation_id: str) -> Sequence[WouldPublish]:
    """The messages with a later position that this message has caused."""
    if mark is None:
        return ()
    messages = OutboxMessage.objects.using(alias).filter(day=LIVE, pk__gt=mark, causation_id=causation_id)
    return [
        WouldPublish(
            topic=row.topic, biz_id=row.biz_id, key=row.key, body=bytes(row.body), content_type=JSON, headers=row.headers
        )
        for row in messages.order_by("pk")[:_MOST]
    ]
