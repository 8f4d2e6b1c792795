"""Messages published with `unique=True`: for each topic and biz-id at most one that is not expired, cancelled or rolled back.

Their names, topic and biz-id, are in a table of their own, without partitions. Its unique index guarantees this for any number
of concurrent writers and days of history. A name is inserted before its message, in the same transaction; an insert that
conflicts with an uncommitted change waits until the other transaction has ended. The transition that gives a message up deletes
its name. With REPEATABLE READ or SERIALIZABLE a name that the transaction cannot see is a serialization failure.

A name is valid as long as its message exists and is not given up. So one that is left behind, because history was purged or a
row was changed by hand, prevents nothing: the next message takes it, and housekeeping deletes it.
"""

import json
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Exists, OuterRef, Q

from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.partitions import days_by
from exactly_once.sql.prepared_statements import PreparedStatement, is_worthwhile, numbered
from outbox.models import OutboxMessage, UniqueMessage
from outbox.states import GIVEN_UP, State
from outbox.store.dialect import as_uuid, chunks, live, stored
from outbox.store.selecting import first_id_of, identified

Name = tuple[str, str]
"""Topic and biz-id."""
_NAMES = UniqueMessage._meta.db_table
_INSERT = f"INSERT INTO {_NAMES} (topic, biz_id, message_id) VALUES {{}} ON CONFLICT DO NOTHING RETURNING message_id"
_INSERT_ONE = _INSERT.format("(%s, %s, %s)")
_PREPARED = PreparedStatement("outbox_take_name", ["varchar", "varchar", "uuid"], numbered(_INSERT_ONE))
_AT_ONCE = 1000

IS_REPLACED = Q(is_unique=True, state__in=GIVEN_UP) & Q(
    Exists(
        OutboxMessage.objects.filter(
            Q(pk__gt=OuterRef("pk")) | ~Q(state__in=GIVEN_UP),
            topic=OuterRef("topic"),
            biz_id=OuterRef("biz_id"),
            is_unique=True,
        )
    )
)
"""The message was given up, and another one with its topic and biz-id was published later or is not given up."""


class Named(Protocol):
    """A message that asks for its name."""

    @property
    def message_id(self) -> uuid.UUID: ...
    @property
    def topic(self) -> str: ...
    @property
    def biz_id(self) -> str: ...


class Earlier(NamedTuple):
    """The message that has a name."""

    message_id: uuid.UUID
    position: int
    state: str


def take_names(alias: str, messages: Iterable[Named]) -> Mapping[Name, Earlier]:
    """Take the names of new messages in the open transaction; the earlier messages of those names that are taken already.

    All calls take names in one order, so that they do not deadlock. Of several messages with one name the first takes it.

    Raises:
        django.db.OperationalError: a serialization failure.
    """
    connection = connections[alias]
    wanted: dict[Name, uuid.UUID] = {}
    for message in messages:
        wanted.setdefault((message.topic, message.biz_id), message.message_id)
    left = sorted(wanted)
    earlier: dict[Name, Earlier] = {}
    while left:
        taken = _insert(connection, [(*name, wanted[name]) for name in left])
        if not (left := [name for name in left if wanted[name] not in taken]):
            break
        found = _find(connection, left)
        earlier |= {name: message for name, (_, message) in found.items() if message is not None}
        # Those that were not found were given up meanwhile, or their messages have other names, after a change by hand.
        not_valid = [message_id for message_id, message in found.values() if message is None]
        _delete(alias, [*not_valid, *(wanted[name] for name in left if name not in found)])
        left = [name for name in left if name not in earlier]
    _make_durable(connection, [one.message_id for one in earlier.values() if one.state == State.PUBLISHED])
    return earlier


def _make_durable(connection: BaseDatabaseWrapper, published: Sequence[uuid.UUID]) -> None:
    """Let the commit wait for the disk: what is said to be published is so after a crash, too, although a pass does not wait.

    A lock writes to the log. No publisher waits for it: only the purge deletes names of published messages.
    """
    if published and is_postgresql(connection):
        query = f"SELECT 1 FROM {_NAMES} WHERE message_id = ANY(%s) ORDER BY topic, biz_id FOR KEY SHARE"
        fetch(connection, query, [list(published)])


