"""Cheap counts: exact up to a limit, or the planner's estimate. No count reads millions of rows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from django.db import connections, transaction

from exactly_once.sql.connections import fetch, is_postgresql

LIMIT = 10_000
_PREFER_INDEXES = ", ".join(f"set_config('{name}', 'off', true)" for name in ("enable_seqscan", "enable_bitmapscan", "jit"))


@dataclass(frozen=True, kw_only=True)
class Count:
    """A number of rows.

    Attributes:
        number: how many; the limit if there are more.
        is_cut: there are more than `number`.
        is_estimate: `number` is the planner's estimate.
        oldest: the earliest instant among the counted rows; None if there is none.
    """

    number: int = 0
    is_cut: bool = False
    is_estimate: bool = False
    oldest: datetime | None = None


def count_up_to_limit(alias: str, sources: Mapping[str, Sequence[str]], *, column: str) -> dict[str, Count]:
    """Count the rows of each name by one statement, in the order of `sources`.

    Args:
        sources: a FROM clause with its conditions for each index that a name's rows are in. A name may have several.
        column: of `Count.oldest`.
    """
    return {name: counts.get("", Count()) for name, counts in count_each(alias, sources, column=column, by="''").items()}


def count_each(alias: str, sources: Mapping[str, Sequence[str]], *, column: str, by: str) -> dict[str, dict[str, Count]]:
    """The same by the values of the column `by`. If there are too many rows of a name, each of its counts is cut."""
    counts: dict[str, dict[str, Count]] = {name: {} for name in sources}
    for name, subject, found in _counted(alias, sources, column, by):
        counts[name][subject] = _sum(counts[name].get(subject, Count()), found)
    for name, each in counts.items():
        if sum(count.number for count in each.values()) > LIMIT:
            counts[name] = {subject: replace(count, is_cut=True) for subject, count in each.items()}
    return counts


def _counted(alias: str, sources: Mapping[str, Sequence[str]], column: str, by: str) -> list[tuple[str, str, Count]]:
    """The rows of each clause by the values of `by`: the name, the value and their count."""
    parts, names = [], []
    for name, clauses in sources.items():
        for clause in clauses:
            names.append(name)
            parts.append(
                f"SELECT {len(names) - 1}, found.value, count(*), CAST(min(found.instant) AS text) "  # noqa: S608 - our own names
                f"FROM (SELECT {column} AS instant, {by} AS value {clause} LIMIT {LIMIT + 1}) found GROUP BY found.value"
            )
    with preferring_indexes(alias):
        found = fetch(connections[alias], " UNION ALL ".join(parts))
    return [(names[index], by, Count(number=number, oldest=instant(oldest))) for index, by, number, oldest in found]


def estimated(alias: str, source: str) -> Count | None:
    """The planner's estimate of the rows of a FROM clause with its conditions; None on a database that has none."""
    connection = connections[alias]
    if not is_postgresql(connection):
        return None
    plan = fetch(connection, f"EXPLAIN (FORMAT JSON) SELECT {source}")[0][0]
    found = json.loads(plan) if isinstance(plan, str) else plan
    return Count(number=int(found[0]["Plan"]["Plan Rows"]), is_estimate=True)


def _sum(before: Count, found: Count) -> Count:
    number = before.number + found.number
    instants = [instant for instant in (before.oldest, found.oldest) if instant is not None]
    return Count(number=min(number, LIMIT), is_cut=before.is_cut or number > LIMIT, oldest=min(instants) if instants else None)


def instant(text: str | None) -> datetime | None:
    """The instant that a query returned as text, on SQLite in UTC without saying so. None if it is not an instant."""
    try:
        found = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


@contextmanager
def preferring_indexes(alias: str) -> Iterator[None]:
    """For a block that only reads. Without this, PostgreSQL may read a whole table in search of rows of a state that has few.

    A plan that uses a disabled scan after all has a cost at which PostgreSQL would compile it, which takes a second.
    """
    connection = connections[alias]
    if not is_postgresql(connection):
        yield
        return
    with transaction.atomic(using=alias):
        fetch(connection, f"SELECT {_PREFER_INDEXES}")
        yield
        # An open transaction does not keep the settings.
        transaction.set_rollback(True, using=alias)
