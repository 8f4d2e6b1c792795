"""The rows of alerts: hysteresis, acknowledgement and pending deliveries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from exactly_once.models import Alert
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, fit, printable

_State = Alert.State

Key = tuple[str, str]
"""A condition and its object."""


class AlertTable:
    """The alerts of one app.

    Args:
        app: its package.
    """

    def __init__(self, app: str) -> None:
        self._app = app

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
            open_rows = self._alerts(alias).filter(cleared_at=None).select_for_update()
            rows: dict[Key, Any] = {(row.condition, row.object): row for row in open_rows}
            for key, summary in found.items():
                key = (key[0], fit(key[1]))  # noqa: PLW2901 - as it is stored
                row = rows.pop(key, None) or self._begun(*key)
                if self._meet(alias, row, summary, raise_after, channels):
                    changed.append(("raised", row))
            changed += [("cleared", row) for row in rows.values() if self._miss(alias, row, clear_after, channels)]
        return changed

    def _begun(self, condition: str, name: str) -> Alert:
        return Alert(app=self._app, condition=condition, object=name, first_seen_at=DatabaseTime())

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
            self._alerts(alias).filter(pk=row.pk).delete()
            return False
        is_cleared = row.unmet >= clear_after
        if is_cleared:
            row.state, row.cleared_at = _State.CLEARED, DatabaseTime()
            _send_on(row, "cleared", channels)
        self._save(alias, row)
        return bool(is_cleared)

    def _alerts(self, alias: str) -> QuerySet[Any]:
        return QuerySet(Alert, using=alias).filter(app=self._app)

    def _save(self, alias: str, row: Any) -> None:
        row.save(using=alias)
        row.refresh_from_db(using=alias)

    def unsent(self, alias: str) -> QuerySet[Any]:
        """The alerts with a delivery that is due."""
        return self._alerts(alias).filter(send_at__lte=DatabaseTime()).order_by("send_at", "id")

    def sent(self, alias: str, pk: int, left: Sequence[Sequence[str]], error: str, again_after: timedelta | None) -> None:
        """Store the result of a delivery: what is left, why, and when it is tried again; None: never."""
        values: dict[str, Any] = {"unsent": list(left), "send_error": printable(error, ERROR_LENGTH)}
        values["send_at"] = DatabaseTime(again_after) if left and again_after is not None else None
        rows: Any = self._alerts(alias).select_for_update().filter(pk=pk)
        with transaction.atomic(using=alias):
            row = rows.first()
            if row is not None:
                values["send_attempts"] = row.send_attempts + 1 if left else 0
                rows.update(**values)

    def delete_cleared(self, alias: str, older_than: timedelta) -> int:
        return self._alerts(alias).filter(cleared_at__lt=DatabaseTime(-older_than)).delete()[0]


def raised(alias: str) -> QuerySet[Any]:
    """The raised alerts of all apps, the latest first, annotated with `database_now`."""
    rows: QuerySet[Any] = Alert.objects.using(alias).annotate(database_now=DatabaseTime())
    return rows.filter(state=_State.RAISED).order_by("-raised_at", "-id")


def acknowledge(alias: str, pk: int, by: str) -> str | None:
    """Record that an operator knows of a raised alert; its app. None: it is not raised, or acknowledged already."""
    rows = Alert.objects.using(alias).filter(pk=pk, state=_State.RAISED, acknowledged_at=None)
    app = rows.values_list("app", flat=True).first()
    return app if rows.update(acknowledged_by=by[:NAME_LENGTH], acknowledged_at=DatabaseTime()) else None


def _send_on(row: Any, event: str, channels: Sequence[str]) -> None:
    if channels:
        row.unsent = [*row.unsent, *([event, channel] for channel in channels)]
        row.send_at = DatabaseTime()
