"""The duplicates of a message: counted on its row, by their cause and content."""

from collections.abc import Collection

from django.db import connections, transaction
from django.db.models import F

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import DAY_OF_NOW, FIRST_DAY, LIVE
from exactly_once.sql.now import now
from exactly_once.sql.partitions import lately
from inbox.models import InboxMessage, Receipt
from inbox.states import DUE, HANDLE
from inbox.store import receipts
from inbox.store.dialect import TABLE, binary, fetch_all
from inbox.store.message_rows import DuplicateCause, Earlier, NewRow, attributes_of, conflicting_name
from inbox.store.receipts import ID_OF

COUNTED_AS = {
    DuplicateCause.REDELIVERY: "redeliveries",
    DuplicateCause.RESEND: "resends",
    DuplicateCause.REPLAY: "replays",
}
"""By cause, the column that counts it; no column counts `BUSINESS`."""
_KEEP_CONFLICT = (
    "conflicting_id = CASE WHEN digest <> %s THEN %s ELSE conflicting_id END, "
    "conflicting_body = CASE WHEN digest <> %s THEN {body} ELSE conflicting_body END, "
    "conflicting_at = CASE WHEN digest <> %s THEN {now} ELSE conflicting_at END, "
    "conflicting_attributes = CASE WHEN digest <> %s THEN {json} ELSE conflicting_attributes END"
)

HISTORY_DROPPED = "Its history has been dropped. This row has the content of a later duplicate."
_EARLIER = f"COALESCE({ID_OF}, {ID_OF})"
"""The id of the row with this content of its own, else that of the first message."""


def count_duplicate(alias: str, row: NewRow) -> Earlier | None:
    """Count a duplicate of a stored row, and its copies, by their cause. If its content differs, store that content.

    Content that an operator has run as its own message is a duplicate of that message's row. A row of history with new content
    moves to the present day, so that it stays for `KEEP_HISTORY` from now on. Without a row, it is recognised by the receipt.

    None: a transaction is running that row now, or it was deleted meanwhile; try again later.
    """
    # Most are duplicates of recent messages, which this counts by one statement.
    if earlier := _count(alias, row, lately()):
        return earlier
    receipt = _receipt(alias, row)
    if receipt is None:
        return None
    day = receipts.days_of(alias, [receipt.pk]).get(receipt.pk)
    return _without_history(alias, row, receipt) if day is None else _count(alias, row, [LIVE, day])


def _count(alias: str, row: NewRow, days: Collection[int]) -> Earlier | None:
    """Count it in the stored row, if that is of one of these days and not locked."""
    connection = connections[alias]
    on_days = f"day IN ({', '.join(map(str, days))})" if is_postgresql(connection) else "true"
    skip_locked = "FOR UPDATE SKIP LOCKED" if is_postgresql(connection) else ""
    as_json = "%s::jsonb" if is_postgresql(connection) else "%s"
    column, count = COUNTED_AS[row.cause], 1 + row.copies
    same_id = _same_id(row)
    found = fetch_all(
        connection,
        f"UPDATE {TABLE} SET duplicates = duplicates + {count}, "
        f"{column} = {column} + CASE WHEN message_id = %s THEN {count} ELSE 0 END, "
        f"conflicts = conflicts + CASE WHEN digest <> %s THEN {count} ELSE 0 END, "
        f"{_KEEP_CONFLICT.format(now=now(connection), body=binary(connection), json=as_json)}, "
        f"day = CASE WHEN day >= {FIRST_DAY} AND digest <> %s THEN {DAY_OF_NOW[connection.vendor]} ELSE day END "
        f"WHERE {on_days} AND id = (SELECT id FROM {TABLE} WHERE {on_days} AND id = {_EARLIER} {skip_locked}) "
        # Plain columns: SQLite 3.40 evaluates `... IS NULL` in RETURNING wrongly.
        "RETURNING id, state, message_id, digest, next_attempt_at",
        [
            *(same_id, row.digest, row.digest, row.message_id, row.digest, row.body, row.digest),
            *(row.digest, attributes_of(row), row.digest),
            *(value for name in _names(row) for value in (row.handler, row.topic, name)),
        ],
    )
    if not found:
        return None
    ((pk, state, message_id, digest, next_attempt_at),) = found
    return Earlier(
        pk,
        state,
        row.cause if message_id == same_id else DuplicateCause.BUSINESS,
        conflicting=digest != row.digest,
        abandoned=state in DUE and next_attempt_at is None,
    )


def _same_id(row: NewRow) -> str | None:
    """A message without an id is known to be the same only if the broker says so."""
    return row.message_id if row.message_id or row.redelivered else None


def _receipt(alias: str, row: NewRow) -> Receipt | None:
    """The receipt of this content of its own, else that of the first message."""
    named = Receipt.objects.using(alias).filter(handler=row.handler, topic=row.topic, biz_id__in=_names(row))
    found = {receipt.biz_id: receipt for receipt in named}
    return next((found[name] for name in _names(row) if name in found), None)


def _without_history(alias: str, row: NewRow, receipt: Receipt) -> Earlier | None:
    """A duplicate of a message whose history has been dropped. With other content, it gets a row that has this content."""
    # Read again after the message was not found: it may have been deleted with its receipt, and its next delivery must not be
    # a duplicate then.
    same = _receipt(alias, row)
    if same is None or same.pk != receipt.pk:
        return None
    if same.digest != row.digest:
        return _show_conflict(alias, same, row)
    same_id = _same_id(row)
    cause = row.cause if same.message_id == same_id else DuplicateCause.BUSINESS
    return Earlier(same.pk, "", cause, conflicting=False, abandoned=False)


def _show_conflict(alias: str, receipt: Receipt, row: NewRow) -> Earlier | None:
    """∅ → done, for a message without history and a duplicate with other content. None: another one is doing so, or has."""
    with transaction.atomic(using=alias):
        same = Receipt.objects.using(alias).filter(pk=receipt.pk)
        if not same.select_for_update(skip_locked=is_postgresql(connections[alias])):
            return None
        # A lock alone changes nothing, so a REPEATABLE READ transaction that comes after this one would get no error.
        same.update(digest=F("digest"))
        if receipts.days_of(alias, [receipt.pk]):
            return None
        columns = {field.attname: getattr(receipt, field.attname) for field in Receipt._meta.concrete_fields}
        InboxMessage.objects.using(alias).create(**columns, **HANDLE.columns, body=b"", last_error=HISTORY_DROPPED)
        return count_duplicate(alias, row)


def _names(row: NewRow) -> list[str]:
    """The biz-ids that `_EARLIER` looks for, in its order."""
    return [conflicting_name(row.digest, row.biz_id), row.biz_id]
