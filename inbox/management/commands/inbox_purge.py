from datetime import timedelta

from django.core.management.base import CommandError
from django.utils.translation import gettext_lazy

from exactly_once.cli.purge import PurgeCommand
from inbox import purging
from inbox.conf import inbox_options
from inbox.models import TrailEntry
from inbox.operations import operations


class Command(PurgeCommand):
    help = gettext_lazy(  # type: ignore[assignment] # see TranslatedCommand
        "Delete settled messages (done, skipped, shed) older than INBOX['RETENTION'], the trail older than "
        "INBOX['TRAIL_RETENTION'], the audit log older than INBOX['AUDIT_RETENTION'], and bulk operations that ended before "
        "INBOX['OPERATION_RETENTION']. Open and dead messages stay."
    )
    app, store, trail, operations, configured = "inbox", purging, TrailEntry, operations, staticmethod(inbox_options)
    older_than_help = gettext_lazy("delete only messages older than this; not shorter than INBOX['RETENTION']")

    def refuse(self, older_than: timedelta, retention: timedelta) -> None:
        if older_than < retention:
            raise CommandError(
                f"--older-than-days {older_than / timedelta(days=1)} is shorter than INBOX['RETENTION'] ({retention}): a "
                "redelivered copy of a deleted message would still be younger than the maximum message age, and its effect "
                "would happen again. Shorten RETENTION instead."
            )
