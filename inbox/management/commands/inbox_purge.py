from datetime import timedelta

from django.core.management.base import CommandError

from inbox.conf import inbox_options
from inbox.models import TrailEntry
from inbox.store import operating
from outbox.console.purge_command import PurgeCommand


class Command(PurgeCommand):
    help = (
        "Delete handled and skipped messages that are older than INBOX['RETENTION']. Open and dead ones stay. "
        "Then the trail older than INBOX['TRAIL_RETENTION'], and the audit log older than INBOX['AUDIT_RETENTION']."
    )
    app, store, trail, configured = "inbox", operating, TrailEntry, staticmethod(inbox_options)
    older_than_help = "keep more than INBOX['RETENTION'] says, never less"

    def refuse(self, older_than: timedelta, retention: timedelta) -> None:
        if older_than < retention:
            raise CommandError(
                f"--older-than-days {older_than / timedelta(days=1)} is shorter than INBOX['RETENTION'] ({retention}): copies "
                "of the deleted messages would still be younger than the maximum message age, and would have their effect "
                "again. Shorten RETENTION instead."
            )
