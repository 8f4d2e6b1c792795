from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.operators.audit import Subject, actor_of_command, record
from exactly_once.sql.schema import require_schema
from outbox.errors import InvalidMessage
from outbox.pausing import TopicState, pause

_FOUND = {
    TopicState.PAUSED: gettext_lazy("It was paused already; the reason is the new one."),
    TopicState.REFUSED: gettext_lazy(
        "The circuit breaker had paused it, because the broker refuses its messages; they are tried no more."
    ),
    TopicState.RESUMING: gettext_lazy("It was being resumed."),
}


class Command(TranslatedCommand):
    help = gettext_lazy(
        "Pause a topic: no relay sends its messages until outbox_resume. They are still written, and keep their order."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("topic", metavar="TOPIC", help=_("its exact name"))
        parser.add_argument("--reason", default="", help=_("why, for people; exactly_once_status shows it"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias, topic, reason = options["database"], options["topic"], options["reason"]
        require_schema(alias, "outbox")
        try:
            with transaction.atomic(using=alias):
                found = pause(topic, reason=reason, using=alias)
                subject = Subject(kind="topic", id=topic, name=topic)
                record("outbox", alias, actor_of_command(__name__), "pause", [subject], {"reason": reason})
        except InvalidMessage as error:
            raise CommandError(str(error)) from error
        words = _("Topic %(topic)s is paused.") % {"topic": repr(topic)}
        self.stdout.write(f"{words} {_FOUND.get(found, '')}".rstrip())
