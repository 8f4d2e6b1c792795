from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.operators.audit import Subject, actor_of_command, record
from exactly_once.sql.schema import require_schema
from inbox.errors import UnknownHandler
from inbox.operators.pausing import resume_handler


class Command(TranslatedCommand):
    help = gettext_lazy("Resume a paused handler: its messages are run again, the oldest first.")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("handler", metavar="HANDLER", help=_("its exact name"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias, name = options["database"], options["handler"]
        require_schema(alias, "inbox")
        actor = actor_of_command(__name__)
        try:
            with transaction.atomic(using=alias):
                was_paused = resume_handler(name, by=f"{actor.name} with {actor.place}", using=alias)
                if was_paused:
                    record("inbox", alias, actor, "resume", [Subject(kind="handler", id=name, name=name)])
        except UnknownHandler as error:
            raise CommandError(str(error)) from error
        if not was_paused:
            raise CommandError(
                _("Handler %(handler)s is not paused. exactly_once_status lists those that are.") % {"handler": name}
            )
        self.stdout.write(_("Handler %(handler)s is resumed.") % {"handler": name})
