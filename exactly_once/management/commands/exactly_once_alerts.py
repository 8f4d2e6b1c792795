from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.cli.terminal import BOLD, Line, Table, age, show
from exactly_once.operators.alert_table import acknowledge, raised
from exactly_once.operators.alerts import Evaluator, evaluated_apps
from exactly_once.operators.audit import Subject, actor_of_command, record
from exactly_once.sql.schema import require_schema


class Command(TranslatedCommand):
    help = gettext_lazy(
        "List the open alerts, acknowledge one, or evaluate the conditions once, as a cron job does beside the processes."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--once", action="store_true", help=_("evaluate now, unless a running process evaluates them"))
        parser.add_argument("--acknowledge", type=int, metavar="ID", help=_("record that you know of this alert"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        require_schema(alias)
        if options["once"]:
            for app in evaluated_apps(alias):
                self._evaluate(app, alias)
        elif options["acknowledge"] is not None:
            self._acknowledge(alias, options["acknowledge"])
        self._list(alias)

    def _evaluate(self, app: str, alias: str) -> None:
        require_schema(alias, app)
        evaluator = Evaluator(app, alias)
        changed = evaluator.round()
        if changed is None:
            words = _("%(app)s: not evaluated: a running process evaluates the alerts, or ALERTS turns them off.")
            self.stdout.write(words % {"app": app})
            return
        evaluator.release()
        for event, alert in changed:
            self.stdout.write(f"{event}: {alert.condition} {alert.object} {alert.summary}")

    def _acknowledge(self, alias: str, pk: int) -> None:
        actor = actor_of_command(__name__)
        with transaction.atomic(using=alias):
            app = acknowledge(alias, pk, f"{actor.name} with {actor.place}")
            if app is None:
                raise CommandError(_("Alert %(number)s is not raised, or acknowledged already.") % {"number": pk})
            record(app, alias, actor, "acknowledge", [Subject(kind="alert", id=str(pk))])

    def _list(self, alias: str) -> None:
        rows = list(raised(alias))
        if not rows:
            self.stdout.write(_("No alert is raised."))
            return
        head = [_("alert"), _("app"), _("condition"), _("object"), _("raised"), _("acknowledged by"), _("summary")]
        lines = [
            Line(
                [
                    str(row.pk),
                    row.app,
                    row.condition,
                    row.object or "-",
                    age(row.raised_at, row.database_now),
                    row.acknowledged_by or "-",
                    row.summary,
                ]
            )
            for row in rows
        ]
        show([Table([Line(head, BOLD), *lines], texts=len(head))], self.stdout)
