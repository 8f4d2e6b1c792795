from collections import Counter
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox.console.audit import Subject, actor_of_command, record
from outbox.console.terminal import Progress, age, instant, message_id, refuse_unknown, table
from outbox.database.schema import require_schema
from outbox.restoring import restoring
from outbox.states import RESTORE
from outbox.store.restoring import Restorable, Restored, Selection, preview_restoring, restorable, restored_by_default

_SELECTING = ("message_ids", "topic", "biz_id", "state", "since", "until", "all")
_STATES = [state.value for state in RESTORE.sources]


class Command(BaseCommand):
    help = (
        "Restore cancelled, expired or dead messages with a full set of attempts: scheduled if their time is in the future, "
        "otherwise ready. Retrying messages named by MESSAGE_ID or --state retrying are tried now."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_ids", nargs="*", metavar="MESSAGE_ID", help="only these messages")
        parser.add_argument("--topic", help="messages of this topic")
        parser.add_argument("--biz-id", help="messages of this biz-id")
        parser.add_argument("--state", action="append", choices=_STATES, help="messages in this state; may be repeated")
        parser.add_argument("--since", metavar="INSTANT", help="cancelled, expired or dead since then: 2026-03-01T10:00")
        parser.add_argument("--until", metavar="INSTANT", help="cancelled, expired or dead before then")
        parser.add_argument("--all", action="store_true", help="all messages")
        parser.add_argument("--without-overdue", action="store_true", help="skip messages whose time has passed")
        parser.add_argument("--dry-run", action="store_true", help="only show what would be restored")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to work on (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        alias, overdue = options["database"], not options["without_overdue"]
        require_schema(alias, "outbox")
        if not any(options[name] for name in _SELECTING):
            raise CommandError(
                "Select the messages: MESSAGE_ID …, --topic, --biz-id, --state, --since, --until, or --all. With --dry-run "
                "they are only shown."
            )
        selection = _selection(options)
        preview = preview_restoring(alias, selection)
        if options["dry_run"]:
            self.stdout.write(_shown(preview, overdue=overdue))
            return
        found = restorable(alias, selection)
        expected = sum(group.messages - (0 if overdue else group.overdue) for group in preview)
        progress, total, left = Progress("restored", expected), Counter[str](), Counter[str]()
        actor = actor_of_command(__name__)

        def audit(restored: Restored) -> None:
            parameters = {name: options[name] for name in (*_SELECTING, "without_overdue")}
            subject = Subject(kind="messages", name=f"{restored.ready + restored.scheduled} messages")
            record("outbox", alias, actor, "restore", [subject], parameters)

        for some in restoring(alias, found, states=selection.states, overdue=overdue, reason="outbox_restore", audit=audit):
            total.update(ready=some.ready, scheduled=some.scheduled)
            left.update(some.left)
            progress.advance(some.ready + some.scheduled)
        progress.finish()
        self.stdout.write(f"{progress.done} messages restored{_counts(total)}.{_about(left)}")
        refuse_unknown(map(str, selection.message_ids or ()), found.values(), selection.states)


def _selection(options: dict[str, Any]) -> Selection:
    return Selection(
        message_ids=[message_id(given) for given in options["message_ids"]] or None,
        topic=options["topic"],
        biz_id=options["biz_id"],
        states=options["state"] or restored_by_default(by_id=bool(options["message_ids"])),
        since=instant("--since", options["since"]),
        until=instant("--until", options["until"]),
    )


def _shown(found: list[Restorable], *, overdue: bool) -> str:
    messages, late = sum(group.messages for group in found), sum(group.overdue for group in found)
    rows = [("topic", "state", "messages", "overdue", "oldest")]
    rows += [
        (group.topic, group.state, f"{group.messages:,}", f"{group.overdue:,}", f"{age(group.oldest)} ago") for group in found
    ]
    if overdue:
        summary = f"{messages} messages would be restored, {late} of them overdue: these are sent at once."
    else:
        summary = f"{messages - late} messages would be restored, and {late} overdue ones skipped."
    return f"{table(rows)}\n\n{summary}" if found else summary


def _counts(counted: Counter[str]) -> str:
    return ": " + ", ".join(f"{count} {what}" for what, count in counted.items() if count) if counted.total() else ""


def _about(left: Counter[str]) -> str:
    return f" {left.total()} left{_counts(left)}." if left else ""
