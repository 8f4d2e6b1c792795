"""What an operator can do to rows: guarded changes, declared once as data.

    CANCEL = Change(name="cancel", sources=(READY, DEAD), perform=cancel)

A page calls `perform` with one row, in a transaction with its audit entry (`admin.acting`). A running process calls it with the
rows of a batch, if operators can plan the change as an operation on many rows (`operations`). Both report its outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from django.contrib.auth import get_user_model
from django.db.models import Q, QuerySet
from django.utils.functional import Promise
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.sql.days import LIVE
from exactly_once.upkeep.operation_rows import Given, RowOutcome

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise as Text

_Change = TypeVar("_Change", bound="Change")
DELETED = _("it no longer exists")


Perform = Callable[[str, Sequence[Any], Given], Sequence[RowOutcome]]
"""Changes some rows inside the open transaction of a database; the outcome of each. A row without one is in the next batch."""


def state_now(row: Any) -> str:
    """Why a row was not changed whose state does not allow it."""
    return gettext("it is %(state)s now") % {"state": row.get_state_display().lower()}


def in_hand_now(row: Any) -> str:
    """Why a row was not changed whose state allows it."""
    words = gettext("it is %(state)s now, and a process is working on it; try again")
    return words % {"state": row.get_state_display().lower()}


def each(model: Any, change: Callable[[str, Any, Given], object], why_not: Text | Callable[[Any], Text] = state_now) -> Perform:
    """Change rows one after the other by a function that returns whether it has changed one.

    Args:
        why_not: why one that exists was not changed; by default, due to its state.
    """

    def perform(alias: str, rows: Sequence[Any], given: Given) -> Sequence[RowOutcome]:
        return [RowOutcome(row, unchanged="" if change(alias, row, given) else why(alias, row)) for row in rows]

    def why(alias: str, pk: Any) -> str:
        row: Any = QuerySet(model, using=alias).filter(pk=pk).first()
        return str(DELETED if row is None else why_not if isinstance(why_not, str | Promise) else why_not(row))

    return perform


@dataclass(frozen=True, kw_only=True)
class CanaryResult:
    """What has become of the messages of a wave.

    Attributes:
        pending: they have not been run yet.
        succeeded: they have succeeded, or no longer exist.
        failed: by row, why they failed since the wave began.
    """

    pending: Sequence[int] = ()
    succeeded: Sequence[int] = ()
    failed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Canary:
    """How a canary sees whether messages fail, as before or in another way.

    Attributes:
        failing: the states of messages that fail.
        succeeded: the states of those that have succeeded. One in history, or deleted, has succeeded, too.
        place: the column with the place where one fails.
        failure: that place in words.
        found: the messages of some rows, to see why they failed before; None: those that are open.
    """

    model: Any
    failing: Collection[str]
    succeeded: Collection[str]
    place: str
    failure: Callable[[str], str] = str
    found: Callable[[str, Sequence[int]], QuerySet[Any]] | None = None

    def failures(self, alias: str, rows: Sequence[int]) -> dict[int, str]:
        """Why these messages fail now."""
        return self._failures(self.found(alias, rows) if self.found else self._live(alias, rows))

    def judge(self, alias: str, rows: Sequence[int], since: datetime) -> CanaryResult:
        """What has become of these messages since an instant, by the database's clock."""
        live = self._live(alias, rows)
        states = dict(live.values_list("pk", "state"))
        failed = self._failures(live.filter(failed_at__gte=since, state__in=self.failing))
        succeeded = [row for row in rows if row not in states or states[row] in self.succeeded]
        ended = {*succeeded, *failed}
        return CanaryResult(pending=[row for row in rows if row not in ended], succeeded=succeeded, failed=failed)

    def _live(self, alias: str, rows: Sequence[int]) -> QuerySet[Any]:
        return QuerySet(self.model, using=alias).filter(pk__in=rows, day=LIVE)

    def _failures(self, messages: QuerySet[Any]) -> dict[int, str]:
        found = messages.values_list("pk", "error_class", self.place)
        return {row: f"{kind} {self.failure(place)}".strip() for row, kind, place in found}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of rows that operators can make.

    Attributes:
        sources: the states from which it is allowed; () for all.
        offered: what must hold besides.
        is_operation: whether an operation can make it.
        condition: of the rows of an operation, besides `sources`.
        canary: None if the operation cannot be a canary.
    """

    name: str
    perform: Perform
    sources: Sequence[str] = ()
    offered: Callable[[Any], bool] = lambda row: True
    is_operation: bool = False
    condition: Q = field(default_factory=Q)
    canary: Canary | None = None

    def is_offered(self, row: Any) -> bool:
        """Is it allowed in the present state of the row?"""
        return (not self.sources or row.state in self.sources) and self.offered(row)


def permission(model: Any, verb: str) -> str:
    """The name of a permission on the rows of a model, also for a proxy of it."""
    options = model._meta.concrete_model._meta
    return f"{options.app_label}.{verb}_{options.model_name}"


def by_name(*changes: _Change) -> dict[str, _Change]:
    return {change.name: change for change in changes}


def why_not_permitted(operation: Any) -> str:
    """Why the user who planned an operation may no longer do so; "" if they may, or if it needs no permission."""
    if not operation.permission:
        return ""
    model: Any = get_user_model()
    user: Any = QuerySet(model).filter(**{model.USERNAME_FIELD: operation.requested_by}).first()
    if user is not None and user.is_active and user.is_staff and user.has_perm(operation.permission):
        return ""
    return f"{operation.requested_by} is no longer an active member of staff with {operation.permission}"
