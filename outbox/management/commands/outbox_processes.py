from django.utils.translation import gettext_lazy

from outbox.console.processes_command import ProcessesCommand
from outbox.store import heartbeats


class Command(ProcessesCommand):
    help = gettext_lazy("List the relays, or pause, resume, drain or stop some of them. The request is stored in the database.")  # type: ignore[assignment] # see TranslatedCommand
    app, heartbeats, kind = "outbox", heartbeats.relays, gettext_lazy("relay")
