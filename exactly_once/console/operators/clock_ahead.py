"""Instants that the database's clock cannot have written: it was ahead, as on a host that it was moved to.

What became due by such a clock waits until the present clock reaches that instant. The instant at which it was written shows
this, and how far the clock was ahead.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.db import connections
from django.utils.translation import gettext as _

from exactly_once.sql.connections import fetch
from exactly_once.sql.counts import instant
from exactly_once.sql.now import NOW, now_after
from exactly_once.upkeep.minutes import database_time

_TOLERANCE = timedelta(seconds=15)
"""A clock that is corrected by less delays nothing noticeably."""
_MOST_READ = 10_000


@dataclass(frozen=True, kw_only=True)
class Dated:
    """Rows that wait until an instant which was computed when another one of the row was written.

    Attributes:
        due: the column of the instant that the row waits for.
        written: the column of the instant of writing.
        where: their condition.
        state: the state of messages.
        first: takes an alias; the column before `due` in its index, and its values. None: `due` is the first.
    """

    table: str
    due: str
    written: str
    where: str
    state: str = ""
    first: Callable[[str], tuple[str, Sequence[str]]] | None = None


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Rows that were written ahead of the clock.

    Attributes:
        state: of messages; "" of other rows.
        number: of those found; at most so many are read that it may be too small.
        by: how far the latest is ahead.
        mend: the statement that makes all of them due.
    """

    table: str
    state: str
    number: int
    by: timedelta
    mend: str

    def __str__(self) -> str:
        words = _("%(count)s rows of %(table)s were written when the database's clock was %(by)s ahead, and wait until then.")
        return words % {"count": f"{self.number:,}", "table": self.table, "by": timedelta(seconds=int(self.by.total_seconds()))}


def ahead(alias: str, kinds: Sequence[Dated]) -> Iterator[Ahead]:
    """The kinds of which there are rows that wait because of another clock."""
    connection = connections[alias]
    limit, now = now_after(connection), NOW[connection.vendor].replace("%%", "%")
    for kind in kinds:
        waiting, values = f"{kind.where} AND {kind.due} > {limit}", list[str]()
        if kind.first is not None:
            column, values[:] = kind.first(alias)
            waiting += f" AND {column} IN ({', '.join(['%s'] * len(values)) or 'NULL'})"
        seconds = _TOLERANCE.total_seconds()
        sql = (
            f"SELECT count(*), CAST(max({kind.written}) AS text) FROM (SELECT {kind.written} FROM {kind.table} "  # noqa: S608
            f"WHERE {waiting} LIMIT {_MOST_READ}) rows_that_wait WHERE {kind.written} > {limit}"
        )
        ((number, latest),) = fetch(connection, sql, [seconds, *values, seconds])
        if number and (at := instant(latest)) is not None:
            mend = (
                f"UPDATE {kind.table} SET {kind.due} = {now}, {kind.written} = {now} "  # noqa: S608 - our own names
                f"WHERE {kind.where} AND {kind.due} IS NOT NULL AND {kind.written} > {now};"
            )
            yield Ahead(table=kind.table, state=kind.state, number=number, by=at - database_time(alias), mend=mend)
