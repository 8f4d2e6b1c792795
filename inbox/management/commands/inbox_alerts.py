from django.utils.translation import gettext_lazy

from outbox.console.alerts_command import AlertsCommand


class Command(AlertsCommand):
    help = gettext_lazy(  # type: ignore[assignment] # see TranslatedCommand
        "List the open alerts, acknowledge one, or evaluate the conditions once, as a cron job does beside the processes."
    )
    app = "inbox"
