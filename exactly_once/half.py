"""A half of the product, the outbox or the inbox, as one value: what upkeep and console ask of it.

An app names its half when Django is ready:

    register("outbox", "outbox.half.OUTBOX")

It is imported by the first who asks, and so are the parts of it that only pages or commands need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from django.db.models import QuerySet
from django.utils.module_loading import import_string

from exactly_once.packages import registered

if TYPE_CHECKING:
    from datetime import timedelta

    from django.db.models import Model
    from django_stubs_ext import StrOrPromise as Text

    from exactly_once.conf.app_options import AlertOptions
    from exactly_once.console.admin.actions import Action
    from exactly_once.console.admin.sections import Section
    from exactly_once.console.cli.terminal import Table
    from exactly_once.console.operators.changes import Change
    from exactly_once.console.operators.clock_ahead import Dated
    from exactly_once.console.operators.dead_letters import Letters
    from exactly_once.console.operators.failure_groups import FailureGroups
    from exactly_once.console.operators.trail import HistorySource
    from exactly_once.upkeep.history import History

OK = "ok"
Key = tuple[str, str]
"""A condition that raises alerts, and its object."""


@dataclass(frozen=True, kw_only=True)
class WouldPublish:
    """A message that an open transaction has published, which may be rolled back."""

    topic: str
    biz_id: str
    key: str
    body: bytes
    content_type: str
    headers: Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check of health.

    Attributes:
        name: what was checked: "database", "broker", "relays".
        status: "ok", or what is wrong in a few words without secrets.
        detail: one line for the operator; it may quote a server.
    """

    name: str
    status: str = OK
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == OK


class Status(Protocol):
    """What a half adds to `exactly_once_status` and to the checks of health. A module."""

    def figures(self, alias: str, *, conflicts: bool) -> dict[str, Any]:
        """For `--json`."""

    def tables(self, alias: str, rates: Callable[[str, int], str], *, conflicts: bool) -> Iterator[Table]:
        """The same for people. `rates` shows how fast the count of a name changes."""

    def kinds(self) -> Sequence[str]:
        """The kinds of processes that do its work."""

    def checks(self, alias: str, processes: Sequence[Any]) -> list[Check]:
        """Checks of health besides those of the database, the processes and the broker."""


@dataclass(frozen=True, kw_only=True)
class Half:
    """What one app adds to what is the same for both.

    Attributes:
        app: its package.
        kind: its kind of processes, "relay", as their life signs have it.
        kind_label: the same for people.
        options: returns its settings.
        messages: the model of its messages.
        entries: the model of its trail's entries.
        history: of its messages.
        retention: how long settled messages are kept.
        remains: by name, what is deleted besides, each with `count` and `deletions`.
        dated: its rows that wait until an instant.
        letters: its dead letters.
        groups: its failing messages, in groups.
        groups_label: what the groups call the names of those that fail.
        changes: those of its messages that an operation can make, by name.
        why_not: why the user who planned an operation may no longer do so; "" if they may.
        conditions: takes a database and the options; returns the conditions of alerts that are met, each with its summary.
        at_once: the conditions that one evaluation raises.
        trail: what it knows of a message.
        publisher: takes a database; returns a function that takes the id of a message, and returns the messages which the open
            transaction has published since, caused by it. None: it publishes nothing.
        counts: takes the row of a process; the counts in its `facts`, for people.
        missing: takes a database; the work that no process does there and the consequence, or "".
        is_starting: takes the row of a process that has not done any work yet.
        before_purge: takes a database, before anything is deleted there.
        section_name, actions_name, status_name: the dotted names of `section`, of `actions`, and of the module `status`.
    """

    app: str
    kind: str
    kind_label: Text
    options: Callable[[], Any]
    messages: type[Model]
    entries: type[Model]
    history: History
    retention: Callable[[], timedelta]
    remains: Mapping[str, Any] = field(default_factory=dict)
    dated: Sequence[Dated]
    letters: Letters
    groups: FailureGroups
    groups_label: Text
    changes: Mapping[str, Change]
    why_not: Callable[[Any], str]
    conditions: Callable[[str, AlertOptions], Mapping[Key, str]]
    at_once: Collection[str] = ()
    trail: HistorySource
    publisher: Callable[[str], Callable[[str], Sequence[WouldPublish]]] | None = None
    counts: Callable[[Any], Sequence[str]]
    missing: Callable[[str], str]
    is_starting: Callable[[Any], bool] = lambda process: False
    before_purge: Callable[[str], None] = lambda alias: None
    section_name: str
    actions_name: str
    status_name: str

    @cached_property
    def section(self) -> Section:
        """What it shows on the pages about both."""
        return cast("Section", import_string(self.section_name))

    @cached_property
    def actions(self) -> Mapping[str, Action]:
        """The actions of its pages that can be operations, by name."""
        return cast("Mapping[str, Action]", import_string(self.actions_name))

    @cached_property
    def status(self) -> Status:
        """What it adds to `exactly_once_status` and to the checks of health."""
        return cast("Status", import_module(self.status_name))

    def is_visible(self, user: Any) -> bool:
        """May the user view its messages?"""
        meta = self.messages._meta
        return bool(user.has_perm(f"{meta.app_label}.view_{meta.model_name}"))

    def permits(self, user: Any, name: str) -> bool:
        """May the user plan this action, and cancel it?"""
        return name in self.actions and user.has_perm(self.actions[name].codename(self.messages))

    def failing(self, alias: str, error_class: str, place: str) -> QuerySet[Any]:
        """The messages of one failure group."""
        return QuerySet(self.messages, using=alias).filter(self.groups.condition(error_class, place))


def halves() -> list[Half]:
    """The registered halves, in the order of a message: first the one that publishes."""
    return sorted((required(app) for app in registered()), key=lambda half: half.publisher is None)


def visible_halves(user: Any) -> list[Half]:
    """Those whose messages the user may view."""
    return [half for half in halves() if half.is_visible(user)]


def half_of(app: str) -> Half | None:
    """The half of this app; None if it is not registered, as one of rows that are left of an app which was removed."""
    return required(app) if app in registered() else None


def required(app: str) -> Half:
    """The half of this app, which is registered."""
    return cast("Half", import_string(registered()[app]))
