"""`manage.py check` for the inbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from inbox.conf import LOCAL_BROKER, InboxOptions, inbox_options
from inbox.handlers import registry
from outbox.kernel import options
from outbox.kernel.broker import masked, scheme_of


@register()
def check_options(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E001: the INBOX setting cannot be read."""
    given = getattr(settings, "INBOX", None)
    try:
        options.parse(InboxOptions, "INBOX", {} if given is None else given)
    except options.InvalidOptions as error:
        return [Error(problem, id="inbox.E001") for problem in error.problems]
    return []


@register()
def check_handlers(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E002, W001: a handler on a database that does not exist, or one without a key for foreign producers."""
    found: list[CheckMessage] = []
    for handler in registry.all():
        if handler.using not in connections:
            found.append(
                Error(
                    f"The handler {handler.name} has using={handler.using!r}, which DATABASES does not know.",
                    hint="Its inbox row must live in the database of its effect: name that alias.",
                    id="inbox.E002",
                )
            )
    return found


@register()
def check_brokers_agree(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.W001: the two halves of this service speak to different brokers."""
    try:
        url = inbox_options().broker_url
    except ImproperlyConfigured:
        return []
    outbox = getattr(settings, "OUTBOX", None)
    said = outbox.get("BROKER_URL", LOCAL_BROKER) if isinstance(outbox, dict) else url
    if (scheme_of(said) == "local") == (scheme_of(url) == "local"):
        return []
    return [
        Warning(
            f"OUTBOX publishes to {masked(said)!r} and INBOX receives from {masked(url)!r}.",
            hint="Leave INBOX['BROKER_URL'] out to receive from where the outbox publishes to.",
            id="inbox.W001",
        )
    ]
