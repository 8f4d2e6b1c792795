"""The duplicates of a message: counted on its row, by their cause and content."""

from collections.abc import Collection
from functools import lru_cache

from django.db import connections, transaction
from django.db.models import F

from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.days import DAY_OF_NOW, FIRST_DAY, LIVE
from exactly_once.sql.now import NOW
from exactly_once.sql.partitions import lately
from exactly_once.sql.prepared_statements import PreparedStatement
from inbox.models import InboxMessage, Receipt
from inbox.states import HANDLE
from inbox.store import receipts
from inbox.store.dialect import RECEIPTS, TABLE, binary, fetch_all, run
from inbox.store.message_rows import DuplicateCause, Earlier, NewRow, attributes_of, conflicting_name

COUNTED_AS = {
    DuplicateCause.REDELIVERY: "redeliveries",
    DuplicateCause.RESEND: "resends",
    DuplicateCause.REPLAY: "replays",
}
"""By cause, the column that counts it; no column counts `BUSINESS`."""
_COUNT = """
UPDATE {table} SET
    duplicates = duplicates + {count},
    redeliveries = redeliveries + CASE WHEN message_id = {same_id} AND {cause} = 'redelivery' THEN {count} ELSE 0 END,
    resends = resends + CASE WHEN message_id = {same_id} AND {cause} = 'resend' THEN {count} ELSE 0 END,
    replays = replays + CASE WHEN message_id = {same_id} AND {cause} = 'replay' THEN {count} ELSE 0 END,
    conflicts = conflicts + CASE WHEN digest <> {digest} THEN {count} ELSE 0 END,
    conflicting_id = CASE WHEN digest <> {digest} THEN {message_id} ELSE conflicting_id END,
    conflicting_body = CASE WHEN digest <> {digest} THEN {body} ELSE conflicting_body END,
    conflicting_at = CASE WHEN digest <> {digest} THEN {now} ELSE conflicting_at END,
    conflicting_attributes = CASE WHEN digest <> {digest} THEN {attributes} ELSE conflicting_attributes END,
    day = CASE WHEN day >= {first_day} AND digest <> {digest} THEN {today} ELSE day END
WHERE {on_days} AND id = (
    SELECT id FROM {table} WHERE {on_days} AND id = COALESCE(
        (SELECT id FROM {receipts} WHERE handler = {handler} AND topic = {topic} AND biz_id = {of_content}),
        (SELECT id FROM {receipts} WHERE handler = {handler} AND topic = {topic} AND biz_id = {biz_id})
    ) {unless_locked}
)
RETURNING id, state, message_id, digest
"""
"""Count a duplicate on the row with this content of its own, else on that of the first message.

It returns plain columns: SQLite 3.40 evaluates `... IS NULL` in RETURNING wrongly.
"""
_PARAMETERS = {
    "count": "int",
    "cause": "text",
    "same_id": "text",
    "message_id": "text",
    "digest": "text",
    "body": "bytea",
    "attributes": "jsonb",
    "handler": "varchar",
    "topic": "varchar",
    "of_content": "varchar",
    "biz_id": "varchar",
}
"""Of `_COUNT`, with PostgreSQL's types."""
_NAMES = {"table": TABLE, "receipts": RECEIPTS, "first_day": FIRST_DAY}


def _count_on(days: Collection[int]) -> str:
    """Count it on a row of one of these days. Their partitions are in its plan, which therefore locks no others."""
    numbers = {name: f"${number}" for number, name in enumerate(_PARAMETERS, 1)}
    return _COUNT.format(
        **_NAMES,
        **numbers,
        now=NOW["postgresql"],
        today=DAY_OF_NOW["postgresql"],
        on_days=f"day IN ({', '.join(map(str, days))})",
        unless_locked="FOR UPDATE SKIP LOCKED",
    )


@lru_cache(maxsize=1)
def _count_lately(days: tuple[int, ...]) -> PreparedStatement:
    """Most duplicates are of recent messages."""
    name = "inbox_duplicate_{}".format
    return PreparedStatement(name(days[-1]), [*_PARAMETERS.values()], _count_on(days), replaces=name(days[-2]))


_COUNT_ON_SQLITE = _COUNT.format(
    **_NAMES,
    **{name: f"%({name})s" for name in _PARAMETERS},
    now=NOW["sqlite"],
    today=DAY_OF_NOW["sqlite"],
    on_days="true",
    unless_locked="",
)

HISTORY_DROPPED = "Its history has been dropped. This row has the content of a later duplicate."


def count_duplicate(alias: str, row: NewRow) -> Earlier | None:
    """Count a duplicate of a stored row, and its copies, by their cause. If its content differs, store that content.

    Content that an operator has run as its own message is a duplicate of that message's row. A row of history with new content
    moves to the present day, so that it stays for `KEEP_HISTORY` from now on. Without a row, it is recognised by the receipt.

    None: a transaction is running that row now, or it was deleted meanwhile; try again later.
    """
    if earlier := _count(alias, row):
        return earlier
    receipt = _receipt(alias, row)
    if receipt is None:
        return None
    day = receipts.days_of(alias, [receipt.pk]).get(receipt.pk)
    return _without_history(alias, row, receipt) if day is None else _count(alias, row, day)


def _count(alias: str, row: NewRow, day: int | None = None) -> Earlier | None:
    """Count it in the stored row, if that is open, or of this day, or of the last two days for None, and not locked."""
    connection, same_id = connections[alias], _same_id(row)
    of_content, biz_id = _names(row)
    given = (1 + row.copies, row.cause, same_id, row.message_id, row.digest, row.body, attributes_of(row))
    parameters = [*given, row.handler, row.topic, of_content, biz_id]
    if not is_postgresql(connection):
        found = fetch(connection, _COUNT_ON_SQLITE, dict(zip(_PARAMETERS, parameters, strict=True)))
    elif day is None:
        found = run(_count_lately(lately()), connection, parameters)
    else:
        once = PreparedStatement("inbox_duplicate", [*_PARAMETERS.values()], _count_on([LIVE, day]))
        found = fetch_all(connection, *once.as_text(parameters, binary(connection)))
    if not found:
        return None
    ((pk, state, message_id, digest),) = found
    return Earlier(
        pk,
        state,
        row.cause if message_id == same_id else DuplicateCause.BUSINESS,
        conflicting=digest != row.digest,
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
    return Earlier(same.pk, "", cause, conflicting=False)


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
        columns = {name: getattr(receipt, name) for name in ("pk", *receipts.COPIED)}
        InboxMessage.objects.using(alias).create(**columns, **HANDLE.columns, body=b"", last_error=HISTORY_DROPPED)
        return count_duplicate(alias, row)


def _names(row: NewRow) -> list[str]:
    """The biz-ids that a duplicate may have in the inbox: that of this content, if it was run by itself, and its own."""
    return [conflicting_name(row.digest, row.biz_id), row.biz_id]
