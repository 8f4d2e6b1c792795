from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Count, Min
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand
from exactly_once.console.cli.terminal import (
    BOLD,
    Line,
    Progress,
    Table,
    age,
    instant,
    message_id,
    refuse_unknown,
    sentence,
    show,
)
from exactly_once.console.display import ngettext
from exactly_once.console.operators.audit import Actor, Subject, record
from exactly_once.sql.connections import decision_transaction
from outbox.models import IS_AHEAD
from outbox.states import RESTORE
from outbox.store import decision_rows
from outbox.store.dialect import chunks
from outbox.store.restoring import restored_by_default
from outbox.store.selecting import Selection
from outbox.store.unique import IS_REPLACED

_SELECTING = ("message_ids", "topic", "biz_id", "state", "since", "until", "all")
_AT_ONCE = 500
_STATES = [state.value for state in RESTORE.sources]


class Command(DatabaseCommand):
    app = "outbox"
    help = gettext_lazy(
        "Restore cancelled, expired or dead messages with a full set of attempts: scheduled if their time is in the future, "
        "otherwise ready. Retrying messages named by MESSAGE_ID or --state retrying are tried now."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_ids", nargs="*", metavar="MESSAGE_ID", help=_("only these messages"))
        parser.add_argument("--topic", help=_("messages of this topic"))
        parser.add_argument("--biz-id", help=_("messages of this biz-id"))
        parser.add_argument("--state", action="append", choices=_STATES, help=_("messages in this state; may be repeated"))
        parser.add_argument("--since", metavar="INSTANT", help=_("cancelled, expired or dead since then: 2026-03-01T10:00"))
        parser.add_argument("--until", metavar="INSTANT", help=_("cancelled, expired or dead before then"))
        parser.add_argument("--all", action="store_true", help=_("all messages"))
        parser.add_argument("--without-overdue", action="store_true", help=_("skip messages whose time has passed"))
        parser.add_argument("--dry-run", action="store_true", help=_("only show what would be restored"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        overdue = not options["without_overdue"]
        if not any(options[name] for name in _SELECTING):
            words = _(
                "Select the messages: MESSAGE_ID …, --topic, --biz-id, --state, --since, --until, or --all. With --dry-run "
                "they are only shown."
            )
            raise CommandError(words)
        selection = _selection(options)
        preview = _preview(alias, selection)
        if options["dry_run"]:
            show(_shown(preview, overdue=overdue), self.stdout)
            return
        named = selection.message_ids or ()
        known = [*selection.messages(alias).values_list("message_id", flat=True)] if named else []
        expected = sum(group["messages"] - (0 if overdue else group["overdue"]) for group in preview)
        total, left = Counter[str](), Counter[str]()

        with Progress(_("restored"), expected) as progress:
            for chunk in chunks(selection.positions(alias), _AT_ONCE):
                with decision_transaction(alias):
                    decided = decision_rows.decide(
                        alias, RESTORE, chunk, sources=selection.states, overdue=overdue, reason="outbox_restore"
                    )
                    if decided:
                        parameters = {name: options[name] for name in (*_SELECTING, "without_overdue")}
                        subject = Subject(kind="messages", name=f"{len(decided.became)} messages")
                        record("outbox", alias, actor, "restore", [subject], parameters)
                total.update(sorted(decided.became.values()))
                left.update(decided.left.values())
                progress.advance(len(decided.became))
        done = ngettext("%(count)s message restored", "%(count)s messages restored", progress.done)
        self.stdout.write(f"{done}{_counts(total)}.{_about(left)}")
        refuse_unknown(map(str, named), known, selection.states)


def _selection(options: dict[str, Any]) -> Selection:
    return Selection(
        message_ids=[message_id(given) for given in options["message_ids"]] or None,
        topic=options["topic"],
        biz_id=options["biz_id"],
        states=options["state"] or restored_by_default(by_id=bool(options["message_ids"])),
        since=instant("--since", options["since"]),
        until=instant("--until", options["until"]),
    )


def _preview(alias: str, selection: Selection) -> Sequence[Mapping[str, Any]]:
    """The messages that a restore would affect, by topic and state.

    Those that are overdue are sent at once. The oldest is the first that was cancelled, expired or became dead.
    """
    groups: Any = selection.messages(alias).exclude(IS_REPLACED).order_by("topic", "state").values("topic", "state")
    overdue = Count("id") - Count("id", filter=IS_AHEAD)
    return list(groups.annotate(messages=Count("id"), overdue=overdue, oldest=Min("settled_at")))


def _shown(found: Sequence[Mapping[str, Any]], *, overdue: bool) -> list[Table]:
    messages, late = sum(group["messages"] for group in found), sum(group["overdue"] for group in found)
    head, ago = Line([_("topic"), _("state"), _("messages"), _("overdue"), _("oldest")], BOLD), _("%(time)s ago")
    groups = (group.values() for group in found)
    rows = [
        Line([topic, state, f"{count:,}", f"{due:,}", ago % {"time": age(oldest)}])
        for topic, state, count, due, oldest in groups
    ]
    if overdue:
        summary = ngettext(
            "%(count)s message would be restored, %(late)s of them overdue: these are sent at once.",
            "%(count)s messages would be restored, %(late)s of them overdue: these are sent at once.",
            messages,
            late=f"{late:,}",
        )
    else:
        summary = ngettext(
            "%(count)s message would be restored, and %(late)s overdue ones skipped.",
            "%(count)s messages would be restored, and %(late)s overdue ones skipped.",
            messages - late,
            late=f"{late:,}",
        )
    return [*([Table([head, *rows])] if found else []), sentence(summary)]


def _counts(counted: Counter[str]) -> str:
    return ": " + ", ".join(f"{count} {what}" for what, count in counted.items() if count) if counted.total() else ""


def _about(left: Counter[str]) -> str:
    words = _("%(count)s left") % {"count": f"{left.total():,}"}
    return f" {words}{_counts(left)}." if left else ""
