"""`manage.py check` for the inbox."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.models import Model

from exactly_once.checks import check_half, check_with
from exactly_once.conf.masking import masked
from exactly_once.conf.settings import InvalidOptions, why_not_called
from exactly_once.sql.connections import outlives_its_client, with_table
from exactly_once.transport.broker import LOCAL_BROKER, SEVERAL_HINT, is_local, speaks_amqp, why_unusable
from exactly_once.wire.payloads import why_unreadable
from inbox.conf import IN_THE_DATABASE, InboxOptions, has_outbox, inbox_options, outbox_keeps_history
from inbox.consumer.names import names_without_code, warnings_of_new_names
from inbox.consumer.topology import queue_name
from inbox.handlers.handler import Handler
from inbox.handlers.options import past_in_words
from inbox.handlers.registry import registry
from inbox.housekeeping import HISTORY
from inbox.models import InboxMessage

_BROKER_HINT = "Use amqp://user:password@host//, or local:// for this service's own messages."


@register()
def check_options(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E001: the INBOX setting, or an option it takes from OUTBOX, is invalid."""
    try:
        inbox_options()
    except InvalidOptions as error:
        return [Error(problem, id="inbox.E001") for problem in error.problems]
    except ImproperlyConfigured as error:
        # If the outbox is installed, it reports this.
        return [] if apps.is_installed("outbox") else [Error(str(error), id="inbox.E001")]
    return []


check_half("INBOX", InboxOptions, HISTORY, settings_id="inbox.W009", rights_id="inbox.W008", partitions_id="inbox.W011")


