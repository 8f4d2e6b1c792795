from outbox.console.alerts_command import AlertsCommand


class Command(AlertsCommand):
    help = "List the open alerts, acknowledge one, or evaluate the conditions once, as a cron job does beside the processes."
    app = "outbox"
