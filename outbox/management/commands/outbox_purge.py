from datetime import timedelta

from outbox import store
from outbox.conf import outbox_options
from outbox.console.purge_command import PurgeCommand


class Command(PurgeCommand):
    help = (
        "Delete published, cancelled, expired and rolled back messages that are older than the retention. Dead ones stay. "
        "Then the trail older than OUTBOX['TRAIL_RETENTION']."
    )
    app = "outbox"
    store = store
    older_than_help = "instead of OUTBOX['RETENTION']"

    def retention(self) -> timedelta:
        return outbox_options().RETENTION

    def trail_retention(self) -> timedelta:
        return outbox_options().TRAIL_RETENTION