@register()
def check_handlers(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E002: a handler on a database that does not exist or that has no inbox tables."""
    return errors_without_tables(
        InboxMessage,
        [(f"The handler {handler.name}", handler) for handler in registry.all()],
        what="inbox",
        hint="The inbox row and the effect must be in the same database. Set using= to an alias of DATABASES to which the "
        "database routers allow the inbox to be migrated.",
        id="inbox.E002",
    )


@register()
def check_payloads(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox.E009: a handler with a payload class that no payload can be read as."""
    return [
        Error(
            f"The handler {handler.name} has payload={kind.__qualname__}, which cannot be read: {reason}.",
            hint="Until it can, each of its messages is a dead letter.",
            id="inbox.E009",
        )
        for handler in registry.all()
        for kind in {*handler.payloads.values()}
        if (reason := why_unreadable(kind))
    ]


def errors_without_tables(
    model: type[Model], named: Iterable[tuple[str, Handler]], *, what: str, **error: Any
) -> list[CheckMessage]:
    """An error for each handler, after its name for people, whose database does not exist or may not have the table."""
    return [
        Error(f"{name} has using={handler.using!r}, but that database has no {what}.", **error)
        for name, handler in named
        if handler.using not in connections or not router.allow_migrate_model(handler.using, model)
    ]


@check_with(inbox_options, deploy=True)
def check_dedup_keys(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.I001, with --deploy: handlers that detect a foreign producer's duplicate only if it has the same message id."""
    keyless = sorted(handler.name for handler in registry.all() if handler.biz_id is None and handler.kind.has_queue)
    if keyless and not is_local(chosen.broker_url):
        yield Info(
            f"These handlers do not set biz_id=: {', '.join(keyless)}.",
            hint="They deduplicate on the producer's biz-id, else on its message id. If a foreign producer sends one fact with "
            "two message ids, its effect happens twice. For such a producer, set biz_id= to the payload field that identifies "
            "the fact.",
            id="inbox.I001",
        )


@check_with(inbox_options)
def check_broker(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.E004: a broker that cannot be used. One of `OUTBOX` is reported by the outbox, if that is installed."""
    url = chosen.broker_url
    is_own = chosen.BROKER_URL or not apps.is_installed("outbox")
    if is_own and not is_local(url) and (reason := why_unusable(url, chosen.own_tls)):
        yield Error(
            f"The inbox's broker is {masked(url)}, which cannot be used: {reason}.",
            hint=SEVERAL_HINT if ";" in url else _BROKER_HINT,
            id="inbox.E004",
        )


@check_with(inbox_options)
def check_broker_tls(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.W010: files of BROKER_SSL that this process cannot use."""
    if chosen.own_tls and (reason := chosen.own_tls.why_unloadable()):
        yield Warning(f"INBOX: {reason}.", hint="A consumer does not start without them.", id="inbox.W010")


@check_with(inbox_options)
def check_lease_store(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.E007: LEASE_STORE is Redis, but the Redis library is not installed, or does not understand the URL."""
    if chosen.LEASE_STORE != IN_THE_DATABASE and find_spec("redis") is None:
        yield Error(
            f"INBOX['LEASE_STORE'] is {masked(chosen.LEASE_STORE)}, but the Python library for Redis is not installed.",
            hint='Run `pip install "django-exactly-once[redis]"`, or set LEASE_STORE to "database".',
            id="inbox.E007",
        )
    elif chosen.LEASE_STORE != IN_THE_DATABASE and not _is_understood(chosen.LEASE_STORE):
        yield Error(
            f"INBOX['LEASE_STORE'] is {masked(chosen.LEASE_STORE)}: an option is not understood, or has a wrong value.",
            hint="Give the options that the library for Redis knows, such as ssl_ca_certs.",
            id="inbox.E007",
        )


def _is_understood(url: str) -> bool:
    from redis import ConnectionPool, RedisError  # noqa: PLC0415 - an extra

    try:
        ConnectionPool.from_url(url).make_connection()
    except (TypeError, ValueError, RedisError):
        return False
    return True


@check_with(inbox_options)
def check_around(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.E008: AROUND names a function that cannot be loaded, or that is async."""
    for path in chosen.AROUND:
        if reason := why_not_called(path):
            yield Error(
                f"INBOX['AROUND'] contains {path!r}, which cannot be called around handlers: {reason}.",
                hint="Until it can, every attempt of every handler fails. Name a function that takes the message and returns a "
                "context manager, as one with @contextlib.contextmanager does.",
                id="inbox.E008",
            )


@check_with(inbox_options)
def check_brokers_agree(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.W001: one of outbox and inbox uses local://, the other a broker."""
    outbox = getattr(settings, "OUTBOX", None)
    outbox_url = outbox.get("BROKER_URL", LOCAL_BROKER) if isinstance(outbox, dict) else chosen.broker_url
    if isinstance(outbox_url, str) and is_local(outbox_url) != is_local(chosen.broker_url):
        yield Warning(
            f"OUTBOX publishes to {masked(outbox_url)} and INBOX receives from {masked(chosen.broker_url)}.",
            hint="Remove INBOX['BROKER_URL'] to receive from the broker that the outbox publishes to.",
            id="inbox.W001",
        )


@check_with(inbox_options, deploy=True)
def check_group(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.W002, with --deploy: services with the same name share queues and leases, so a message reaches only one of them."""
    local = is_local(chosen.broker_url) and chosen.LEASE_STORE == IN_THE_DATABASE
    if registry.all() and not (chosen.GROUP or local):
        yield Warning(
            f"INBOX['GROUP'] is not set; this service's queues and leases are named after its project, {chosen.group!r}.",
            hint="Another service with the same project name would share them. Set GROUP to the name of this service. Do not "
            "change it later: existing queues with their messages, and leases in Redis, keep the old name.",
            id="inbox.W002",
        )


@check_with(inbox_options)
def check_order(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.E006: ordered handlers on a broker without single active consumers."""
    url = chosen.broker_url
    for handler in () if is_local(url) or speaks_amqp(url) else registry.all():
        if handler.ordered:
            yield Error(
                f"The handler {handler.name} is ordered, but the inbox's broker is {masked(url)}, where several consumers of a "
                "queue receive its messages out of order.",
                hint="Use RabbitMQ (amqp://user:password@host//), whose queues can have a single active consumer, or local://.",
                id="inbox.E006",
            )


@check_with(inbox_options)
def check_timeouts(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.W004: handlers that may exceed the broker's `consumer_timeout`."""
    for handler in () if is_local(chosen.broker_url) else registry.all():
        silence, why = _longest_silence(handler, chosen)
        if silence > timedelta(seconds=chosen.longest_silence):
            yield Warning(
                f"The handler {handler.name} may take {silence} before its deliveries are acknowledged ({why}).",
                hint=f"The broker waits {chosen.ACK_TIMEOUT} for an acknowledgement, half of which may pass before the handler "
                "starts. Then it closes the channel and delivers its messages again. Shorten the handler's limit, or raise "
                "RabbitMQ's consumer_timeout and set INBOX['ACK_TIMEOUT'] to the same value.",
                id="inbox.W004",
            )


def _longest_silence(handler: Handler, options: InboxOptions) -> tuple[timedelta, str]:
    """How long a run of the handler may leave a delivery unacknowledged, and the options that allow it."""
    # Messages of ordered handlers, and of handlers with a lease in the database, are stored and acknowledged before the run.
    if handler.ordered or (handler.lease and options.LEASE_STORE == IN_THE_DATABASE):
        return timedelta(), ""
    if handler.lease:
        return handler.lease.limit, f"its lease is in Redis and has limit={handler.lease.limit}"
    if handler.timeout is None:
        return timedelta(), ""
    calls = 1 if handler.kind.gets_list else handler.kind.size
    also = f", group_commit={calls}" if calls > 1 else ""
    return handler.timeout * calls, f"timeout={handler.timeout}{also}"


@register(Tags.database)
def check_names(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """inbox.W007, with --database: a new handler on the topic of messages whose handler has no code: it may be a new name."""
    return [
        Warning(
            problem,
            hint="If it is another handler, silence this check until the old messages are purged. If no process has that "
            "handler, delete its queue.",
            id="inbox.W007",
        )
        for alias in with_table(InboxMessage, databases or ())[0]
        for problem in warnings_of_new_names(names_without_code(alias))
    ]


@register(Tags.database)
def check_vanished_hosts(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """inbox.W012, with --database: behind a pooler, handlers without a timeout whose host may vanish with its locks."""
    unbounded: dict[str, list[str]] = {
        alias: [] for alias in with_table(InboxMessage, databases or ())[0] if outlives_its_client(alias)
    }
    for handler in registry.all():
        if handler.using in unbounded and not (handler.timeout or handler.lease):
            unbounded[handler.using].append(handler.name)
    return [
        Warning(
            f"The database {alias!r} is behind a pooler, and these handlers have no timeout: {', '.join(names)}. If a "
            "consumer's host vanishes while they run, the server keeps its locks.",
            hint="Set their timeout=, or idle_in_transaction_session_timeout for the role of consumers.",
            id="inbox.W012",
        )
        for alias, names in unbounded.items()
        if names
    ]


@check_with(inbox_options)
def check_starts(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.W005: handlers with start_from whose database has no outbox, or no history, to read the past from."""
    for handler in registry.all():
        if not handler.wants_past:
            continue
        said = f"The handler {handler.name} wants {past_in_words(handler.starts_at)} (start_from), but"
        if not has_outbox(handler.using):
            yield Warning(
                f"{said} the database {handler.using!r} has no outbox of this project, so it gets messages from now on only.",
                hint="In the service that publishes the topic, run "
                + " and ".join(
                    f"outbox_replay --topic {topic} --to-group {queue_name(handler, chosen)}" for topic in handler.topics
                )
                + ". Then remove start_from.",
                id="inbox.W005",
            )
        elif not outbox_keeps_history():
            yield Warning(
                f"{said} OUTBOX['KEEP_HISTORY'] is None, so there is no history and it gets messages from now on only.",
                hint="Set OUTBOX['KEEP_HISTORY'] before you deploy a handler that wants its past, or remove start_from.",
                id="inbox.W005",
            )


@check_with(inbox_options)
def check_waiting(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox.W006: fewer requests of the HTTP API may wait than clients may read."""
    http = chosen.http
    if http.MAX_WAITING is not None and len(http.readers) > http.MAX_WAITING:
        yield Warning(
            f"HTTP has MAX_WAITING={http.MAX_WAITING}, and {len(http.readers)} of its clients may read. While some of them "
            "wait for messages, the others are answered with 429 when they want to wait.",
            hint="Set it to the number of these clients at least. Under WSGI the server needs more threads than that, because "
            "a waiting request occupies one.",
            id="inbox.W006",
        )
