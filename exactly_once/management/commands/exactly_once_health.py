import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.halves import NONE_RUNNING, HalvesCommand, alive_here, chosen_halves
from exactly_once.console.cli.terminal import sentence, show
from exactly_once.console.health import readiness
from exactly_once.half import OK, Check, Half


class Command(HalvesCommand):
    help = gettext_lazy(
        "For probes: exit with 0 if the relays and consumers of this host are alive and can do their work, and with 1 if not."
    )
    # A probe has a few seconds, and these checks are made when the process starts.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        which = parser.add_mutually_exclusive_group()
        which.add_argument(
            "--live", action="store_true", help=_("only whether the loops move; needs no database and no broker")
        )
        which.add_argument("--ready", action="store_true", help=_("only whether they can do their work"))
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true", help=_("print one JSON object"))

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = chosen_halves(options)
        checks = [] if options["ready"] else [(half.app, check) for half in chosen for check in _alive(half)]
        if not options["live"]:
            found = readiness(chosen, options["database"], everywhere=False)
            checks += [(app, check) for app, results in found.items() for check in results]
        healthy = all(check.is_ok for _app, check in checks)
        if options["json"]:
            shown = [{"app": app, **asdict(check)} for app, check in checks]
            self.stdout.write(json.dumps({"status": OK if healthy else "failing", "checks": shown}))
        else:
            lines = (f"{app}: {check.name}: {check.status}{check.detail and f' ({check.detail})'}" for app, check in checks)
            show([sentence("\n".join(lines))], self.stdout)
        if not healthy:
            raise SystemExit(1)


def _alive(half: Half) -> Iterator[Check]:
    """Do the loops of every process of this app move, on this host and of this user?"""
    found = alive_here(half)
    if not found:
        yield Check(name=half.kind, status=NONE_RUNNING, detail=_("No process of this user on this host gives a life sign."))
    for sign in found:
        detail = _("its loops moved %(seconds).1f s ago, the limit is %(limit).0f s")
        yield Check(
            name=f"{half.kind} {sign.pid}",
            status=OK if sign.is_alive else "silent",
            detail=detail % {"seconds": sign.silent_seconds, "limit": sign.limit_seconds},
        )
