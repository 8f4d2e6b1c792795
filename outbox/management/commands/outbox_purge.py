from outbox import store
from outbox.conf import outbox_options
from outbox.console.purge_command import PurgeCommand
from outbox.models import TrailEntry


class Command(PurgeCommand):
    help = (
        "Delete published, cancelled, expired and rolled back messages that are older than the retention. Dead ones stay. "
        "Then the trail older than OUTBOX['TRAIL_RETENTION']."
    )
    app, store, trail, configured = "outbox", store, TrailEntry, staticmethod(outbox_options)
    older_than_help = "instead of OUTBOX['RETENTION']"
