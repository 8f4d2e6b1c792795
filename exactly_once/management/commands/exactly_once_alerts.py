from operator import attrgetter
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand
from exactly_once.console.cli.terminal import BOLD, Line, Table, age, show
from exactly_once.console.operators.alerts import acknowledge, raised
from exactly_once.console.operators.audit import Actor, Subject, record
from exactly_once.sql.schema import require_schema
from exactly_once.upkeep.alerting import Evaluator, evaluated_apps


class Command(DatabaseCommand):
    help = gettext_lazy(
        "List the open alerts, acknowledge one, or evaluate the conditions once, as a cron job does beside the processes."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--once", action="store_true", help=_("evaluate now, unless a running process evaluates them"))
        parser.add_argument("--acknowledge", type=int, metavar="ID", help=_("record that you know of this alert"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        if options["once"]:
            for app in evaluated_apps(alias):
                self._evaluate(app, alias)
        elif options["acknowledge"] is not None:
            _acknowledge(alias, options["acknowledge"], actor)
        self._list(alias)

    def _evaluate(self, app: str, alias: str) -> None:
        require_schema(alias, app)
        evaluator = Evaluator(app, alias)
        changed = evaluator.round()
        if changed is None:
            words = _("%(app)s: not evaluated: a running process evaluates the alerts.")
            self.stdout.write(words % {"app": app})
            return
        evaluator.release()
        for event, alert in changed:
            self.stdout.write(f"{event}: {alert.condition} {alert.object} {alert.summary}")

    def _list(self, alias: str) -> None:
        rows = list(raised(alias))
        if not rows:
            self.stdout.write(_("No alert is raised."))
            return
        head = [_("alert"), _("raised"), _("app"), _("condition"), _("object"), _("acknowledged by"), _("summary")]
        cells = attrgetter("app", "condition", "object", "acknowledged_by", "summary")
        lines = [
            Line([str(row.pk), age(row.raised_at, row.database_now), *(cell or "-" for cell in cells(row))]) for row in rows
        ]
        show([Table([Line(head, BOLD), *lines], texts=len(head))], self.stdout)


def _acknowledge(alias: str, pk: int, actor: Actor) -> None:
    with transaction.atomic(using=alias):
        app = acknowledge(alias, pk, str(actor))
        if app is None:
            raise CommandError(_("Alert %(number)s is not raised, or acknowledged already.") % {"number": pk})
        record(app, alias, actor, "acknowledge", [Subject(kind="alert", id=str(pk))])
