from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand
from exactly_once.console.operators.audit import Actor, Subject, record
from inbox.errors import UnknownHandler
from inbox.operators.handler_pauses import HandlerState, resume


class Command(DatabaseCommand):
    app, refusals = "inbox", (UnknownHandler,)
    help = gettext_lazy("Resume a paused handler: its messages are run again, the oldest first.")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("handler", metavar="HANDLER", help=_("its exact name"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        name = options["handler"]
        with transaction.atomic(using=alias):
            found = resume(name, by=str(actor), using=alias)
            if found is HandlerState.PAUSED:
                record("inbox", alias, actor, "resume", [Subject(kind="handler", id=name, name=name)])
        if found is HandlerState.ACTIVE:
            raise CommandError(
                _("Handler %(handler)s is not paused. exactly_once_status lists those that are.") % {"handler": name}
            )
        self.stdout.write(_("Handler %(handler)s is resumed.") % {"handler": name})
