"""The rows of alerts: hysteresis, acknowledgement, pending deliveries, and the lease of the evaluating process."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Model, Q, QuerySet

from outbox.database.alert_model import AlertRecord
from outbox.database.now import DatabaseTime
from outbox.kernel.identity import process_name
from outbox.kernel.text import ERROR_LENGTH, NAME_LENGTH, fit, printable

_State = AlertRecord.State
_NAME = "alerts"

Key = tuple[str, str]
"""A condition and its object."""


class AlertTable:
    """The alerts of one app.

    Args:
        alerts: the model over `AlertRecord`.
        leases: the model over `AlertLeaseRecord`.
    """

    def __init__(self, alerts: type[Model], leases: type[Model]) -> None:
        self._alerts = alerts
        self._leases = leases

    @property
    def model(self) -> type[Model]:
        return self._alerts

    def take_lease(self, alias: str, token: uuid.UUID, duration: timedelta, *, name: str = _NAME) -> bool:
        """Take a lease, or renew it. False: another process holds it."""
        mine = {"token": token, "holder": process_name()[:NAME_LENGTH], "expires_at": DatabaseTime(duration)}
        leases: Any = QuerySet(self._leases, using=alias)
        if leases.filter(Q(token=token) | Q(expires_at__lte=DatabaseTime()), name=name).update(**mine):
            return True
        _, created = leases.get_or_create(name=name, defaults=mine)
        return bool(created)

    def release_lease(self, alias: str, token: uuid.UUID) -> None:
        """Let another process take it at once."""
        QuerySet(self._leases, using=alias).filter(token=token).update(expires_at=DatabaseTime())

    def lease(self, alias: str) -> Any:
        """The row of the lease with `database_now`; None if the alerts were never evaluated."""
        return QuerySet(self._leases, using=alias).annotate(database_now=DatabaseTime()).filter(name=_NAME).first()

    def apply(
        self, alias: str, found: Mapping[Key, str], *, raise_after: int, clear_after: int, channels: Sequence[str]
    ) -> list[tuple[str, Any]]:
        """Store the result of an evaluation; return the alerts that it has raised and cleared, each with the event.

        Args:
            found: the conditions that are met, each with its summary.
            channels: where raised and cleared alerts are reported.
        """
        changed: list[tuple[str, Any]] = []
        with transaction.atomic(using=alias):
            QuerySet(self._leases, using=alias).filter(name=_NAME).update(evaluated_at=DatabaseTime())
            open_rows: Any = QuerySet(self._alerts, using=alias).filter(cleared_at=None).select_for_update()
            rows: dict[Key, Any] = {(row.condition, row.object): row for row in open_rows}
            for key, summary in found.items():
                key = (key[0], fit(key[1]))  # noqa: PLW2901 - as it is stored
                row = rows.pop(key, None) or self._begun(*key)
                if self._meet(alias, row, summary, raise_after, channels):
                    changed.append(("raised", row))
            changed += [("cleared", row) for row in rows.values() if self._miss(alias, row, clear_after, channels)]
        return changed

    def _begun(self, condition: str, name: str) -> Any:
        return self._alerts(condition=condition, object=name, first_seen_at=DatabaseTime())

    def _meet(self, alias: str, row: Any, summary: str, raise_after: int, channels: Sequence[str]) -> bool:
        row.met, row.unmet = row.met + 1, 0
        row.summary, row.seen_at = printable(summary, ERROR_LENGTH), DatabaseTime()
        is_raised = row.state == _State.PENDING and row.met >= raise_after
        if is_raised:
            row.state, row.raised_at = _State.RAISED, DatabaseTime()
            _send_on(row, "raised", channels)
        self._save(alias, row)
        return bool(is_raised)

    def _miss(self, alias: str, row: Any, clear_after: int, channels: Sequence[str]) -> bool:
        row.met, row.unmet = 0, row.unmet + 1
        if row.state == _State.PENDING:
            QuerySet(self._alerts, using=alias).filter(pk=row.pk).delete()
            return False
        is_cleared = row.unmet >= clear_after
        if is_cleared:
            row.state, row.cleared_at = _State.CLEARED, DatabaseTime()
            _send_on(row, "cleared", channels)
        self._save(alias, row)
        return bool(is_cleared)

    def _save(self, alias: str, row: Any) -> None:
        row.save(using=alias)
        row.refresh_from_db(using=alias)

    def raised(self, alias: str) -> QuerySet[Any]:
        """The raised alerts, the latest first, annotated with `database_now`."""
        rows: QuerySet[Any] = QuerySet(self._alerts, using=alias).annotate(database_now=DatabaseTime())
        return rows.filter(state=_State.RAISED).order_by("-raised_at", "-id")

    def unsent(self, alias: str) -> QuerySet[Any]:
        """The alerts with a delivery that is due."""
        return QuerySet(self._alerts, using=alias).filter(send_at__lte=DatabaseTime()).order_by("send_at", "id")

    def sent(self, alias: str, pk: int, left: Sequence[Sequence[str]], error: str, again_after: timedelta | None) -> None:
        """Store the result of a delivery: what is left, why, and when it is tried again; None: never."""
        values: dict[str, Any] = {"unsent": list(left), "send_error": printable(error, ERROR_LENGTH)}
        values["send_at"] = DatabaseTime(again_after) if left and again_after is not None else None
        rows: Any = QuerySet(self._alerts, using=alias).select_for_update().filter(pk=pk)
        with transaction.atomic(using=alias):
            row = rows.first()
            if row is not None:
                values["send_attempts"] = row.send_attempts + 1 if left else 0
                rows.update(**values)

    def acknowledge(self, alias: str, pk: int, by: str) -> bool:
        """Record that an operator knows of a raised alert. False: it is not raised, or acknowledged already."""
        rows: Any = QuerySet(self._alerts, using=alias).filter(pk=pk, state=_State.RAISED, acknowledged_at=None)
        return bool(rows.update(acknowledged_by=by[:NAME_LENGTH], acknowledged_at=DatabaseTime()))

    def delete_cleared(self, alias: str, older_than: timedelta) -> int:
        return QuerySet(self._alerts, using=alias).filter(cleared_at__lt=DatabaseTime(-older_than)).delete()[0]


def _send_on(row: Any, event: str, channels: Sequence[str]) -> None:
    if channels:
        row.unsent = [*row.unsent, *([event, channel] for channel in channels)]
        row.send_at = DatabaseTime()
