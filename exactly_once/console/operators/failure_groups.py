"""Messages that are retrying or dead, grouped by what failed and where. Every count has a limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Count, Max, Min, Model, Q, QuerySet

from exactly_once.models import FailureNote
from exactly_once.sql.counts import preferring_indexes
from exactly_once.sql.now import DatabaseTime

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

MOST_GROUPS = 100
_MOST_COUNTED = 10_000
_MOST_NAMED = 500
_HOUR = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """The messages that fail for one reason.

    Attributes:
        place: the place in the code, or the topic.
        count, dead: their number, and how many of them are dead; of more than ten thousand, of the newest.
        is_cut: there are more than were counted.
        first_at, last_at: since when the first of them fails, and when one failed last.
        new, new_before: how many began to fail in the last hour, and in the hour before it.
        who: the handlers or topics of the newest.
        error: of the newest.
    """

    error_class: str
    place: str
    count: int
    dead: int
    is_cut: bool
    first_at: datetime | None
    last_at: datetime | None
    new: int
    new_before: int
    who: Sequence[str]
    error: str


class FailureGroups:
    """The failure groups of one app.

    Args:
        model: its messages.
        table: the table to search, with the columns of the model.
        place: the column that says where it failed.
        who: the column of handlers or topics.
        only: restricts the messages, for the planner.
    """

    def __init__(
        self, model: type[Model], table: Callable[[BaseDatabaseWrapper], str], *, place: str, who: str, only: Q | None = None
    ) -> None:
        self.model = model
        self._table = table
        self._only = Q() if only is None else only
        self.place = place
        self._who = who

    def condition(self, error_class: str, place: str) -> Q:
        """The messages of one group."""
        return self.of_class(error_class) & Q(**{self.place: place})

    def of_class(self, error_class: str) -> Q:
        """The messages whose error has this class."""
        return Q(self._only, state__in=["retrying", "dead"], failing_since__isnull=False, error_class=error_class)

    def classes(self, alias: str) -> list[str]:
        """The class of every group, up to the limit of groups."""
        return list(dict.fromkeys(error_class for error_class, _place in self._names(alias)))

    def all(self, alias: str) -> list[FailureGroup]:
        """Every group, up to a limit, the largest first."""
        found = (self.one(alias, error_class, place) for error_class, place in self._names(alias))
        return sorted((group for group in found if group is not None), key=lambda group: -group.count)

    def one(self, alias: str, error_class: str, place: str) -> FailureGroup | None:
        """The group of this class and place; None if no message fails so."""
        messages: QuerySet[Any] = QuerySet(self.model, using=alias).filter(self.condition(error_class, place))
        newest = messages.order_by("-failing_since")
        counted = newest.values("state", "failing_since", "failed_at")[: _MOST_COUNTED + 1].aggregate(
            count=Count("*"),
            dead=Count("state", filter=Q(state="dead")),
            last_at=Max("failed_at"),
            new=Count("state", filter=Q(failing_since__gt=DatabaseTime(-_HOUR))),
            new_before=Count(
                "state", filter=Q(failing_since__gt=DatabaseTime(-2 * _HOUR), failing_since__lte=DatabaseTime(-_HOUR))
            ),
        )
        if not counted["count"]:
            return None
        return FailureGroup(
            error_class=error_class,
            place=place,
            **{**counted, "count": min(counted["count"], _MOST_COUNTED)},
            is_cut=counted["count"] > _MOST_COUNTED,
            first_at=messages.aggregate(at=Min("failing_since"))["at"],
            who=sorted({*newest.values_list(self._who, flat=True)[:_MOST_NAMED]}),
            error=newest.values_list("last_error", flat=True).first() or "",
        )

    def places(self, alias: str, error_class: str) -> list[str]:
        """The places where messages fail with this class, up to the limit of groups."""
        return [place for kind, place in self._names(alias) if kind == error_class]

    def most_dead(self, alias: str, most: int) -> list[tuple[str, str, int]]:
        """Class and place of the groups with the most dead messages, and their number, of up to ten thousand dead messages."""
        dead: QuerySet[Any] = QuerySet(self.model, using=alias).filter(self._only, state="dead", failing_since__isnull=False)
        with preferring_indexes(alias):
            counted = Counter(dead.values_list("error_class", self.place)[:_MOST_COUNTED])
        return [(error_class, place, number) for (error_class, place), number in counted.most_common(most)]

    def _names(self, alias: str) -> list[tuple[str, str]]:
        """Class and place of every group: one index lookup for each, however many messages it has."""
        connection = connections[alias]
        table = self._table(connection)
        of_m = f"m.error_class, m.{self.place}"
        is_open = "m.state IN ('retrying', 'dead') AND m.failing_since IS NOT NULL"
        first = f"SELECT {of_m} FROM {table} m WHERE {is_open} ORDER BY {of_m} LIMIT 1"  # noqa: S608 - our own names
        later = (
            f"SELECT m.id FROM {table} m WHERE {is_open} AND ({of_m}) > (groups.kind, groups.place) "  # noqa: S608 - as above
            f"ORDER BY {of_m} LIMIT 1"
        )
        with connection.cursor() as cursor:
            cursor.execute(
                f"WITH RECURSIVE groups(kind, place) AS (SELECT * FROM ({first}) first UNION ALL "  # noqa: S608 - as above
                f"SELECT next.error_class, next.{self.place} FROM groups JOIN {table} next ON next.id = ({later})) "
                "SELECT kind, place FROM groups LIMIT %s",
                [MOST_GROUPS],
            )
            return [(kind, place) for kind, place in cursor.fetchall()]


def write_note(alias: str, group: Mapping[str, Any], note: str, *, by: str) -> None:
    """Write the note of a group, which is named by `app`, `error_class` and `place`; an empty one deletes it."""
    notes = FailureNote.objects.using(alias)
    if note:
        written: Any = {"note": note, "written_by": by, "written_at": DatabaseTime()}
        notes.update_or_create(**group, defaults=written)
    else:
        notes.filter(**group).delete()
