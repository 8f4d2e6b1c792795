"""The endpoints: all their transitions, by guarded UPDATEs, so that all processes agree.

    active → paused      after FAILURES consecutive failures, or for the time that the endpoint has asked for
    paused → active      when that time has passed; then one request at a time in each process, until one succeeds
    active | paused → disabled    by an operator, or by the answer 410
    paused | disabled → active    by an operator

While an endpoint is not active, its messages stay due in the inbox, and no attempt is counted. The circuit breaker is that of
M. Nygard, "Release It!".
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Q

from exactly_once.conf.settings import redacted_error
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.formats import WEBHOOK_HANDLERS
from exactly_once.wire.text import ERROR_LENGTH, printable
from inbox.conf import inbox_options
from inbox.contrib.outgoing_webhooks.models import Endpoint, State, new_secret
from inbox.store import due

logger = escaping_logger(__name__)

FAILURES = 5
"""Consecutive failures after which an endpoint is paused."""
_FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=30), timedelta(hours=1)
OLD_SECRET = timedelta(hours=24)
"""How long requests are signed with the previous secret, too."""
_TABLE = Endpoint._meta.db_table
_ACTIVE = (
    # The second condition is for the index.
    f"EXISTS (SELECT 1 FROM {_TABLE} endpoint WHERE '{WEBHOOK_HANDLERS}' || endpoint.name = wanted.handler "  # noqa: S608 - our own names
    f"AND endpoint.name = substr(wanted.handler, {len(WEBHOOK_HANDLERS) + 1}) AND endpoint.state = 'active')"
)
_RECOVERED = {"failures": 0, "reason": "", "probe_at": None}


def subscribed(alias: str, topic: str) -> list[Endpoint]:
    """The endpoints that get new messages of this topic."""
    enabled = Endpoint.objects.using(alias).exclude(state=State.DISABLED).order_by("pk")
    return [endpoint for endpoint in enabled if not endpoint.topics or topic in endpoint.topics]


def next_due(alias: str, after: str, most: int) -> list[Endpoint]:
    """The next active endpoints with due messages, in the order of their names; with "", from the first one."""
    names = [name.removeprefix(WEBHOOK_HANDLERS) for name in due.next_due(alias, f"{WEBHOOK_HANDLERS}{after}", _ACTIVE, most)]
    found = {endpoint.name: endpoint for endpoint in Endpoint.objects.using(alias).filter(state=State.ACTIVE, name__in=names)}
    return [found[name] for name in names if name in found]


def current(alias: str, pk: int) -> Any:
    """The endpoint with `old_secret_is_valid`; None if it does not exist."""
    valid = Q(old_secret_until__gt=DatabaseTime())
    return Endpoint.objects.using(alias).filter(pk=pk).annotate(old_secret_is_valid=valid).first()


def secrets_of(endpoint: Any) -> Sequence[str]:
    """The secrets to sign with, of an endpoint of `current`."""
    return [endpoint.secret, endpoint.old_secret] if endpoint.old_secret and endpoint.old_secret_is_valid else [endpoint.secret]


def succeeded(alias: str, endpoint: Endpoint) -> None:
    """A request has succeeded: the failures before it no longer count.

    A request that was running when its endpoint was paused does not end the pause, which the endpoint may have asked for.
    """
    if not endpoint.failures:
        return
    _row(alias, endpoint.pk).filter(state=State.ACTIVE).update(**_RECOVERED)
    if endpoint.failures >= FAILURES:
        logger.info("webhooks: endpoint %s answers again; its messages are sent.", endpoint.name)


def failed(alias: str, endpoint: Endpoint, reason: str) -> None:
    """A request has failed. The endpoint is paused after several consecutive failures, longer after each further one.

    Requests that were running when it was paused or disabled are not counted: many at once would make the next pause an hour.
    """
    with transaction.atomic(using=alias):
        row = _row(alias, endpoint.pk).filter(state=State.ACTIVE)
        if not row.update(failures=F("failures") + 1, reason=_stored(reason)):
            return
        failures = row.values_list("failures", flat=True).get()
        if failures < FAILURES:
            return
        pause = min(_FIRST_PAUSE * 2 ** min(failures - FAILURES, 20), LONGEST_PAUSE)
        was_active = _pause(alias, endpoint.pk, pause, reason)
    if was_active:
        logger.warning(
            "webhooks: endpoint %s is paused for %.0f s after %d failures in a row; its messages wait. Last failure: %s",
            endpoint.name,
            pause.total_seconds(),
            failures,
            _stored(reason),
        )


def asked_to_wait(alias: str, endpoint: Endpoint, pause: timedelta, reason: str) -> None:
    """The endpoint has asked for a pause. That is not a failure."""
    if _pause(alias, endpoint.pk, pause, reason):
        logger.info(
            "webhooks: endpoint %s asks for a pause of %.0f s: %s", endpoint.name, pause.total_seconds(), _stored(reason)
        )


def resume_due(alias: str) -> None:
    """paused → active, for the endpoints whose pause has ended."""
    due = Endpoint.objects.using(alias).filter(state=State.PAUSED, probe_at__lte=DatabaseTime())
    # An UPDATE of no row would still take SQLite's write lock.
    if due.exists():
        due.update(state=State.ACTIVE, state_since=DatabaseTime(), probe_at=None)


def disable(alias: str, pk: int, reason: str) -> bool:
    """active | paused → disabled. False: it is disabled."""
    return _disable(_row(alias, pk), reason)


def gone(alias: str, endpoint: Endpoint, reason: str) -> None:
    """active | paused → disabled, unless an operator has given it another URL since the request was sent."""
    _disable(_row(alias, endpoint.pk).filter(url=endpoint.url), reason)


def enable(alias: str, pk: int) -> bool:
    """paused | disabled → active. False: it is active."""
    return _to(_row(alias, pk), [State.PAUSED, State.DISABLED], State.ACTIVE, **_RECOVERED)


def edit(alias: str, pk: int, **changes: Any) -> bool:
    """Change the URL, the topics or the concurrency. False: it does not exist."""
    return bool(_row(alias, pk).update(**changes)) if changes else _row(alias, pk).exists()


def rotate(alias: str, pk: int) -> bool:
    """Give it a new secret; requests are signed with the old one, too, for `OLD_SECRET`. False: it does not exist."""
    return bool(_row(alias, pk).update(old_secret=F("secret"), old_secret_until=DatabaseTime(OLD_SECRET), secret=new_secret()))


def _pause(alias: str, pk: int, pause: timedelta, reason: str) -> bool:
    return _to(_row(alias, pk), [State.ACTIVE], State.PAUSED, probe_at=DatabaseTime(pause), reason=_stored(reason))


def _disable(row: Any, reason: str) -> bool:
    return _to(row, [State.ACTIVE, State.PAUSED], State.DISABLED, reason=_stored(reason), probe_at=None)


def _stored(reason: str) -> str:
    """It may contain the beginning of an answer."""
    return printable(redacted_error(inbox_options().redact_errors, reason), ERROR_LENGTH)


def _to(row: Any, states: Sequence[State], became: State, **columns: Any) -> bool:
    return bool(row.filter(state__in=states).update(state=became, state_since=DatabaseTime(), **columns))


def _row(alias: str, pk: int) -> Any:
    return Endpoint.objects.using(alias).filter(pk=pk)
