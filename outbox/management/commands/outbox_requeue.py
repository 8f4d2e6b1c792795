from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox import store
from outbox.kernel.console import Progress, message_id, refuse_unknown
from outbox.kernel.schema import require_schema
from outbox.models import OutboxMessage, State


class Command(BaseCommand):
    help = "Send dead (or, with --retrying, also retrying) messages again, with a full set of attempts."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_ids", nargs="*", metavar="MESSAGE_ID", help="only these messages")
        parser.add_argument("--topic", help="all messages of this topic")
        parser.add_argument("--all", action="store_true", help="all messages")
        parser.add_argument("--retrying", action="store_true", help="do not wait for the next attempt of retrying ones")
        parser.add_argument("--dry-run", action="store_true", help="only count")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to work on (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        require_schema(options["database"], "outbox")
        if not (options["message_ids"] or options["topic"] or options["all"]):
            raise CommandError("Say which messages: MESSAGE_ID …, --topic TOPIC, or --all.")
        states = [State.DEAD, State.RETRYING] if options["retrying"] else [State.DEAD]
        chosen = OutboxMessage.objects.using(options["database"]).filter(state__in=states)
        named = [message_id(given) for given in options["message_ids"]]
        if named:
            chosen = chosen.filter(message_id__in=named)
        if options["topic"]:
            chosen = chosen.filter(topic=options["topic"])
        found = dict(chosen.order_by("pk").values_list("pk", "message_id"))
        positions = list(found)
        if options["dry_run"]:
            self.stdout.write(f"{len(positions)} messages would be requeued.")
            return
        progress = Progress("requeued", len(positions))
        for position in positions:
            progress.advance(int(store.requeue(options["database"], position, reason="outbox_requeue")))
        progress.finish()
        self.stdout.write(f"{progress.done} messages requeued.")
        refuse_unknown(map(str, named), found.values(), states)
