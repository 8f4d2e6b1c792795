"""`manage.py check` for the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from outbox.conf import OutboxOptions, outbox_options
from outbox.kernel import options
from outbox.kernel.broker import masked, speaks_amqp
from outbox.transports import transport_class
from outbox.transports.virtual import capabilities_of

SUPPORTED_DATABASES = ("postgresql", "sqlite")


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
    """outbox.E002, E003, W001: a broker that cannot be used, must not be, or promises less."""
    try:
        url = outbox_options().BROKER_URL
    except ImproperlyConfigured:
        return []
    try:
        transport_class(url)
    except ImportError as error:
        return [
            Error(
                f"OUTBOX['BROKER_URL'] is {masked(url)!r} and its transport cannot be loaded: {error}.",
                hint="local:// needs 'inbox' to be installed; other URLs are kombu's, for example amqp://….",
                id="outbox.E002",
            )
        ]
    if url.startswith("local://") or speaks_amqp(url):
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
            hint="docs/guarantees.md says what that costs. Silence this check once it is a decision.",
            id="outbox.W001",
        )
    ]


@register(Tags.database)
def check_databases(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """outbox.E004, W002: a database that is not supported, or SQLite in a mode that makes writers fail."""
    found: list[CheckMessage] = []
    for alias in databases or ():
        connection = connections[alias]
        if connection.vendor not in SUPPORTED_DATABASES:
            found.append(
                Error(
                    f"The database {alias!r} is {connection.display_name}, which is not supported.",
                    hint="Use PostgreSQL, or SQLite to begin with.",
                    id="outbox.E004",
                )
            )
    return found


@register()
def check_sqlite_mode(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """outbox.W002: SQLite whose transactions begin as readers fail at once when two of them want to write."""
    return [
        Warning(
            f"The SQLite database {alias!r} begins transactions as a reader; under load they fail with 'database is locked'.",
            hint=f"Set DATABASES[{alias!r}]['OPTIONS'] = {{'transaction_mode': 'IMMEDIATE', 'timeout': 20, 'init_command': "
            "'PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;'}.",
            id="outbox.W002",
        )
        for alias in connections
        if connections[alias].vendor == "sqlite"
        and connections[alias].settings_dict["OPTIONS"].get("transaction_mode") not in {"IMMEDIATE", "EXCLUSIVE"}
    ]
