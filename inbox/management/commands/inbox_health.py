from django.utils.translation import gettext_lazy

from exactly_once.cli.health import Check, HealthCommand
from inbox.health.checks import KIND, process_checks


class Command(HealthCommand):
    help = gettext_lazy(  # type: ignore[assignment] # see TranslatedCommand
        "For probes: exit with 0 if the consumers of this host are alive and can do their work, and with 1 if not."
    )
    kind = KIND

    def readiness(self, alias: str) -> list[Check]:
        return process_checks(alias)
