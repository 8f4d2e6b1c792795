"""Write the audit log: who did what to which object, from where, with which parameters.

Call `record` inside the transaction of the action, so that an action without an entry, or an entry without its action, cannot
be committed. The log is in the database of the objects, in the table `AuditEntry`.
"""

import getpass
import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpRequest

from exactly_once.models import AuditEntry
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, fit, printable

_UNRECORDED = {"csrfmiddlewaretoken", "action", "_selected_action", "confirmed", "own_page", "select_across", "index", "shown"}
_LONGEST_PARAMETER = 500
_CONTENT = {"payload", "payloads"}
"""Parameters whose length is recorded, and not their value: it may be confidential, and is in the message."""


@dataclass(frozen=True, kw_only=True)
class Actor:
    """The person or program that acts.

    Attributes:
        name: the name of the user, or of the client of the HTTP API.
        place: "admin", the name of the command, or "HTTP API".
        address: the IP address of the request, or the host of the command.
    """

    name: str
    place: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} with {self.place}"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An object that was acted on.

    Attributes:
        kind: "message", "topic", "handler", "process" and so on.
        id: its primary key or exact name.
        name: for people.
    """

    kind: str
    id: str = ""
    name: str = ""


def actor_of(request: HttpRequest) -> Actor:
    """The user of a request. Behind a proxy, REMOTE_ADDR is the client's only if the proxy or a middleware sets it."""
    user: Any = request.user
    return Actor(name=user.get_username(), place="admin", address=str(request.META.get("REMOTE_ADDR", "")))


def actor_of_command(command: str) -> Actor:
    """The operating system's user, and this host. `command` is a name like "outbox_pause", or a module that ends in it."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        name = "unknown"
    return Actor(name=name, place=command.rpartition(".")[2], address=socket.gethostname())


def record(
    app: str, alias: str, actor: Actor, action: str, subjects: Iterable[Subject], parameters: Mapping[str, Any] | None = None
) -> None:
    """Insert an entry for each subject into the audit log, in the open transaction of `alias`.

    Args:
        app: the package that it is about.
    """
    given = {name: _recorded(value) for name, value in (parameters or {}).items() if value not in (None, "", [], False)}
    AuditEntry.objects.using(alias).bulk_create(
        AuditEntry(
            app=app,
            at=DatabaseTime(),
            actor=fit(actor.name),
            place=fit(actor.place),
            address=fit(actor.address),
            action=action[:64],
            kind=subject.kind[:64],
            object_id=fit(subject.id)[:NAME_LENGTH],
            name=printable(subject.name, ERROR_LENGTH),
            parameters=given,
        )
        for subject in subjects
    )


def posted(request: HttpRequest) -> dict[str, Any]:
    """The operator's input in a confirmed action, as its parameters."""
    given = {name: value for name, value in request.POST.items() if name not in _UNRECORDED}
    return {name: f"{len(value):,} characters" if name in _CONTENT else value for name, value in given.items()}


def _recorded(value: Any) -> Any:
    """As JSON can hold it; a long text, such as a payload, is cut."""
    if isinstance(value, str):
        text = printable(value, len(value) or 1)
        more = len(text) - _LONGEST_PARAMETER
        return text if more <= 0 else f"{text[:_LONGEST_PARAMETER]}… ({more:,} more characters)"
    return json.loads(json.dumps(value, cls=DjangoJSONEncoder, default=str))
