from outbox.console.processes_command import ProcessesCommand
from outbox.store import heartbeats


class Command(ProcessesCommand):
    help = "List the relays, or pause, resume, drain or stop some of them. The request is stored in the database."
    app, heartbeats, kind = "outbox", heartbeats.relays, "relay"
