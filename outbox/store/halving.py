"""Rows that the database refuses to change, because a trigger or a damaged index raises for them.

A change of many rows that failed is repeated in parts, which are halved down to the refused rows, so that the other rows are
changed. Refused rows are skipped for some time, longer after each refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from django.db import Error, connections, transaction

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.faults import is_canceled
from exactly_once.sql.refused_rows import RefusedRows, may_be_of_one_row
from outbox.models import OutboxMessage
from outbox.states import Transition
from outbox.store.transitions import Found, count_moved

_SEVERAL = 2
_MOST_TRIES = 100
"""Maximum number of savepoints of one search for refused rows; the remaining rows are left for the next search."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """The result of a change in parts.

    Attributes:
        changed: the number of changed rows.
        done: the positions of the parts that succeeded.
        refused: by position, the error of each refused row.
    """

    changed: int
    done: Sequence[int]
    refused: Mapping[int, Error]


def may_be_halved(error: BaseException, rows: int) -> bool:
    """A change of this many rows failed: may a change of some of them succeed?"""
    # After a canceled statement the caller tries fewer rows first.
    return may_be_of_one_row(error) or (is_canceled(error) and rows == 1)


def change_apart(
    alias: str, positions: Sequence[int], change: Callable[[Sequence[int]], int], keys: Mapping[int, str]
) -> Apart:
    """Call `change` for parts of the positions, halved down to the refused rows; inside an open transaction.

    Later rows of the keys of refused rows are not changed either, to keep their order.

    Args:
        change: changes the rows at some of the `positions`, and returns the number of changed rows.
        keys: of the messages, by position.

    Raises:
        django.db.Error: an error that these rows do not cause.
    """
    connection = connections[alias]
    if is_postgresql(connection):
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    parts, tries = [list(positions)], 0
    done: list[int] = []
    refused: dict[int, Error] = {}
    changed = 0
    while parts and tries < _MOST_TRIES:
        stopped = {key for position in refused if (key := keys.get(position))}
        part = [position for position in parts.pop() if keys.get(position) not in stopped]
        if not part:
            continue
        tries += 1
        try:
            with transaction.atomic(using=alias):
                count = change(part)
        except Error as error:
            if not may_be_halved(error, len(part)):
                raise
            if len(part) == 1:
                refused[part[0]] = error
            else:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
        else:
            changed += count
            done += part
    return Apart(changed=changed, done=done, refused=refused)


def change_others(alias: str, positions: Sequence[int], change: Callable[[Sequence[int]], int], refused: RefusedRows) -> Apart:
    """`change_apart`, recording what is refused; inside an open transaction.

    Raises:
        django.db.Error: none of many rows can be changed, so the cause is not one row.
    """
    named = OutboxMessage.objects.using(alias).filter(pk__in=positions).exclude(key="")
    keys = dict(named.values_list("pk", "key"))
    apart = change_apart(alias, positions, change, keys)
    refused.retried(apart.refused, positions)
    refused.record(apart.refused, keys)
    if apart.refused and not apart.done and len(positions) >= _MOST_TRIES:
        raise next(iter(apart.refused.values()))
    return apart


def count_moved_of_others(alias: str, transition: Transition, found: Found, refused: RefusedRows | None) -> int:
    """`count_moved` of the rows found, without those that the database refuses to change.

    Args:
        refused: records those rows. With None their error is raised.
    """
    try:
        with undone_if_refused(alias):
            moved = count_moved(alias, transition, found)
    except Error as error:
        if refused is None or not may_be_halved(error, _SEVERAL):
            raise
    else:
        if refused is not None:
            refused.retried()
        return moved
    return found_apart(alias, found, lambda some: count_moved(alias, transition, some), refused).changed


def found_apart(alias: str, found: Found, change: Callable[[Sequence[int]], int], refused: RefusedRows) -> Apart:
    """`change_others` of the rows that a query finds and locks, in its own transaction if none is open."""
    connection = connections[alias]
    locking = found.locking if is_postgresql(connection) else ""
    with transaction.atomic(using=alias):
        with connection.cursor() as cursor:
            cursor.execute(f"{found.query} {locking}", found.parameters)
            positions = [position for (position,) in cursor.fetchall()]
        return change_others(alias, positions, change, refused)


def undone_if_refused(alias: str) -> AbstractContextManager[object]:
    """A savepoint if a transaction is open; in autocommit mode a failed statement needs none."""
    return transaction.atomic(using=alias) if connections[alias].in_atomic_block else nullcontext()
