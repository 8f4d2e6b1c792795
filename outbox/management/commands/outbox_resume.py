from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction

from outbox.console.audit import Subject, actor_of_command, record
from outbox.database.schema import require_schema
from outbox.errors import InvalidMessage
from outbox.pausing import TopicState, resume


class Command(BaseCommand):
    help = "Resume a paused topic, whether the relay or an operator paused it: its messages are sent in batches, oldest first."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("topic", metavar="TOPIC", help="its exact name")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to work on (default: %(default)s)")

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
            raise CommandError(f"Topic {topic!r} is not paused. outbox_status lists those that are.")
        already = " already" if found is TopicState.RESUMING else ""
        self.stdout.write(f"Topic {topic!r} is being resumed{already}. The broker may refuse it again.")
