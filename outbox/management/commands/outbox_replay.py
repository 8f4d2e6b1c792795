import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Count, Max, Min, Q
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand, log_to_console
from exactly_once.console.cli.terminal import BOLD, Line, Progress, Table, age, instant, sentence, show
from exactly_once.console.operators.audit import Actor
from exactly_once.models import Operation, OperationState
from exactly_once.process.clock import utcnow
from exactly_once.process.loop import StopRequest
from exactly_once.process.main_thread import run_until_signalled
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.executing import Operations
from outbox.conf import outbox_options
from outbox.operators.changes import operations
from outbox.operators.replaying import Replay, plan
from outbox.states import State
from outbox.store.selecting import Selection

_SELECTING = ("topic", "biz_id", "since", "until", "all")
_POLL_SECONDS = 0.2
_MOST_PER_SECOND = 100_000


class Command(DatabaseCommand):
    app = "outbox"
    help = gettext_lazy(
        "Send published messages again, with the same ids: those of the history that were published in a period, of a topic or "
        "of a biz-id; to every queue of their topic, or with --to-group to the queue of one handler."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--topic", help=_("messages of this topic"))
        parser.add_argument("--biz-id", help=_("messages of this biz-id"))
        parser.add_argument("--since", metavar="INSTANT", help=_("published since then: 2026-03-01T10:00"))
        parser.add_argument("--until", metavar="INSTANT", help=_("published before then"))
        parser.add_argument("--all", action="store_true", help=_("all messages of the history"))
        parser.add_argument(
            "--to-group",
            default="",
            metavar="GROUP.HANDLER",
            help=_("only to the queue of this handler: billing.orders.reserve_stock"),
        )
        parser.add_argument("--rate", default="500/s", help=_("messages per second at most (default: %(default)s)"))
        parser.add_argument("--reason", default="", help=_("why, for people; kept with the operation and in the audit log"))
        parser.add_argument("--dry-run", action="store_true", help=_("only show what would be sent"))
        parser.add_argument("--yes", action="store_true", help=_("do not ask for confirmation"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        log_to_console(options["verbosity"])
        replay, rate = _replay(options), _per_second(options["rate"])
        found = _preview(alias, replay.selection)
        show(_shown(found, replay), self.stdout)
        count = sum(group["messages"] for group in found if group["state"] == State.PUBLISHED)
        if options["dry_run"] or not count:
            return
        if not options["yes"] and not _agreed(count):
            raise CommandError(_("Nothing was sent."))
        operation, is_new = plan(alias, replay, rate=rate, reason=options["reason"], actor=actor)
        if not is_new:
            words = _("The same replay is operation %(number)s, which has not ended: it is continued.")
            self.stdout.write(words % {"number": operation.pk})
        ended = run_until_signalled(partial(_execute, alias, operation), grace=outbox_options().SHUTDOWN_GRACE)
        self._report(ended)

    def _report(self, operation: Operation) -> None:
        counts = _("Sent again: %(done)s of %(total)s.") % {"done": f"{operation.done:,}", "total": f"{operation.total:,}"}
        if operation.is_open:
            words = _(
                "Operation %(number)s has not ended: the running relays continue it, and so does the same command. It can be "
                "cancelled in the admin."
            )
            raise CommandError(f"{counts} {words % {'number': operation.pk}}")
        not_sent = _("Not sent: %(count)s (%(reason)s).")
        reasons = [not_sent % {"count": f"{count:,}", "reason": reason} for reason, count in operation.reasons.items()]
        self.stdout.write(" ".join([counts, *reasons]))
        if operation.failed or operation.state != OperationState.FINISHED:
            state = operation.get_state_display()
            raise CommandError(
                _("Operation %(number)s: %(state)s.") % {"number": operation.pk, "state": state} + _why(operation)
            )


def _why(operation: Operation) -> str:
    if operation.state == OperationState.CANCELLED:
        return " " + _("It was cancelled by %(actor)s.") % {"actor": operation.cancelled_by}
    refused = _("Messages that the broker did not accept: %(count)s.") % {"count": f"{operation.failed:,}"}
    return f" {operation.stopped_because or refused}"


def _agreed(count: int) -> bool:
    question = _("Send them again (%(count)s)? [y/N]") % {"count": f"{count:,}"}
    try:
        return input(f"{question} ").strip().lower() in {"y", "yes"}
    except EOFError:  # without a terminal
        return False


def _execute(alias: str, operation: Operation, stop: StopRequest) -> Operation:
    """Execute operations, or follow the relay that does, until this one has ended."""
    with Progress(_("sent"), operation.total) as progress:

        def look(*_: object) -> Operation:
            now: Operation = operations.rows(alias).get(pk=operation.pk)
            progress.advance(now.processed - progress.done)
            return now

        executing = Operations("outbox", [alias], on_batch=look)
        while True:
            executing.drain(stop)
            now = look()
            if not now.is_open or stop.wait(_POLL_SECONDS):
                return now


def _replay(options: dict[str, Any]) -> Replay:
    if not any(options[name] for name in _SELECTING):
        words = _("Select the messages: --topic, --biz-id, --since, --until, or --all. With --dry-run they are only shown.")
        raise CommandError(words)
    if options["to_group"] and not options["topic"]:
        raise CommandError(_("--to-group needs --topic: the queue of a handler is named after its topics."))
    since, until = instant("--since", options["since"]), instant("--until", options["until"])
    selection = Selection(topic=options["topic"], biz_id=options["biz_id"], since=since, until=until)
    return Replay(selection=selection, to_group=options["to_group"])


def _per_second(given: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,5})(/s)?", given)
    if not match or int(match[1]) > _MOST_PER_SECOND:
        words = _("--rate is %(given)s: it must be a number of messages per second up to %(most)s, 500/s.")
        raise CommandError(words % {"given": repr(given), "most": f"{_MOST_PER_SECOND:,}"})
    return int(match[1])


def _preview(alias: str, selection: Selection) -> Sequence[Mapping[str, Any]]:
    """The selected messages, by topic and state: when the first and the last was settled, and how many have expired since.

    Expired messages are not sent again.
    """
    groups: Any = selection.messages(alias).order_by("topic", "state").values("topic", "state")
    expired = Count("id", filter=Q(expires_at__lte=DatabaseTime()))
    return list(groups.annotate(messages=Count("id"), expired=expired, oldest=Min("settled_at"), newest=Max("settled_at")))


def _shown(found: Sequence[Mapping[str, Any]], replay: Replay) -> list[Table]:
    head = Line([_("topic"), _("state"), _("messages"), _("expired"), _("first"), _("last")], BOLD)
    groups = (group.values() for group in found)
    rows = [
        Line([topic, state, f"{count:,}", f"{expired:,}", _ago(oldest), _ago(newest)])
        for topic, state, count, expired, oldest, newest in groups
    ]
    published = [group for group in found if group["state"] == State.PUBLISHED]
    count, expired = sum(group["messages"] for group in published), sum(group["expired"] for group in published)
    lines = []
    words = _("Published: %(count)s. Of these, %(expired)s have expired and are not sent.")
    to = _("The others are sent to every queue of their topic.")
    if replay.to_group:
        to = _("The others are sent to %(group)s.") % {"group": replay.to_group}
    lines.append(f"{words % {'count': f'{count:,}', 'expired': f'{expired:,}'}} {to}")
    if others := sum(group["messages"] for group in found) - count:
        lines.append(_("In another state and not sent: %(count)s; see outbox_restore.") % {"count": f"{others:,}"})
    kept = outbox_options().KEEP_HISTORY
    since = replay.selection.since
    if kept is None:
        lines.append(_("OUTBOX['KEEP_HISTORY'] is None: published messages are deleted at once and cannot be sent again."))
    elif since is not None and utcnow() - since > kept:
        words = _("OUTBOX['KEEP_HISTORY'] is %(time)s: messages that were published earlier than that have been deleted.")
        lines.append(words % {"time": kept})
    return [*([Table([head, *rows])] if found else []), sentence("\n".join(lines))]


def _ago(at: datetime) -> str:
    return _("%(time)s ago") % {"time": age(at)}
