import sys
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand
from exactly_once.console.cli.terminal import refuse_unknown
from exactly_once.console.operators.audit import Actor, Subject, record
from exactly_once.sql.connections import decision_transaction
from inbox.errors import NotEditable
from inbox.models import InboxMessage
from inbox.operators.editing import correct, editable, locked_is_not_editable, replace_message
from inbox.states import State


class Command(DatabaseCommand):
    app = "inbox"
    help = gettext_lazy(
        "Print the payload of a dead message. With --payload, replace it by a message with that payload, due at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_id", metavar="MESSAGE_ID", help=_("message id of the dead message"))
        parser.add_argument("--handler", help=_("the handler, if the message is dead in several"))
        parser.add_argument(
            "--payload", metavar="FILE", help=_("file with the corrected payload as JSON; - reads standard input")
        )
        parser.add_argument("--dry-run", action="store_true", help=_("show the changes without storing them"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        stored = _the_message(options)
        try:
            if options["payload"] is None:
                self.stdout.write(editable(stored))
            else:
                self._replace(stored, _text(options["payload"]), actor, options)
        except NotEditable as error:
            words = _("Message %(message)s of %(handler)s was not edited. %(why)s")
            named = {"message": stored.message_id, "handler": stored.handler}
            raise CommandError(words % {**named, "why": error}) from error

    def _replace(self, stored: InboxMessage, text: str, actor: Actor, options: dict[str, Any]) -> None:
        self.stdout.write("\n".join(correct(stored, text).changes))
        if options["dry_run"]:
            self.stdout.write(_("Row %(row)s would be replaced.") % {"row": stored.pk})
            return
        alias = options["database"]
        # On SQLite the transaction itself waits for the lock, and not the statement in it.
        with locked_is_not_editable(stored.pk), decision_transaction(alias):
            row = replace_message(alias, stored.pk, text, by=f"by {actor}")
            if row is not None:
                subject = Subject(kind="message", id=stored.message_id, name=f"{stored.message_id} ({stored.handler})")
                record("inbox", alias, actor, "edit", [subject], {"payload": f"{len(text):,} characters", "replaced_by": row})
        if row is None:
            raise CommandError(_("Nothing was changed: the message in row %(row)s is no longer dead.") % {"row": stored.pk})
        words = _("Row %(row)s is replaced by row %(new)s, which is due now.")
        self.stdout.write(words % {"row": stored.pk, "new": row})


def _the_message(options: dict[str, Any]) -> InboxMessage:
    dead = InboxMessage.objects.using(options["database"]).filter(message_id=options["message_id"], state=State.DEAD)
    if options["handler"]:
        dead = dead.filter(handler=options["handler"])
    found = list(dead.order_by("pk"))
    refuse_unknown([options["message_id"]], (row.message_id for row in found), [State.DEAD])
    if len(found) > 1:
        handlers = ", ".join(row.handler for row in found)
        words = _("The message is dead in several handlers: choose one of %(handlers)s with --handler.")
        raise CommandError(words % {"handlers": handlers})
    return found[0]


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(_("--payload %(file)s cannot be read: %(why)s") % {"file": file, "why": error}) from error
