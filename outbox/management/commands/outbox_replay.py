from __future__ import annotations

import re
from datetime import datetime
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox.conf import outbox_options
from outbox.console.audit import actor_of_command
from outbox.console.process import run_until_signalled
from outbox.console.terminal import Progress, age, instant, log_to_console, table
from outbox.database.operation_models import OperationState
from outbox.database.schema import require_schema
from outbox.kernel.clock import utcnow
from outbox.kernel.loop import StopRequest
from outbox.models import Operation
from outbox.operations import operations
from outbox.relay.replaying import Replay, executor, plan
from outbox.states import State
from outbox.store.replaying import Replayable, Selection, preview

_SELECTING = ("topic", "biz_id", "since", "until", "all")
_POLL_SECONDS = 0.2
_MOST_PER_SECOND = 100_000


class Command(BaseCommand):
    help = (
        "Send published messages again, with the same ids: those of the history that were published in a period, of a topic or "
        "of a biz-id; to every queue of their topic, or with --to-group to the queue of one handler."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--topic", help="messages of this topic")
        parser.add_argument("--biz-id", help="messages of this biz-id")
        parser.add_argument("--since", metavar="INSTANT", help="published since then: 2026-03-01T10:00")
        parser.add_argument("--until", metavar="INSTANT", help="published before then")
        parser.add_argument("--all", action="store_true", help="all messages of the history")
        parser.add_argument(
            "--to-group",
            default="",
            metavar="GROUP.HANDLER",
            help="only to the queue of this handler: billing.orders.reserve_stock",
        )
        parser.add_argument("--rate", default="500/s", help="messages per second at most (default: %(default)s)")
        parser.add_argument("--reason", default="", help="why, for people; kept with the operation and in the audit log")
        parser.add_argument("--dry-run", action="store_true", help="only show what would be sent")
        parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to work on (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        log_to_console("outbox", options["verbosity"])
        alias = options["database"]
        require_schema(alias, "outbox")
        replay, rate = _replay(options), _per_second(options["rate"])
        found = preview(alias, replay.selection)
        self.stdout.write(_shown(found, replay))
        count = sum(group.messages for group in found if group.state == State.PUBLISHED)
        if options["dry_run"] or not count:
            return
        if not options["yes"] and input(f"Send them again ({count:,})? [y/N] ").strip().lower() not in {"y", "yes"}:
            raise CommandError("Nothing was sent.")
        operation, is_new = plan(alias, replay, rate=rate, reason=options["reason"], actor=actor_of_command(__name__))
        if not is_new:
            self.stdout.write(f"The same replay is operation {operation.pk}, which has not ended: it is continued.")
        ended = run_until_signalled(partial(_execute, alias, operation), grace=outbox_options().SHUTDOWN_GRACE)
        self._report(ended)

    def _report(self, operation: Operation) -> None:
        counts = f"Sent again: {operation.done:,} of {operation.total:,}."
        if operation.is_open:
            raise CommandError(
                f"{counts} Operation {operation.pk} has not ended: the running relays continue it, and so does the same "
                "command. It can be cancelled in the admin."
            )
        reasons = "".join(f" Not sent: {count:,} ({reason})." for reason, count in operation.reasons.items())
        self.stdout.write(f"{counts}{reasons}")
        if operation.failed or operation.state != OperationState.FINISHED:
            raise CommandError(f"Operation {operation.pk} is {operation.state}. {_why(operation)}.")


def _why(operation: Operation) -> str:
    if operation.state == OperationState.CANCELLED:
        return f"It was cancelled by {operation.cancelled_by}"
    return operation.stopped_because or f"Messages that the broker did not accept: {operation.failed:,}"


def _execute(alias: str, operation: Operation, stop: StopRequest) -> Operation:
    """Execute operations, or follow the relay that does, until this one has ended."""
    progress = Progress("sent", operation.total)

    def look(*_: object) -> Operation:
        now: Operation = operations.rows(alias).get(pk=operation.pk)
        progress.advance(now.processed - progress.done)
        return now

    executing = executor(alias, on_batch=look)
    while True:
        executing.drain(stop)
        now = look()
        if not now.is_open or stop.wait(_POLL_SECONDS):
            progress.finish()
            return now


def _replay(options: dict[str, Any]) -> Replay:
    if not any(options[name] for name in _SELECTING):
        raise CommandError(
            "Select the messages: --topic, --biz-id, --since, --until, or --all. With --dry-run they are only shown."
        )
    if options["to_group"] and not options["topic"]:
        raise CommandError("--to-group needs --topic: a handler has one queue, for one topic.")
    since, until = instant("--since", options["since"]), instant("--until", options["until"])
    selection = Selection(topic=options["topic"], biz_id=options["biz_id"], since=since, until=until)
    return Replay(selection=selection, to_group=options["to_group"])


def _per_second(given: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,5})(/s)?", given)
    if not match or int(match[1]) > _MOST_PER_SECOND:
        raise CommandError(
            f"--rate is {given!r}: it must be a number of messages per second up to {_MOST_PER_SECOND:,}, 500/s."
        )
    return int(match[1])


def _shown(found: list[Replayable], replay: Replay) -> str:
    rows = [("topic", "state", "messages", "expired", "first", "last")]
    rows += [
        (group.topic, group.state, f"{group.messages:,}", f"{group.expired:,}", _ago(group.oldest), _ago(group.newest))
        for group in found
    ]
    published = [group for group in found if group.state == State.PUBLISHED]
    count, expired = sum(group.messages for group in published), sum(group.expired for group in published)
    to = f"to {replay.to_group}" if replay.to_group else "to every queue of their topic"
    lines = [table(rows), ""] if found else []
    lines.append(f"Published: {count:,}. Of these, {expired:,} have expired and are not sent. The others are sent {to}.")
    if others := sum(group.messages for group in found) - count:
        lines.append(f"In another state and not sent: {others:,}; see outbox_restore.")
    kept = outbox_options().KEEP_HISTORY
    since = replay.selection.since
    if kept is None:
        lines.append("OUTBOX['KEEP_HISTORY'] is None: published messages are deleted at once and cannot be sent again.")
    elif since is not None and utcnow() - since > kept:
        lines.append(f"OUTBOX['KEEP_HISTORY'] is {kept}: messages that were published earlier than that have been deleted.")
    return "\n".join(lines)


def _ago(at: datetime) -> str:
    return f"{age(at)} ago"
