"""Alerts without other software: the running processes evaluate conditions once a minute, and report what has changed.

Each half has its conditions. Any process of the project evaluates those of all halves whose tables are in its database, so that
a consumer notices that no relay is running, and the reverse. One process does so at a time, under a lease. An alert
is raised after several evaluations in a row that meet its condition, and cleared after several that do not.

Raised and cleared alerts are rows first. Then they are reported: by a Django signal, by e-mail, and by a webhook. The thread
that does this has its own database connection and delays no message. A delivery is tried again with backoff, by whichever
process holds the lease; it may be repeated when a process is killed in between.
"""

import json
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from django.core import mail
from django.db import connections, transaction
from django.db.models import QuerySet
from django.dispatch import Signal

from exactly_once.conf.app_options import AlertOptions
from exactly_once.conf.masking import masked
from exactly_once.half import Key, halves, required
from exactly_once.models import Alert
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import StopRequest
from exactly_once.process.main_thread import beside
from exactly_once.sql.connections import with_table
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.turns import Turns
from exactly_once.upkeep.loop_leases import TableLease
from exactly_once.wire.text import ERROR_LENGTH, describe, fit, one_line, printable

logger = escaping_logger(__name__)

alert_changed = Signal()
"""An alert was raised or cleared. Arguments: `event` ("raised" or "cleared"), `app`, `database`, and `alert`, its row. It is
sent in the process that evaluates, after the commit, and is lost if that dies in between; e-mail and webhook are tried again.
"""

RAISED_AFTER, CLEARED_AFTER = 2, 3
"""Evaluations in a row that raise an alert, and that clear it."""
_LEASED_ROUNDS = 3
_FIRST_DELAY, _LONGEST_DELAY, _MOST_TRIES = timedelta(minutes=1), timedelta(hours=1), 20
_TIMEOUT_SECONDS = 10
_KEPT_CLEARED = timedelta(days=30)
_LONGEST_GOODBYE_SECONDS = 1.0
_MOST_SENT = 50
"""Deliveries of one round, so that a round with a slow receiver ends before the lease."""


_State = Alert.State


def lease_name(app: str) -> str:
    """The name of the lease of the process that evaluates the alerts of an app."""
    return f"{app}: alerts"


def evaluated_apps(alias: str) -> list[str]:
    """The apps with conditions whose tables are in this database."""
    return [half.app for half in halves() if with_table(half.messages, [alias])[0]]


class Evaluator:
    """Evaluates and reports the alerts of one app in one database.

    Args:
        app: its package.
        alias: the database.
    """

    def __init__(self, app: str, alias: str) -> None:
        self._half = required(app)
        self._app = app
        self._alias = alias
        self._lease = TableLease(alias, lease_name(app))

    def round(self) -> list[tuple[str, Any]] | None:
        """Evaluate once and send what is due; return what has changed. None: another process evaluates."""
        given = self._half.options().alerts
        if not self._lease.take(_LEASED_ROUNDS * given.EVERY):
            return None
        found = {key: words for key, words in self._half.conditions(self._alias, given).items() if key[0] not in given.IGNORE}
        changed = self._apply(found, given)
        self._lease.record_done()
        for event, alert in changed:
            logger.warning("alerts: %s on %r: %s: %s", event, self._alias, alert, one_line(alert.summary))
            alert_changed.send_robust(sender=type(alert), event=event, app=self._app, database=self._alias, alert=alert)
        self._send(given)
        self._alerts().filter(cleared_at__lt=DatabaseTime(-_KEPT_CLEARED)).delete()
        return changed

    def release(self) -> None:
        """Let another process evaluate at once."""
        self._lease.release()

    def _send(self, given: AlertOptions) -> None:
        for alert in self._alerts().filter(send_at__lte=DatabaseTime()).order_by("send_at", "id")[:_MOST_SENT]:
            if not self._lease.take(_LEASED_ROUNDS * given.EVERY):
                return
            left, error = [], ""
            for event, channel in alert.unsent:
                try:
                    _SENDERS[channel](self._content(event, alert), given)
                except Exception as failure:  # noqa: BLE001 - whatever a mail backend or a receiver does
                    left.append([event, channel])
                    error = f"{channel}: {describe(failure)}"
                    logger.warning("alerts: %s of %s was not sent by %s: %s", event, alert, channel, describe(failure))
            attempts = alert.send_attempts + 1 if left else 0
            delay = min(_FIRST_DELAY * 2 ** (attempts - 1), _LONGEST_DELAY)
            self._alerts().filter(pk=alert.pk).update(
                unsent=left,
                send_attempts=attempts,
                send_at=DatabaseTime(delay) if 0 < attempts < _MOST_TRIES else None,
                send_error=printable(error, ERROR_LENGTH),
            )

    def _content(self, event: str, alert: Any) -> dict[str, Any]:
        return {
            "version": 1,
            "event": event,
            "app": self._app,
            "database": self._alias,
            "id": alert.pk,
            "condition": alert.condition,
            "object": alert.object,
            "summary": alert.summary,
            "raised_at": alert.raised_at.isoformat() if alert.raised_at else None,
            "cleared_at": alert.cleared_at.isoformat() if alert.cleared_at else None,
            "host": socket.gethostname(),
        }

    def _apply(self, found: Mapping[Key, str], given: AlertOptions) -> list[tuple[str, Any]]:
        """Store the result of an evaluation; return the alerts that it has raised and cleared, each with the event.

        Args:
            found: the conditions that are met, each with its summary.
        """
        changed: list[tuple[str, Any]] = []
        with transaction.atomic(using=self._alias):
            rows: dict[Key, Any] = {
                (row.condition, row.object): row for row in self._alerts().filter(cleared_at=None).select_for_update()
            }
            for (condition, name), summary in found.items():
                key = condition, fit(name)  # as it is stored
                row = rows.pop(key, None) or Alert(
                    app=self._app, condition=condition, object=key[1], first_seen_at=DatabaseTime()
                )
                if self._meet(row, summary, given):
                    changed.append(("raised", row))
            changed += [("cleared", row) for row in rows.values() if self._miss(row, given)]
        return changed

    def _meet(self, row: Any, summary: str, given: AlertOptions) -> bool:
        row.met, row.unmet = row.met + 1, 0
        row.summary, row.seen_at = printable(summary, ERROR_LENGTH), DatabaseTime()
        needed = 1 if row.condition in self._half.at_once else RAISED_AFTER
        is_raised = row.state == _State.PENDING and row.met >= needed
        if is_raised:
            row.state, row.raised_at = _State.RAISED, DatabaseTime()
            _send_on(row, "raised", given.channels)
        self._save(row)
        return bool(is_raised)

    def _miss(self, row: Any, given: AlertOptions) -> bool:
        row.met, row.unmet = 0, row.unmet + 1
        if row.state == _State.PENDING:
            self._alerts().filter(pk=row.pk).delete()
            return False
        is_cleared = row.unmet >= CLEARED_AFTER
        if is_cleared:
            row.state, row.cleared_at = _State.CLEARED, DatabaseTime()
            _send_on(row, "cleared", given.channels)
        self._save(row)
        return bool(is_cleared)

    def _save(self, row: Any) -> None:
        row.save(using=self._alias)
        row.refresh_from_db(using=self._alias)

    def _alerts(self) -> QuerySet[Any]:
        return QuerySet(Alert, using=self._alias).filter(app=self._app)


