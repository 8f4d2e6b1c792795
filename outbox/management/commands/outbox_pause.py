from typing import Any

from django.core.management.base import CommandParser
from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand
from exactly_once.console.operators.audit import Actor, Subject, record
from outbox.errors import InvalidMessage
from outbox.states import TopicState
from outbox.topic_pauses import pause

_FOUND = {
    TopicState.PAUSED: gettext_lazy("It was paused already; the reason is the new one."),
    TopicState.REFUSED: gettext_lazy(
        "The circuit breaker had paused it, because the broker refuses its messages; they are tried no more."
    ),
    TopicState.RESUMING: gettext_lazy("It was being resumed."),
    TopicState.LIMITED: gettext_lazy("Its rate limited it, and does so again once it is resumed."),
}


class Command(DatabaseCommand):
    app, refusals = "outbox", (InvalidMessage,)
    help = gettext_lazy(
        "Pause a topic: no relay sends its messages until outbox_resume. They are still written, and keep their order."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("topic", metavar="TOPIC", help=_("its exact name"))
        parser.add_argument("--reason", default="", help=_("why, for people; exactly_once_status shows it"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        topic, reason = options["topic"], options["reason"]
        with transaction.atomic(using=alias):
            found = pause(topic, reason=reason, by=str(actor), using=alias)
            record("outbox", alias, actor, "pause", [Subject(kind="topic", id=topic, name=topic)], {"reason": reason})
        words = _("Topic %(topic)s is paused.") % {"topic": repr(topic)}
        self.stdout.write(f"{words} {_FOUND.get(found, '')}".rstrip())
