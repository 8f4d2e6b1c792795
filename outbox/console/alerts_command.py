"""The commands `outbox_alerts` and `inbox_alerts`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils.translation import gettext as _

from outbox.console.alerts import Evaluator, alert_table
from outbox.console.audit import Subject, actor_of_command, record
from outbox.console.command import TranslatedCommand
from outbox.console.terminal import age, table
from outbox.database.schema import require_schema


class AlertsCommand(TranslatedCommand):
    """See the module's docstring.

    Attributes:
        app: whose alerts.
    """

    app: str

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--once", action="store_true", help=_("evaluate now, unless a running process evaluates them"))
        parser.add_argument("--acknowledge", type=int, metavar="ID", help=_("record that you know of this alert"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        require_schema(alias, self.app)
        if options["once"]:
            self._evaluate(alias)
        elif options["acknowledge"] is not None:
            self._acknowledge(alias, options["acknowledge"])
        self._list(alias)

    def _evaluate(self, alias: str) -> None:
        evaluator = Evaluator(self.app, alias)
        changed = evaluator.round()
        if changed is None:
            self.stdout.write(_("Not evaluated: a running process evaluates the alerts, or ALERTS turns them off."))
            return
        evaluator.release()
        for event, alert in changed:
            self.stdout.write(f"{event}: {alert.condition} {alert.object} {alert.summary}")

    def _acknowledge(self, alias: str, pk: int) -> None:
        actor = actor_of_command(type(self).__module__)
        with transaction.atomic(using=alias):
            if not alert_table(self.app).acknowledge(alias, pk, f"{actor.name} with {actor.place}"):
                raise CommandError(_("Alert %(number)s is not raised, or acknowledged already.") % {"number": pk})
            record(self.app, alias, actor, "acknowledge", [Subject(kind="alert", id=str(pk))])

    def _list(self, alias: str) -> None:
        rows = list(alert_table(self.app).raised(alias))
        if not rows:
            self.stdout.write(_("No alert is raised."))
            return
        head = (_("alert"), _("condition"), _("object"), _("raised"), _("acknowledged by"))
        lines = [
            (str(row.pk), row.condition, row.object or "-", age(row.raised_at, row.database_now), row.acknowledged_by or "-")
            for row in rows
        ]
        said = [_("summary"), *(row.summary for row in rows)]
        drawn = table([head, *lines]).splitlines()
        self.stdout.write("\n".join(f"{line}  {words}" for line, words in zip(drawn, said, strict=True)))
