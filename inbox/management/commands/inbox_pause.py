from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.operators.audit import Subject, actor_of_command, record
from exactly_once.sql.schema import require_schema
from inbox.errors import UnknownHandler
from inbox.operators.pausing import pause_handler


class Command(TranslatedCommand):
    help = gettext_lazy(
        "Pause a handler: no process runs its messages until inbox_resume. They stay in the queue or stored, in order."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("handler", metavar="HANDLER", help=_("its exact name"))
        parser.add_argument("--reason", default="", help=_("why, for people; exactly_once_status shows it"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias, name, reason = options["database"], options["handler"], options["reason"]
        require_schema(alias, "inbox")
        actor = actor_of_command(__name__)
        try:
            with transaction.atomic(using=alias):
                was_running = pause_handler(name, reason=reason, by=f"{actor.name} with {actor.place}", using=alias)
                record("inbox", alias, actor, "pause", [Subject(kind="handler", id=name, name=name)], {"reason": reason})
        except UnknownHandler as error:
            raise CommandError(str(error)) from error
        words = _("Handler %(handler)s is paused.")
        if not was_running:
            words = _("Handler %(handler)s is paused. It was paused already; the reason is the new one.")
        self.stdout.write(words % {"handler": name})
