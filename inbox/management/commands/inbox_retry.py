from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand
from exactly_once.console.cli.terminal import Progress, refuse_unknown
from exactly_once.console.display import ngettext
from exactly_once.console.operators.audit import Actor, Subject, record
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import decision_transaction
from exactly_once.upkeep.executing import BATCH
from inbox.handlers.registry import may_exist, registry
from inbox.models import InboxMessage
from inbox.operators import decisions
from inbox.operators.decisions import Decision
from inbox.states import OVERRIDE, State

logger = escaping_logger(__name__)

_STATES = [State.DEAD.value, State.RETRYING.value]
_Row = tuple[int, bool, str, str]
"""Primary key, is it in quarantine, message id, handler."""


class Command(DatabaseCommand):
    app = "inbox"
    help = gettext_lazy(
        "Make dead messages due again with a full set of attempts. Retrying messages named by MESSAGE_ID or --state retrying "
        "are tried now."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_ids", nargs="*", metavar="MESSAGE_ID", help=_("only these messages, in every handler"))
        parser.add_argument("--handler", help=_("messages of this handler"))
        parser.add_argument("--topic", help=_("messages of this topic"))
        parser.add_argument("--biz-id", help=_("messages of this biz-id"))
        parser.add_argument("--state", action="append", choices=_STATES, help=_("messages in this state; may be repeated"))
        parser.add_argument("--all", action="store_true", help=_("all messages"))
        parser.add_argument(
            "--override-maximum-age",
            action="store_true",
            help=_("also retry quarantined messages; only if you know that they have not been handled before"),
        )
        parser.add_argument("--dry-run", action="store_true", help=_("count the messages without changing them"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        wanted = {"message_id__in": options["message_ids"], **{name: options[name] for name in ("handler", "topic", "biz_id")}}
        if options["handler"] and not may_exist(options["handler"]):
            known = ", ".join(sorted(handler.name for handler in registry.all())) or "none"
            words = _("No handler has the name %(handler)s. Known handlers: %(known)s.")
            raise CommandError(words % {"handler": repr(options["handler"]), "known": known})
        given = {field: value for field, value in wanted.items() if value}
        if not (given or options["state"] or options["all"]):
            raise CommandError(_("Select the messages: MESSAGE_ID …, --handler, --topic, --biz-id, --state, or --all."))
        states = options["state"] or (_STATES if options["message_ids"] else [State.DEAD.value])
        chosen = InboxMessage.objects.using(alias).filter(state__in=states, **given)
        rows = list(chosen.order_by("pk").values_list("pk", "quarantined", "message_id", "handler"))
        if not rows and not options["message_ids"]:
            self.stdout.write(_("No selected message is %(states)s.") % {"states": _(" or ").join(states)})
            return
        held_back = set() if options["override_maximum_age"] else {pk for pk, quarantined, *_ in rows if quarantined}
        left = len(rows) - len(held_back)
        if options["dry_run"]:
            would = ngettext("%(count)s message would be retried.", "%(count)s messages would be retried.", left)
            self.stdout.write(would + _about(held_back))
            return
        unsent: list[str] = []
        with Progress(_("retried"), left) as progress:
            for chunk in _chunks([row for row in rows if not row[1]]):
                retrying = decisions.retrying("inbox_retry", sources=states)
                progress.advance(_decide(alias, actor, chunk, "retry", retrying, given, unsent))
            for chunk in _chunks([row for row in rows if row[1] and row[0] not in held_back]):
                overriding = decisions.overriding("inbox_retry")
                progress.advance(_decide(alias, actor, chunk, "override_maximum_age", overriding, given, unsent))
        due = ngettext("%(count)s message is due now.", "%(count)s messages are due now.", progress.done)
        self.stdout.write(due + _about(held_back))
        refuse_unknown(options["message_ids"], (message_id for _, _, message_id, _ in rows), states)
        if held_back and options["message_ids"]:
            # A script that names a message must see that it does not run.
            raise CommandError(_("Not all of the given messages are due: some are in quarantine."))
        if unsent:
            words = ngettext(
                "%(count)s Celery task was not retried: %(why)s",
                "%(count)s Celery tasks were not retried: %(why)s",
                len(unsent),
                why=unsent[0],
            )
            raise CommandError(words)


def _chunks(rows: list[_Row]) -> Iterator[list[_Row]]:
    return (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))


def _decide(
    alias: str, actor: Actor, rows: Sequence[_Row], action: str, decision: Decision, given: Mapping[str, Any], unsent: list[str]
) -> int:
    """Decide about some messages in one transaction, and about those that are locked in one each; how many were changed."""
    subjects = {
        pk: Subject(kind="message", id=message_id, name=f"{message_id or 'without id'} ({handler})")
        for pk, _, message_id, handler in rows
    }

    def decided(chosen: Sequence[int]) -> tuple[int, list[int]]:
        """How many were changed, and those that are locked."""
        with decision_transaction(alias):
            outcomes = decisions.decide_many(alias, chosen, decision)
            changed = [subjects[outcome.row] for outcome in outcomes if not outcome.unchanged]
            record("inbox", alias, actor, action, changed, given)
            if decision.transition is OVERRIDE:
                for subject in changed:  # to explain later why an effect happened twice
                    logger.warning("inbox_retry: the maximum message age was overridden for message %s.", subject.name)
        unsent.extend(outcome.unchanged for outcome in outcomes if outcome.is_error)
        return len(changed), [outcome.row for outcome in outcomes if outcome.is_locked]

    changed, locked = decided(list(subjects))
    if len(subjects) > 1:  # alone, a locked one is waited for
        changed += sum(decided([row])[0] for row in locked)
    return changed


def _about(held_back: Collection[int]) -> str:
    if not held_back:
        return ""
    words = _(
        "In quarantine: %(count)s. The inbox no longer knows whether they were handled before. If you know that they were not, "
        "retry them with --override-maximum-age."
    )
    return f" {words}" % {"count": f"{len(held_back):,}"}