def _insert(connection: BaseDatabaseWrapper, rows: Sequence[tuple[str, str, uuid.UUID]]) -> set[uuid.UUID]:
    """The message ids of those rows that were inserted."""
    as_stored = [(topic, biz_id, stored(connection, message_id)) for topic, biz_id, message_id in rows]
    if len(rows) == 1 and is_worthwhile(connection):
        return {as_uuid(message_id) for (message_id,) in _PREPARED.fetch(connection, as_stored[0])}
    taken: set[uuid.UUID] = set()
    for chunk in chunks(as_stored, _AT_ONCE):
        query = _INSERT.format(", ".join(["(%s, %s, %s)"] * len(chunk)))
        taken |= {as_uuid(message_id) for (message_id,) in fetch(connection, query, [*chain.from_iterable(chunk)])}
    return taken


def _find(connection: BaseDatabaseWrapper, names: Sequence[Name]) -> Mapping[Name, tuple[uuid.UUID, Earlier | None]]:
    """By name, its message id, and the message unless it was given up or no longer exists."""
    found: dict[Name, tuple[uuid.UUID, Earlier | None]] = {}
    for chunk in chunks(names, _AT_ONCE):
        query = (
            f"SELECT n.topic, n.biz_id, n.message_id, m.id, m.state FROM {_NAMES} n "
            f"LEFT JOIN {live(connection)} m ON m.message_id = n.message_id "
            f"WHERE (n.topic, n.biz_id) IN (VALUES {', '.join(['(%s, %s)'] * len(chunk))})"
        )
        for topic, biz_id, given, position, state in fetch(connection, query, [*chain.from_iterable(chunk)]):
            message_id = as_uuid(given)
            found[topic, biz_id] = message_id, None if position is None else Earlier(message_id, position, state)
    if elsewhere := [message_id for message_id, message in found.values() if message is None]:
        settled = identified(connection.alias, elsewhere).values_list("message_id", "pk", "state")
        there = {message_id: Earlier(message_id, position, state) for message_id, position, state in settled}
        found |= {name: (message_id, there.get(message_id, message)) for name, (message_id, message) in found.items()}
    return {
        name: (message_id, None if message and message.state in GIVEN_UP else message)
        for name, (message_id, message) in found.items()
    }


def _delete(alias: str, message_ids: Sequence[uuid.UUID]) -> None:
    """Delete names that are not valid."""
    if message_ids:
        names = UniqueMessage.objects.using(alias).filter(message_id__in=message_ids).order_by("topic", "biz_id")
        names.filter(pk__in=list(names.select_for_update().values_list("pk", flat=True))).delete()


def give_up_names(alias: str, message_ids: Collection[uuid.UUID]) -> None:
    """Delete the names of messages that were given up, in the transaction of that change."""
    UniqueMessage.objects.using(alias).filter(message_id__in=message_ids).delete()


def delete_names_left_behind(alias: str, last: int, *, chunk: int) -> Iterator[int]:
    """Delete the names whose messages were published up to the day `last` and no longer exist; yield the number of each chunk.

    Each chunk is looked for on all days of history, because a name does not know when its message was settled.
    """
    names = UniqueMessage.objects.using(alias).filter(message_id__lt=first_id_of(last + 1)).order_by("pk")
    after = uuid.UUID(int=0)
    while found := list(names.filter(pk__gt=after).values_list("pk", flat=True)[:chunk]):
        after = found[-1]
        existing = days_by(OutboxMessage.objects.using(alias), "message_id", found)
        yield names.filter(pk__in={*found} - existing.keys()).delete()[0]


def has_body(alias: str, message_id: uuid.UUID, body: bytes) -> bool:
    """Has a message this body, compared as JSON? True if it has been purged."""
    # By its id: the index of positions in history is a BRIN index, of little use after delayed messages.
    stored_body = identified(alias, [message_id]).values_list("body", flat=True).first()
    return stored_body is None or _canonical(bytes(stored_body)) == _canonical(body)


def _canonical(document: bytes) -> str:
    # To Python, 1 equals true.
    return json.dumps(json.loads(document), sort_keys=True)


def is_replaced(alias: str, position: int) -> bool:
    """Was this message given up, and another one with its topic and biz-id published?"""
    return OutboxMessage.objects.using(alias).filter(IS_REPLACED, pk=position).exists()
