from typing import Any

from django.core.management.base import CommandParser
from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand
from exactly_once.console.operators.audit import Actor, Subject, record
from inbox.errors import UnknownHandler
from inbox.operators.handler_pauses import HandlerState, pause


class Command(DatabaseCommand):
    app, refusals = "inbox", (UnknownHandler,)
    help = gettext_lazy(
        "Pause a handler: no process runs its messages until inbox_resume. They stay in the queue or stored, in order."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("handler", metavar="HANDLER", help=_("its exact name"))
        parser.add_argument("--reason", default="", help=_("why, for people; exactly_once_status shows it"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        name, reason = options["handler"], options["reason"]
        with transaction.atomic(using=alias):
            found = pause(name, reason=reason, by=str(actor), using=alias)
            record("inbox", alias, actor, "pause", [Subject(kind="handler", id=name, name=name)], {"reason": reason})
        words = _("Handler %(handler)s is paused.")
        if found is HandlerState.PAUSED:
            words = _("Handler %(handler)s is paused. It was paused already; the reason is the new one.")
        self.stdout.write(words % {"handler": name})
