"""SQL expressions that transitions write into the columns of a message. All instants are from the database's clock."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import Case, DateTimeField, ExpressionWrapper, F, Func, JSONField, Q, Value, When
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce

from exactly_once.sql.fields import FIRST_INSTANT, LAST_INSTANT
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.envelope import BY_OPERATOR, REPLAY_HEADER

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

_MOST_ATTEMPTS = 2**31 - 2

NOW = DatabaseTime()

IS_AHEAD = Q(deliver_at__gt=NOW)
"""Its delivery time is in the future."""

# A number at the limit of its type, written by hand, must not fail the other messages of the batch.
ONE_MORE_ATTEMPT = Case(When(attempts__gte=_MOST_ATTEMPTS, then=F("attempts")), default=F("attempts") + 1)

_INSTANTS = (FIRST_INSTANT, LAST_INSTANT)
_HAS_INSTANTS = Q(expires_at__range=_INSTANTS, available_at__range=_INSTANTS, created_at__range=_INSTANTS) & (
    Q(deliver_at=None) | Q(deliver_at__range=_INSTANTS)
)


def after(duration: timedelta) -> Case:
    """The instant `duration` from now, or the expiry of the message if that is earlier: until then it blocks its key."""
    then = DatabaseTime(duration)
    return Case(When(expires_at__lt=then, then=F("expires_at")), default=then, output_field=DateTimeField())


NO_FAILURE: Mapping[str, Any] = {"error_class": "", "failing_since": None}
"""What a message that is published says of its failures."""


def failed(error_class: str) -> Mapping[str, Any]:
    """The columns of a failure besides its text: its class, since when the message fails so, and when it last did."""
    same = When(error_class=error_class, failing_since__isnull=False, then=F("failing_since"))
    return {
        "error_class": error_class,
        "failing_since": Case(same, default=NOW, output_field=DateTimeField()),
        "failed_at": NOW,
    }


def instant(due: datetime | timedelta) -> Combinable:
    """An instant, or a duration from now."""
    return DatabaseTime(due) if isinstance(due, timedelta) else Value(due, output_field=DateTimeField())


def same_time_to_expiry(due: Combinable) -> Case:
    """The expiry of a message with the new due time `due`, such that the time from due to expiry stays the same.

    A restored message still has its old `deliver_at`, so for it this time is counted from `available_at`.
    """
    was_restored = Q(headers__has_key=REPLAY_HEADER, expires_at__gt=F("available_at"))
    since = Case(When(was_restored, then=F("available_at")), default=Coalesce("deliver_at", "created_at"))
    again = ExpressionWrapper(due + (F("expires_at") - since), output_field=DateTimeField())
    # The database cannot calculate with the instants of a row that was damaged by hand, so its expiry is unchanged.
    return Case(When(_HAS_INSTANTS, then=again), default=F("expires_at"), output_field=DateTimeField())


class MarkedAsReplayed(Func):
    """The headers with a header that marks the message as replayed by an operator.

    Publishers cannot set a header of this name. A separate column would be read with every message. Headers that are not a JSON
    object were damaged by hand, and are unchanged.
    """

    output_field = JSONField()

    def __init__(self) -> None:
        super().__init__(F("headers"))

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        headers, _ = compiler.compile(self.get_source_expressions()[0])
        marked = f"{headers} || jsonb_build_object(%s::text, %s::text)"
        sql = f"CASE jsonb_typeof({headers}) WHEN 'object' THEN {marked} ELSE {headers} END"
        return sql, [REPLAY_HEADER, BY_OPERATOR]

    def as_sqlite(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        headers, _ = compiler.compile(self.get_source_expressions()[0])
        sql = f"CASE json_type({headers}) WHEN 'object' THEN json_set({headers}, %s, %s) ELSE {headers} END"
        return sql, [f'$."{REPLAY_HEADER}"', BY_OPERATOR]
