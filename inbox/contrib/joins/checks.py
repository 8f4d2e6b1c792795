"""`manage.py check` for joins."""

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections, router

from inbox.contrib.joins.models import Run
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry


@register()
def check_cycles(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox_joins.W001: a join that waits for a message which, as far as is declared, is published only after it has run."""
    return [
        Warning(
            f"The join {join.name} can never run, as far as is declared: it waits for {topic!r}, which only "
            f"{', '.join(sorted(names))} publishes, and that runs only after it.",
            hint="Remove the topic from all_of=, or correct the publishes= of these handlers. Silence this check if "
            "other code, such as a view, publishes the first of these messages.",
            id="inbox_joins.W001",
        )
        for join in _joins()
        for topic, names in _never_published(join)
    ]


@register()
def check_tables(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox_joins.E002: a join on a database that has no tables of joins."""
    return [
        Error(
            f"The join {join.name} has using={join.using!r}, but that database has no tables of joins.",
            hint="Its runs and its effect must be in the same database. Allow inbox_joins to be migrated there in the database "
            "routers, or set using= to another alias.",
            id="inbox_joins.E002",
        )
        for join in _joins()
        if join.using not in connections or not router.allow_migrate_model(join.using, Run)
    ]


def _joins() -> list[Handler]:
    return [handler for handler in registry.all() if handler.all_of]


def _never_published(join: Handler) -> Iterator[tuple[str, set[str]]]:
    """The topics of a join whose declared publishers all run after it, with these publishers."""
    after = {handler.name for handler in _after(join)}
    for topic in join.all_of:
        publishers = {handler.name for handler in registry.all() if topic in handler.publishes}
        if publishers and publishers <= after:
            yield topic, publishers


def _after(join: Handler) -> list[Handler]:
    """The join, and the handlers of the messages that it publishes."""
    found = [join]
    for earlier in found:
        found += [
            handler
            for handler in registry.all()
            if handler not in found and {*earlier.publishes} & {*handler.topics, *handler.all_of}
        ]
    return found
