from django.utils.translation import gettext_lazy

from exactly_once.cli.purge import PurgeCommand
from outbox.conf import outbox_options
from outbox.models import TrailEntry
from outbox.operations import operations
from outbox.store import history


class Command(PurgeCommand):
    help = gettext_lazy(  # type: ignore[assignment] # see TranslatedCommand
        "Delete published, cancelled, expired and rolled back messages that are older than OUTBOX['KEEP_HISTORY'], then trail "
        "entries older than OUTBOX['TRAIL_RETENTION'], audit log entries older than OUTBOX['AUDIT_RETENTION'], and bulk "
        "operations that ended before OUTBOX['OPERATION_RETENTION']. Dead messages are not deleted. A relay does the same by "
        "itself."
    )
    app, store, trail, operations, configured = "outbox", history, TrailEntry, operations, staticmethod(outbox_options)
    retention = "keeps"
    older_than_help = gettext_lazy("instead of OUTBOX['KEEP_HISTORY']")
