"""`manage.py check` for the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from outbox.conf import OutboxOptions, outbox_options
from outbox.kernel import options
from outbox.kernel.broker import SEVERAL_HINT, masked, scheme_of, speaks_amqp, why_unusable
from outbox.kernel.databases import UNSUPPORTED_HINT, deferred_sqlite, immediate_hint, unfit_settings, unsupported
from outbox.models import OutboxMessage
from outbox.transports import transport_class
from outbox.transports.virtual import capabilities_of

_BROKER_HINT = "local:// needs 'inbox' in INSTALLED_APPS; other brokers have a URL like amqp://user:password@host//."


@register()
def check_options(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """outbox.E001: the OUTBOX setting cannot be read."""
    given = getattr(settings, "OUTBOX", None)
    try:
        options.parse(OutboxOptions, "OUTBOX", {} if given is None else given)
    except options.InvalidOptions as error:
        return [Error(problem, id="outbox.E001") for problem in error.problems]
    return []


@register()
def check_broker(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """outbox.E002, E003, W001, W003: a broker that cannot be used, must not be, promises less, or is not named."""
    try:
        url = outbox_options().BROKER_URL
    except ImproperlyConfigured:
        return []
    if scheme_of(url) == "local" and not apps.is_installed("inbox") and "BROKER_URL" not in getattr(settings, "OUTBOX", {}):
        return [
            Warning(
                "OUTBOX['BROKER_URL'] is not set, and its default, local://, needs 'inbox' in INSTALLED_APPS. Messages can be "
                "published, but not relayed.",
                hint="Set it, for example to amqp://user:password@host//, or install 'inbox'.",
                id="outbox.W003",
            )
        ]
    if reason := _why_no_transport(url):
        return [
            Error(
                f"OUTBOX['BROKER_URL'] is {masked(url)!r} and its transport cannot be loaded: {reason}.",
                hint=SEVERAL_HINT if ";" in url else _BROKER_HINT,
                id="outbox.E002",
            )
        ]
    if scheme_of(url) == "local" or speaks_amqp(url):
        return []
    capabilities = capabilities_of(url)
    if not capabilities.durable and not settings.DEBUG:
        return [
            Error(
                f"OUTBOX['BROKER_URL'] is {masked(url)!r}: {capabilities.weakness}.",
                hint="Use amqp://, or local:// for this service's own handlers. It is allowed while DEBUG is on.",
                id="outbox.E003",
            )
        ]
    return [
        Warning(
            f"OUTBOX['BROKER_URL'] is {masked(url)!r}: {capabilities.weakness}.",
            hint="The guarantees page says what that costs. Silence this check once it is a decision.",
            id="outbox.W001",
        )
    ]


def _why_no_transport(url: str) -> str | None:
    try:
        transport_class(url)
    except ImportError as error:
        return str(error)
    return None if scheme_of(url) == "local" else why_unusable(url)


@register(Tags.database)
def check_databases(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """outbox.E004: a database that the promises do not hold on."""
    return [
        Error(
            f"The database {alias!r} is {connections[alias].display_name}, on which the outbox is not supported.",
            hint=UNSUPPORTED_HINT,
            id="outbox.E004",
        )
        for alias in unsupported(OutboxMessage, list(databases or ()))
    ]


@register()
def check_database_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """outbox.E005: settings under which a transaction or an instant is not what it seems."""
    return [Error(problem, hint=hint, id="outbox.E005") for problem, hint in unfit_settings(OutboxMessage)]


@register()
def check_sqlite_mode(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """outbox.W002: SQLite whose transactions begin as readers."""
    return [
        Warning(
            f"The SQLite database {alias!r} begins transactions as a reader; under load they fail with 'database is locked'.",
            hint=immediate_hint(alias),
            id="outbox.W002",
        )
        for alias in deferred_sqlite(OutboxMessage)
    ]
