"""An operator's decision about many messages: set-based where the guard allows it, and what became of them afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connections, transaction

from exactly_once.failures import without_line
from exactly_once.sql.connections import is_postgresql
from exactly_once.wire.formats import CELERY_TOPICS
from inbox.models import InboxMessage, State
from inbox.operators.decisions import TRIED_AGAIN, skipped
from inbox.store.trail import record

LOCKED = "a process is working on it"
_NAMED = ("pk", "state", "ordered", "quarantined", "handler", "topic", "message_id", "biz_id")


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The result of a set-based decision.

    Attributes:
        changed: the rows that were changed.
        remaining: rows that need a transition of their own: they have a place in an order, a lease, or a task of Celery.
        unchanged: by row, why it was not changed.
        names: of all rows found, for reports.
    """

    changed: Sequence[int]
    remaining: Sequence[int]
    unchanged: Mapping[int, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)


def retry_some(alias: str, rows: Sequence[int], *, sources: Collection[str], reason: str) -> Decided:
    """dead | retrying | received → retrying, due now, for the rows in one of the `sources`; see `operating.retry`.

    Rows that another transaction has locked are not waited for.
    """
    return _decide_some(alias, rows, sources, TRIED_AGAIN, reason, quarantined=False)


def skip_some(alias: str, rows: Sequence[int], *, sources: Collection[str], reason: str, by: str) -> Decided:
    """dead | retrying | received | waiting → skipped, for the rows in one of the `sources`; see `operating.skip`."""
    told = "; ".join(filter(None, (reason, by)))
    return _decide_some(alias, rows, sources, skipped(reason), told, quarantined=True)


def _decide_some(
    alias: str, rows: Sequence[int], sources: Collection[str], written: Mapping[str, Any], reason: str, *, quarantined: bool
) -> Decided:
    messages = InboxMessage.objects.using(alias).filter(pk__in=rows)
    unchanged: dict[int, str] = {}
    remaining: list[int] = []
    simple: dict[str, list[int]] = {}
    with transaction.atomic(using=alias):
        locked = messages.select_for_update(skip_locked=is_postgresql(connections[alias])).order_by("pk")
        found = {values["pk"]: values for values in locked.values(*_NAMED)}
        for row, values in found.items():
            state = values["state"]
            if state not in sources:
                unchanged[row] = f"it is {State(state).label.lower()} now"
            elif values["quarantined"] and not quarantined:
                unchanged[row] = "it is in quarantine"
            elif state == State.RUNNING or values["ordered"] or values["topic"].startswith(CELERY_TOPICS):
                remaining.append(row)
            else:
                simple.setdefault(state, []).append(row)
        for state, some in simple.items():
            InboxMessage.objects.using(alias).filter(pk__in=some).update(**written)
            record(alias, some, was=state, reason=reason)
        missing = [row for row in rows if row not in found]
        names = {row: _name(values) for row, values in found.items()}
        for values in messages.filter(pk__in=missing).values(*_NAMED):
            unchanged[values["pk"]] = LOCKED
            names[values["pk"]] = _name(values)
        unchanged |= dict.fromkeys((row for row in missing if row not in unchanged), "it no longer exists")
    return Decided(
        changed=[row for some in simple.values() for row in some], remaining=remaining, unchanged=unchanged, names=names
    )


def _name(values: Mapping[str, Any]) -> str:
    return f"{values['message_id']} ({values['topic']} {values['biz_id']}, {values['handler']})"


def state_of(alias: str, row: int) -> str:
    """The state of a row; "" if it no longer exists."""
    return InboxMessage.objects.using(alias).filter(pk=row).values_list("state", flat=True).first() or ""


def failures_of(alias: str, rows: Sequence[int]) -> dict[int, str]:
    """What these rows failed with, without the line in the code, which an unrelated change moves."""
    found = InboxMessage.objects.using(alias).filter(pk__in=rows)
    return {
        row: f"{kind} {without_line(place)}".strip()
        for row, kind, place in found.values_list("pk", "error_class", "error_place")
    }


@dataclass(frozen=True, kw_only=True)
class Since:
    """What has become of some rows since an instant: run without a failure, failed, or neither yet."""

    pending: Sequence[int]
    succeeded: Sequence[int]
    failed: Mapping[int, str]


def since(alias: str, rows: Sequence[int], instant: datetime) -> Since:
    """What has become of these rows since `instant`, by the database's clock. A deleted row has succeeded."""
    found = dict(InboxMessage.objects.using(alias).filter(pk__in=rows).values_list("pk", "state"))
    failed_rows = InboxMessage.objects.using(alias).filter(
        pk__in=rows, failed_at__gte=instant, state__in=[State.RETRYING, State.DEAD]
    )
    failed = failures_of(alias, list(failed_rows.values_list("pk", flat=True)))
    succeeded = [row for row in rows if found.get(row, State.DONE) in {State.DONE, State.SKIPPED, State.SHED}]
    settled = {*succeeded, *failed}
    return Since(pending=[row for row in rows if row not in settled], succeeded=succeeded, failed=failed)
