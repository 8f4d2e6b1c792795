"""The inbox as one value."""

from django.utils.translation import gettext_lazy as _

from exactly_once.console.operators.changes import why_not_permitted
from exactly_once.half import Half
from inbox.conf import inbox_options
from inbox.housekeeping import HISTORY, record_periods, remains
from inbox.models import InboxMessage, TrailEntry
from inbox.operators import processes, trail
from inbox.operators.accounting import DATED
from inbox.operators.changes import CHANGES, groups
from inbox.operators.conditions import conditions
from inbox.operators.dead_letters import letters

INBOX = Half(
    app="inbox",
    kind="consumer",
    kind_label=_("consumer"),
    options=inbox_options,
    messages=InboxMessage,
    entries=TrailEntry,
    history=HISTORY,
    retention=lambda: inbox_options().keeps,
    remains=remains,
    before_purge=record_periods,
    dated=DATED,
    letters=letters,
    groups=groups,
    groups_label=_("Handlers"),
    changes=CHANGES,
    why_not=why_not_permitted,
    conditions=conditions,
    trail=trail,
    counts=processes.counts,
    missing=processes.missing,
    section_name="inbox.admin.overview.SECTION",
    actions_name="inbox.admin.actions.OPERATIONS",
    status_name="inbox.management.status",
)
