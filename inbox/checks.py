"""`manage.py check` for the inbox."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from inbox.conf import IN_THE_DATABASE, LOCAL_BROKER, InboxOptions, inbox_options
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from outbox.database.requirements import deferred_sqlite, unfit_settings, unsupported_databases
from outbox.kernel import options
from outbox.kernel.broker import SEVERAL_HINT, scheme_of, speaks_amqp, why_unusable
from outbox.kernel.masking import masked

_BROKER_HINT = "Use amqp://user:password@host//, or local:// for this service's own messages."


@register()
def check_options(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E001: the INBOX setting, or an option it takes from OUTBOX, is invalid."""
    given = getattr(settings, "INBOX", None)
    try:
        options.parse(InboxOptions, "INBOX", {} if given is None else given)
        inbox_options()
    except options.InvalidOptions as error:
        return [Error(problem, id="inbox.E001") for problem in error.problems]
    except ImproperlyConfigured as error:
        # If the outbox is installed, it reports this.
        return [] if apps.is_installed("outbox") else [Error(str(error), id="inbox.E001")]
    return []


@register()
def check_handlers(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E002: a handler on a database that does not exist, or that has no inbox."""
    return [
        Error(
            f"The handler {handler.name} has using={handler.using!r}, and there is no inbox on such a database.",
            hint="Its inbox row must live in the database of its effect: name an alias of DATABASES that the routers let the "
            "inbox migrate to.",
            id="inbox.E002",
        )
        for handler in registry.all()
        if handler.using not in connections or not router.allow_migrate_model(handler.using, InboxMessage)
    ]


@register(deploy=True)
def check_dedup_keys(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.I001, with --deploy: handlers that detect a foreign producer's duplicate only if it has the same id."""
    try:
        if scheme_of(inbox_options().broker_url) == scheme_of(LOCAL_BROKER):
            return []
    except ImproperlyConfigured:
        return []
    keyless = sorted(handler.name for handler in registry.all() if handler.biz_id is None)
    if not keyless:
        return []
    return [
        Info(
            f"These handlers have no biz_id= of their own: {', '.join(keyless)}.",
            hint="They deduplicate on what the producer says: its biz-id, else its message id. A foreign producer that sends "
            "one fact under two ids has its effect twice; name the payload's own key if there is such a producer.",
            id="inbox.I001",
        )
    ]


@register()
def check_broker(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E004: a broker that cannot be used."""
    try:
        url = inbox_options().broker_url
    except ImproperlyConfigured:
        return []
    reason = None if scheme_of(url) == scheme_of(LOCAL_BROKER) else why_unusable(url)
    if reason is None:
        return []
    return [
        Error(
            f"The inbox receives from {masked(url)}, which cannot be used: {reason}.",
            hint=SEVERAL_HINT if ";" in url else _BROKER_HINT,
            id="inbox.E004",
        )
    ]


@register()
def check_lease_store(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E007: LEASE_STORE is Redis, and its library is missing."""
    try:
        chosen = inbox_options().LEASE_STORE
    except ImproperlyConfigured:
        return []
    if chosen == IN_THE_DATABASE or find_spec("redis") is not None:
        return []
    return [
        Error(
            f"INBOX['LEASE_STORE'] is {masked(chosen)}, but the library for Redis is not installed.",
            hint='Run `pip install "django-exactly-once[redis]"`, or set LEASE_STORE to "database".',
            id="inbox.E007",
        )
    ]


@register()
def check_brokers_agree(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.W001: outbox and inbox of this service use different brokers."""
    try:
        url = inbox_options().broker_url
    except ImproperlyConfigured:
        return []
    outbox = getattr(settings, "OUTBOX", None)
    said = outbox.get("BROKER_URL", LOCAL_BROKER) if isinstance(outbox, dict) else url
    if not isinstance(said, str) or (scheme_of(said) == "local") == (scheme_of(url) == "local"):
        return []
    return [
        Warning(
            f"OUTBOX publishes to {masked(said)} and INBOX receives from {masked(url)}.",
            hint="Leave INBOX['BROKER_URL'] out to receive from where the outbox publishes to.",
            id="inbox.W001",
        )
    ]


@register(deploy=True)
def check_group(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.W002, with --deploy: services with the same name would share queues or leases; a message would reach only one."""
    try:
        chosen = inbox_options()
    except ImproperlyConfigured:
        return []
    local = scheme_of(chosen.broker_url) == scheme_of(LOCAL_BROKER) and chosen.LEASE_STORE == IN_THE_DATABASE
    if chosen.GROUP or local or not registry.all():
        return []
    return [
        Warning(
            f"INBOX['GROUP'] is not set; this service's queues and leases are named after its project, {chosen.group!r}.",
            hint="Another service with the same project name would share them. Set GROUP to a name of this service, once: "
            "queues and what waits in them belong to it, and so do leases in Redis.",
            id="inbox.W002",
        )
    ]


@register()
def check_order(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E006: ordered handlers on a broker without single active consumers."""
    try:
        url = inbox_options().broker_url
    except ImproperlyConfigured:
        return []
    if scheme_of(url) == scheme_of(LOCAL_BROKER) or speaks_amqp(url):
        return []
    return [
        Error(
            f"The handler {handler.name} is ordered, and the inbox receives from {masked(url)}, where several "
            "consumers of a queue would mix up its messages.",
            hint="Use RabbitMQ (amqp://user:password@host//), whose queues can have a single active consumer, or local://.",
            id="inbox.E006",
        )
        for handler in registry.all()
        if handler.ordered
    ]


@register()
def check_timeouts(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.W004: handlers that may exceed the broker's `consumer_timeout`."""
    try:
        chosen = inbox_options()
    except ImproperlyConfigured:
        return []
    if scheme_of(chosen.broker_url) == scheme_of(LOCAL_BROKER):
        return []
    longest = timedelta(seconds=chosen.longest_silence)
    return [
        Warning(
            f"The handler {handler.name} may take {silence} before its deliveries are acknowledged ({why}).",
            hint=f"The broker waits for {chosen.ACK_TIMEOUT}, half of which may pass before the handler begins. Then it closes "
            "the channel and delivers everything again. Give the handler less time, or the broker a longer consumer_timeout, "
            "and say so in INBOX['ACK_TIMEOUT'].",
            id="inbox.W004",
        )
        for handler in registry.all()
        for silence, why in [_longest_silence(handler, chosen)]
        if silence > longest
    ]


def _longest_silence(handler: Handler, options: InboxOptions) -> tuple[timedelta, str]:
    """How long a run of the handler may leave a delivery unacknowledged, and by which of its options."""
    # What is ordered is stored and acknowledged before it is run, and so is a delivery with a lease in the database.
    if handler.ordered or (handler.lease and options.LEASE_STORE == IN_THE_DATABASE):
        return timedelta(), ""
    if handler.lease:
        return handler.lease.limit, f"its lease is in Redis and has limit={handler.lease.limit}"
    if handler.timeout is None:
        return timedelta(), ""
    also = f", group_commit={handler.group_commit}" if handler.group_commit > 1 else ""
    return handler.timeout * handler.group_commit, f"timeout={handler.timeout}{also}"


@register(Tags.database)
def check_databases(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """inbox.E003: an unsupported database."""
    return unsupported_databases(InboxMessage, databases, check_id="inbox.E003")


@register()
def check_database_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E005: database settings that break transactions or instants."""
    return unfit_settings(InboxMessage, check_id="inbox.E005")


@register()
def check_sqlite_mode(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.W003: SQLite whose transactions begin as readers; if the outbox is installed, it reports this."""
    if apps.is_installed("outbox"):
        return []
    return deferred_sqlite(InboxMessage, check_id="inbox.W003")
