from typing import Any

from django.core.management.base import CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.cli.terminal import Progress, message_id, refuse_unknown
from exactly_once.operators.audit import Subject, actor_of_command, record
from exactly_once.plurals import ngettext
from exactly_once.sql.schema import require_schema
from outbox.models import OutboxMessage
from outbox.states import State
from outbox.store import preparing


class Command(TranslatedCommand):
    help = gettext_lazy("Ask the checkers of stuck messages again, at once and with a new count of answers.")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_ids", nargs="*", metavar="MESSAGE_ID", help=_("only these messages (default: all)"))
        parser.add_argument("--topic", help=_("only messages of this topic"))
        parser.add_argument("--dry-run", action="store_true", help=_("only count"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        require_schema(options["database"], "outbox")
        chosen = OutboxMessage.objects.using(options["database"]).filter(state=State.STUCK)
        named = [message_id(given) for given in options["message_ids"]]
        if named:
            chosen = chosen.filter(message_id__in=named)
        if options["topic"]:
            chosen = chosen.filter(topic=options["topic"])
        found = dict(chosen.order_by("pk").values_list("pk", "message_id"))
        if options["dry_run"]:
            self.stdout.write(
                ngettext("%(count)s message would be resumed.", "%(count)s messages would be resumed.", len(found))
            )
            return
        progress = Progress(_("resumed"), len(found))
        alias, actor = options["database"], actor_of_command(__name__)
        for position, identity in found.items():
            with transaction.atomic(using=alias):
                resumed = preparing.resume(alias, position, reason="outbox_resume_checks")
                if resumed:
                    record("outbox", alias, actor, "ask_again", [Subject(kind="message", id=str(identity))])
            progress.advance(int(resumed))
        progress.finish()
        self.stdout.write(ngettext("%(count)s message resumed.", "%(count)s messages resumed.", progress.done))
        refuse_unknown(map(str, named), found.values(), [State.STUCK])
