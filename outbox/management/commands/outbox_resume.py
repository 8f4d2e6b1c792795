from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand
from exactly_once.console.cli.terminal import Progress, message_id, refuse_unknown
from exactly_once.console.display import ngettext
from exactly_once.console.operators.audit import Actor, Subject, record
from exactly_once.sql.connections import decision_transaction
from outbox.errors import InvalidMessage
from outbox.models import OutboxMessage
from outbox.states import RESUME_CHECKS, State, TopicState
from outbox.store import decision_rows
from outbox.topic_pauses import resume

_NOT_PAUSED = {TopicState.ACTIVE, TopicState.LIMITED}


class Command(DatabaseCommand):
    app, refusals = "outbox", (InvalidMessage,)
    help = gettext_lazy(
        "Resume a paused topic, whether the relay or an operator paused it: its messages are sent in batches, oldest first. "
        "With --checks, ask the checkers of stuck messages again instead, at once and with a new count of answers."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("topic", nargs="?", metavar="TOPIC", help=_("its exact name; with --checks: only its messages"))
        parser.add_argument(
            "--checks", nargs="*", metavar="MESSAGE_ID", help=_("ask the checkers of these stuck messages (default: of all)")
        )
        parser.add_argument("--dry-run", action="store_true", help=_("with --checks: only count"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        topic = options["topic"]
        if options["checks"] is not None:
            self._resume_checks(alias, actor, topic, options["checks"], is_trial=options["dry_run"])
        elif topic is None or options["dry_run"]:
            raise CommandError(_("Name the topic to resume, or the stuck messages with --checks. --dry-run needs --checks."))
        else:
            self._resume_topic(alias, actor, topic)

    def _resume_topic(self, alias: str, actor: Actor, topic: str) -> None:
        with transaction.atomic(using=alias):
            found = resume(topic, by=str(actor), using=alias)
            if found not in _NOT_PAUSED:
                record("outbox", alias, actor, "resume", [Subject(kind="topic", id=topic, name=topic)])
        if found in _NOT_PAUSED:
            words = _("Topic %(topic)s is not paused. exactly_once_status lists those that are.")
            raise CommandError(words % {"topic": repr(topic)})
        words = _("Topic %(topic)s is being resumed. The broker may refuse it again.")
        if found is TopicState.RESUMING:
            words = _("Topic %(topic)s is being resumed already. The broker may refuse it again.")
        self.stdout.write(words % {"topic": repr(topic)})

    def _resume_checks(self, alias: str, actor: Actor, topic: str | None, message_ids: list[str], *, is_trial: bool) -> None:
        chosen = OutboxMessage.objects.using(alias).filter(state=State.STUCK)
        named = [message_id(given) for given in message_ids]
        if named:
            chosen = chosen.filter(message_id__in=named)
        if topic is not None:
            chosen = chosen.filter(topic=topic)
        found = dict(chosen.order_by("pk").values_list("pk", "message_id"))
        if is_trial:
            self.stdout.write(
                ngettext("%(count)s message would be resumed.", "%(count)s messages would be resumed.", len(found))
            )
            return
        with Progress(_("resumed"), len(found)) as progress:
            for position, identity in found.items():
                with decision_transaction(alias):
                    resumed = decision_rows.decide(alias, RESUME_CHECKS, [position], reason="outbox_resume --checks")
                    if resumed:
                        record("outbox", alias, actor, "ask_again", [Subject(kind="message", id=str(identity))])
                progress.advance(int(bool(resumed)))
        self.stdout.write(ngettext("%(count)s message resumed.", "%(count)s messages resumed.", progress.done))
        refuse_unknown(map(str, named), found.values(), [State.STUCK])
