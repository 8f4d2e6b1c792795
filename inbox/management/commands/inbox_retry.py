import logging
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction

from inbox.errors import TaskNotSent
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, State
from inbox.operations import retry as bulk_retry
from inbox.resending import resending
from inbox.store import operating
from inbox.store.bulk import LOCKED
from outbox.console.operations import BATCH
from outbox.console.terminal import Progress, refuse_unknown
from outbox.database.schema import require_schema
from outbox.kernel.wire import CELERY_TOPICS

logger = logging.getLogger(__name__)


class Command(BaseCommand):
    help = "Run dead (or, with --retrying, also retrying) messages again, with a full set of attempts."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_ids", nargs="*", metavar="MESSAGE_ID", help="only these messages, in every handler")
        parser.add_argument("--handler", help="all messages of this handler")
        parser.add_argument("--topic", help="all messages of this topic")
        parser.add_argument("--all", action="store_true", help="all messages")
        parser.add_argument(
            "--override-maximum-age",
            action="store_true",
            help="run also what was refused as too old or from the future: you know that it has not been handled before",
        )
        parser.add_argument("--retrying", action="store_true", help="do not wait for the next attempt of retrying ones")
        parser.add_argument("--dry-run", action="store_true", help="only count")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to work on (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        require_schema(options["database"], "inbox")
        wanted = {
            "message_id__in": options["message_ids"],
            "handler": options["handler"],
            "topic": options["topic"],
        }
        if options["handler"] and not _is_known(options["handler"]):
            known = ", ".join(sorted(handler.name for handler in registry.all())) or "none"
            raise CommandError(f"No handler is called {options['handler']!r}. Known handlers: {known}.")
        given = {field: value for field, value in wanted.items() if value}
        if not given and not options["all"]:
            raise CommandError("Say which messages: MESSAGE_ID …, --handler NAME, --topic TOPIC, or --all.")
        states = [State.DEAD, State.RETRYING] if options["retrying"] else [State.DEAD]
        chosen = InboxMessage.objects.using(options["database"]).filter(state__in=states, **given)
        rows = list(chosen.order_by("pk").values_list("pk", "quarantined", "message_id", "handler"))
        held_back = set() if options["override_maximum_age"] else {pk for pk, quarantined, *_ in rows if quarantined}
        left = len(rows) - len(held_back)
        if options["dry_run"]:
            self.stdout.write(f"{left} messages would be retried.{_about(held_back)}")
            return
        progress = Progress("retried", left)
        unsent: list[str] = []
        for chunk in _chunks([pk for pk, quarantined, *_ in rows if not quarantined]):
            progress.advance(_retry(options["database"], chunk, states, unsent))
        for pk, quarantined, message_id, handler in rows:
            if quarantined and pk not in held_back:
                progress.advance(_override(options["database"], pk, f"{message_id or 'without id'} of {handler}", unsent))
        progress.finish()
        self.stdout.write(f"{progress.done} messages are due now.{_about(held_back)}")
        refuse_unknown(options["message_ids"], (message_id for _, _, message_id, _ in rows), states)
        if held_back and options["message_ids"]:
            # Whoever names a message expects that it is run; a script must not take this for success.
            raise CommandError("Not every message that was named is run.")
        if unsent:
            raise CommandError(f"{len(unsent)} Celery tasks stay as they were: {unsent[0]}")


def _chunks(rows: list[int]) -> Iterator[list[int]]:
    return (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))


def _retry(alias: str, rows: Sequence[int], states: Collection[str], unsent: list[str]) -> int:
    """Retry some messages in one transaction; those that another transaction has locked, one by one; how many were."""
    with transaction.atomic(using=alias):
        outcomes = bulk_retry(alias, rows, sources=states, given={}, by="inbox_retry", reason="")
    unsent += [outcome.unchanged for outcome in outcomes if outcome.is_error]
    locked = [outcome.row for outcome in outcomes if outcome.unchanged == LOCKED]
    waited = sum(operating.retry(alias, row, reason="inbox_retry") for row in locked)
    return waited + sum(not outcome.unchanged for outcome in outcomes)


def _override(alias: str, pk: int, name: str, unsent: list[str]) -> int:
    """Retry a message in quarantine; 1 if it was."""
    try:
        done = resending(partial(operating.override_maximum_age, reason="inbox_retry"))(alias, pk)
    except TaskNotSent as error:
        unsent.append(str(error))
        return 0
    if done:
        # The answer to a later question why an effect happened twice.
        logger.warning("The maximum message age was overridden for message %s.", name)
    return int(done)


def _is_known(handler: str) -> bool:
    # Celery knows its tasks, and this process need not.
    return registry.get(handler) is not None or handler.startswith(CELERY_TOPICS)


def _about(held_back: Collection[int]) -> str:
    if not held_back:
        return ""
    return (
        f" In quarantine: {len(held_back)}. Whether they have been handled before can no longer be known. Once you know that "
        "they have not, run them with --override-maximum-age."
    )
