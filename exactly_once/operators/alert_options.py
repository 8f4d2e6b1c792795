"""The option `ALERTS` of both apps, as a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import urlsplit

from exactly_once import settings as options
from exactly_once.masking import masked

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_NO_AMOUNTS = {"ENABLED", "IGNORE", "MAIL_TO", "WEBHOOK_URL"}


@dataclass(frozen=True, kw_only=True)
class AlertOptions:
    """Every option of `ALERTS`, with its default.

    Attributes:
        ENABLED: whether the processes evaluate the conditions.
        EVERY: time between two evaluations.
        IGNORE: names of conditions that are not evaluated.
        RAISE_AFTER: evaluations in a row that must meet a condition before it is raised.
        CLEAR_AFTER: evaluations in a row that must not meet it before it is cleared.
        LAG: a message that is due for longer raises an alert.
        DEAD: this many new dead letters within DEAD_WITHIN raise an alert.
        DEAD_WITHIN: see DEAD; also the time for which a conflicting duplicate raises one.
        PAUSED_FOR: a topic or handler that is paused for longer raises an alert.
        MAIL_TO: recipients of an e-mail for each raised and cleared alert. Django's EMAIL settings, or its MAILERS, send it.
        WEBHOOK_URL: receives a JSON object by POST for each raised and cleared alert; "" for none. It must be https://, except
            on this host.
        TIMEOUT: how long one delivery may take.
        RETRY_CAP: the longest delay between two tries of a delivery; the first is a minute, and each is twice as long.
        GIVE_UP_AFTER: tries after which a delivery is given up.
    """

    ENABLED: bool = True
    EVERY: timedelta = timedelta(minutes=1)
    IGNORE: tuple[str, ...] = ()
    RAISE_AFTER: int = 2
    CLEAR_AFTER: int = 3
    LAG: timedelta = timedelta(minutes=5)
    DEAD: int = 1
    DEAD_WITHIN: timedelta = timedelta(minutes=15)
    PAUSED_FOR: timedelta = timedelta(hours=1)
    MAIL_TO: tuple[str, ...] = ()
    WEBHOOK_URL: str = field(default="", repr=False)
    TIMEOUT: timedelta = timedelta(seconds=10)
    RETRY_CAP: timedelta = timedelta(hours=1)
    GIVE_UP_AFTER: int = 20

    def __post_init__(self) -> None:
        options.require_positive(self, *(name for name in options.names(type(self)) if name not in _NO_AMOUNTS))
        if self.WEBHOOK_URL and (reason := _why_no_webhook(self.WEBHOOK_URL)):
            raise ValueError(f"WEBHOOK_URL is {masked(self.WEBHOOK_URL)}: {reason}.")

    @property
    def channels(self) -> list[str]:
        """Where alerts are sent, apart from the signal."""
        return [*(["mail"] if self.MAIL_TO else []), *(["webhook"] if self.WEBHOOK_URL else [])]


def read_alerts(given: object) -> AlertOptions:
    """`ALERTS` of a setting.

    Raises:
        ValueError: it is invalid.
    """
    return options.parse(AlertOptions, "ALERTS", given)


def _why_no_webhook(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError as error:
        return f"it cannot be read ({error})"
    if parts.scheme == "https" and host:
        return None
    if parts.scheme == "http" and host in _LOOPBACK:
        return None
    return "it must be a URL like https://host/path"
