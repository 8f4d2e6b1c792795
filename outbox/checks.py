"""`manage.py check` for the outbox."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.utils.module_loading import module_has_submodule

from exactly_once.checks import check_half, check_with
from exactly_once.conf.masking import masked
from exactly_once.conf.settings import InvalidOptions, why_not_called
from exactly_once.transport.broker import SEVERAL_HINT, BrokerConnection, is_local, scheme_of, speaks_amqp, why_unusable
from exactly_once.wire.text import describe
from outbox.commit_hooks import hooked_calls
from outbox.conf import OutboxOptions, outbox_options
from outbox.store.dialect import database_of
from outbox.store.history import HISTORY
from outbox.topic_options import load_encoder
from outbox.transports import transport_class, why_not_from
from outbox.transports.virtual import capabilities_of

_BROKER_HINT = "local:// needs 'inbox' in INSTALLED_APPS; other brokers have a URL like amqp://user:password@host//."


@register()
def check_options(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """outbox.E001: the OUTBOX setting cannot be read."""
    try:
        outbox_options()
    except InvalidOptions as error:
        return [Error(problem, id="outbox.E001") for problem in error.problems]
    return []


@check_with(outbox_options)
def check_broker(chosen: OutboxOptions) -> Iterator[CheckMessage]:
    """outbox.E002, E003, E006, W001, W003: a broker that cannot be used, must not be, promises less, or is not named."""
    url = chosen.BROKER_URL
    given = getattr(settings, "OUTBOX", None) or {}
    if is_local(url) and not apps.is_installed("inbox") and "BROKER_URL" not in given:
        yield Warning(
            "OUTBOX['BROKER_URL'] is not set, and its default, local://, needs 'inbox' in INSTALLED_APPS. Messages can be "
            "published, but not relayed.",
            hint="Set it, for example to amqp://user:password@host//, or install 'inbox'.",
            id="outbox.W003",
        )
    elif reason := _why_no_transport(url):
        yield Error(
            f"OUTBOX['BROKER_URL'] is {masked(url)} and its transport cannot be loaded: {reason}.",
            hint=SEVERAL_HINT if ";" in url else _BROKER_HINT,
            id="outbox.E002",
        )
    elif reason := why_not_from(database_of(None), url):
        yield Error(
            f"OUTBOX['BROKER_URL'] is {masked(url)}, but {reason}.",
            hint="Use local:// for this service's own handlers, or PostgreSQL.",
            id="outbox.E006",
        )
    elif not (is_local(url) or speaks_amqp(url)):
        capabilities = capabilities_of(url)
        problem = f"OUTBOX['BROKER_URL'] is {masked(url)}: {capabilities.weakness}."
        if not capabilities.durable and not settings.DEBUG:
            hint = "Use amqp://, or local:// for this service's own handlers. It is allowed while DEBUG is on."
            yield Error(problem, hint=hint, id="outbox.E003")
        else:
            hint = "The guarantees page says what that costs. Silence this check once it is a decision."
            yield Warning(problem, hint=hint, id="outbox.W001")


def _why_no_transport(url: str) -> str | None:
    try:
        transport_class(url)
    except ImportError as error:
        return str(error)
    return None if is_local(url) else why_unusable(url, outbox_options().own_tls)


@check_with(outbox_options)
def check_broker_tls(chosen: OutboxOptions) -> Iterator[CheckMessage]:
    """outbox.W009: files of BROKER_SSL that this process cannot use."""
    if chosen.own_tls and (reason := chosen.own_tls.why_unloadable()):
        yield Warning(f"OUTBOX: {reason}.", hint="A relay does not start without them.", id="outbox.W009")


@check_with(outbox_options)
def check_publish_hooks(chosen: OutboxOptions) -> Iterator[CheckMessage]:
    """outbox.E004: PUBLISH_HOOKS names a function that cannot be loaded, or that is async."""
    for path in chosen.PUBLISH_HOOKS:
        if reason := why_not_called(path):
            yield Error(
                f"OUTBOX['PUBLISH_HOOKS'] contains {path!r}, which cannot be called: {reason}.",
                hint="Until it can, every publish() fails. Name a function that takes a Draft and returns headers, or None.",
                id="outbox.E004",
            )


@check_with(outbox_options)
def check_encoders(chosen: OutboxOptions) -> Iterator[CheckMessage]:
    """outbox.E005: TOPICS names an encoder that cannot be loaded."""
    for pattern, own in chosen.TOPICS.items():
        try:
            if path := own.get("ENCODER"):
                load_encoder(path)
        except Exception as error:  # noqa: BLE001 - an import runs code of the project
            yield Error(
                f"OUTBOX['TOPICS'][{pattern!r}]['ENCODER'] is {own['ENCODER']!r}, which cannot be used: {describe(error)}.",
                hint="Until it can, every publish() of these topics fails. Name a subclass of json.JSONEncoder.",
                id="outbox.E005",
            )


check_half("OUTBOX", OutboxOptions, HISTORY, settings_id="outbox.W008", rights_id="outbox.W007", partitions_id="outbox.W010")


@check_with(outbox_options)
def check_celery(chosen: OutboxOptions) -> Iterator[CheckMessage]:
    """outbox.W004, W005: workers that would not find the tasks that go through the outbox."""
    celery, url = _celery_in_use(), chosen.BROKER_URL
    for app in celery.apps() if celery else ():
        try:
            with app.connection_for_write() as connection:
                theirs = connection.alt or [connection.as_uri(include_password=True)]
        except Exception:  # noqa: BLE001, S112 - Celery reports what it cannot read itself, and this error may quote the password
            continue
        if not set(map(_place, theirs)) & set(map(_place, url.split(";"))):
            yield Warning(
                f"OUTBOX['BROKER_URL'] is {masked(url)} and the Celery app {app.main!r} uses {masked(';'.join(theirs))}. "
                "Tasks of the class OutboxTask that are called inside a transaction go to the first, and workers look into the "
                "second.",
                hint="Use one broker for both. Silence this check if these are two names of one.",
                id="outbox.W004",
            )
        odd = celery.PLACE_OPTIONS & set(app.conf.broker_transport_options or ())
        if odd and not speaks_amqp(url):
            yield Warning(
                f"broker_transport_options of the Celery app {app.main!r} has {', '.join(sorted(odd))}, which the relay "
                "does not use: it would put tasks of the class OutboxTask where no worker looks, or not find the broker.",
                hint="Leave these options out, or use RabbitMQ.",
                id="outbox.W005",
            )


@register()
def check_commit_hooks(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """outbox.W006: tasks that could commit with the transaction and are called after it."""
    celery = _celery_in_use()
    if celery is None:
        return []
    return [
        Warning(
            f"{call.path}, line {call.line}: the task {call.task.name} is called after the transaction's commit. The call is "
            "lost if the process ends before it, or the broker is unavailable.",
            hint="It is of the class OutboxTask: call it inside the transaction, without on_commit, and it commits with it.",
            id="outbox.W006",
        )
        for call in hooked_calls(app_configs or apps.get_app_configs(), celery.OutboxTask)
    ]


def _celery_in_use() -> Any:
    """The module `outbox.celery`, an extra, if this project uses it.

    A project imports its Celery app with its settings, but its tasks only when they are first needed. So they are imported
    here, as a worker does; what cannot be imported, a worker reports. Without an app nothing is imported: a library may have
    imported Celery, and modules called `tasks` may contain something else.
    """
    state = sys.modules.get("celery._state")
    if state and state._get_active_apps():  # noqa: SLF001 - Celery has no public list of open apps
        for config in apps.get_app_configs():
            if module_has_submodule(config.module, "tasks"):
                with suppress(Exception):
                    import_module(f"{config.name}.tasks")
    return sys.modules.get("outbox.celery")


def _place(url: str) -> tuple[object, ...]:
    """Which broker a URL names, without the user."""
    kind = "amqp" if speaks_amqp(url) else scheme_of(url)
    if kind == "local" or why_unusable(url):
        return kind, url
    broker = BrokerConnection(url)
    host = broker.hostname or "localhost"
    vhost = (broker.virtual_host or "").strip("/")
    return (
        kind,
        "localhost" if host in {"127.0.0.1", "::1"} else host.lower(),
        broker.port or broker.get_transport_cls().default_port,
        vhost or ("0" if kind == "redis" else ""),
    )
