from django.utils.translation import gettext_lazy

from inbox.store import heartbeats
from outbox.console.processes_command import ProcessesCommand


class Command(ProcessesCommand):
    help = gettext_lazy(  # type: ignore[assignment] # see TranslatedCommand
        "List the consumers, or pause, resume, drain or stop some of them. The request is stored in the database."
    )
    app, heartbeats, kind = "inbox", heartbeats.consumers, gettext_lazy("consumer")
