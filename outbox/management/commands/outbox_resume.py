from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.operators.audit import Subject, actor_of_command, record
from exactly_once.sql.schema import require_schema
from outbox.errors import InvalidMessage
from outbox.pausing import TopicState, resume


class Command(TranslatedCommand):
    help = gettext_lazy(
        "Resume a paused topic, whether the relay or an operator paused it: its messages are sent in batches, oldest first."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("topic", metavar="TOPIC", help=_("its exact name"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias, topic = options["database"], options["topic"]
        require_schema(alias, "outbox")
        try:
            with transaction.atomic(using=alias):
                found = resume(topic, using=alias)
                if found is not TopicState.ACTIVE:
                    subject = Subject(kind="topic", id=topic, name=topic)
                    record("outbox", alias, actor_of_command(__name__), "resume", [subject])
        except InvalidMessage as error:
            raise CommandError(str(error)) from error
        if found is TopicState.ACTIVE:
            raise CommandError(_("Topic %(topic)s is not paused. outbox_status lists those that are.") % {"topic": repr(topic)})
        words = _("Topic %(topic)s is being resumed. The broker may refuse it again.")
        if found is TopicState.RESUMING:
            words = _("Topic %(topic)s is being resumed already. The broker may refuse it again.")
        self.stdout.write(words % {"topic": repr(topic)})
