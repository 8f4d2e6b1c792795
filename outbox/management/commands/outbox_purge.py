from outbox import store
from outbox.conf import outbox_options
from outbox.console.purge_command import PurgeCommand
from outbox.models import TrailEntry


class Command(PurgeCommand):
    help = (
        "Delete published, cancelled, expired and rolled back messages that are older than the retention, then trail entries "
        "older than OUTBOX['TRAIL_RETENTION']. Dead messages are not deleted."
    )
    app, store, trail, configured = "outbox", store, TrailEntry, staticmethod(outbox_options)
    older_than_help = "instead of OUTBOX['RETENTION']"