def _mail(content: Mapping[str, Any], given: AlertOptions) -> None:
    subject = f"[{content['app']}] {content['event']}: {content['condition']} {content['object']}".strip()
    body = "\n".join([content["summary"], "", *(f"{name}: {value}" for name, value in content.items() if name != "summary")])
    # From Django 6.1 on, `mailers` replaces `get_connection`.
    mailers: Any = getattr(mail, "mailers", None)
    mailer: Any = mailers.default if mailers else mail.get_connection()
    mailer.timeout = _TIMEOUT_SECONDS
    mailer.send_messages([mail.EmailMessage(one_line(subject), body, to=list(given.MAIL_TO))])


class _NoRedirect(HTTPRedirectHandler):
    """A redirected POST would become a GET."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _post(content: Mapping[str, Any], given: AlertOptions) -> None:
    """Raises OSError: the receiver did not answer with a 2xx status in time."""
    body = json.dumps(content).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "django-exactly-once"}
    request = Request(given.WEBHOOK_URL, data=body, headers=headers, method="POST")  # noqa: S310 - https, see AlertOptions
    try:
        with build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_SECONDS) as answer:
            status = answer.status
    except HTTPError as error:
        error.close()  # it is the answer, with its connection
        raise OSError(f"{masked(given.WEBHOOK_URL)} answered {error.code} {error.reason}") from error
    if status >= HTTPStatus.MULTIPLE_CHOICES:
        raise OSError(f"{masked(given.WEBHOOK_URL)} answered {status}")


_SENDERS: Mapping[str, Callable[[Mapping[str, Any], AlertOptions], None]] = {"mail": _mail, "webhook": _post}


def intervals() -> dict[str, timedelta]:
    """How often the alerts of each app are evaluated."""
    return {half.app: half.options().alerts.EVERY for half in halves()}


def _keep_evaluating(aliases: Collection[str], stop: StopRequest) -> None:
    """Evaluate the alerts of these databases, those of each app at its own interval, until asked to stop. No error ends it."""
    evaluators: dict[tuple[str, str], Evaluator] = {}
    turns = Turns("alerts", "alerts: an evaluation on %r failed; it is tried again in a minute.")
    due_at = {app: monotonic() + every.total_seconds() for app, every in intervals().items()}

    def evaluate(alias: str, due: Collection[str]) -> None:
        for app in evaluated_apps(alias):
            if app in due:
                evaluators.setdefault((app, alias), Evaluator(app, alias)).round()

    try:
        while not stop.wait(max(min(due_at.values()) - monotonic(), 0.0)):
            due = {app for app, at in due_at.items() if at <= monotonic()}
            due_at |= {app: monotonic() + every.total_seconds() for app, every in intervals().items() if app in due}
            for alias in with_table(Alert, aliases)[0]:
                turns.take(alias, partial(evaluate, alias, due), stop)
            # The next round is in a minute.
            connections.close_all()
        for evaluator in evaluators.values():
            evaluator.release()
    finally:
        connections.close_all()


def alerting(aliases: Collection[str], stop: StopRequest) -> AbstractContextManager[None]:
    """Evaluate the alerts of these databases on a thread of its own during the block."""
    watched: Sequence[str] = [alias for alias in aliases if not connections[alias].in_atomic_block]  # as in a test
    end = stop.follower()
    return beside([("alerts", partial(_keep_evaluating, watched, end))], end, seconds=_LONGEST_GOODBYE_SECONDS)


def _send_on(row: Any, event: str, channels: Sequence[str]) -> None:
    if channels:
        row.unsent = [*row.unsent, *([event, channel] for channel in channels)]
        row.send_at = DatabaseTime()
