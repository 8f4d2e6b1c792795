"""The outbox as one value."""

from django.utils.translation import gettext_lazy as _

from exactly_once.console.operators.changes import by_name
from exactly_once.half import Half
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, TrailEntry
from outbox.operators import relays, trail
from outbox.operators.changes import CHANGES, groups, why_not
from outbox.operators.conditions import conditions
from outbox.operators.dead_letters import letters
from outbox.operators.figures import DATED
from outbox.operators.replaying import REPLAY
from outbox.operators.trail import published_from_now
from outbox.store.history import HISTORY

OUTBOX = Half(
    app="outbox",
    kind="relay",
    kind_label=_("relay"),
    options=outbox_options,
    messages=OutboxMessage,
    entries=TrailEntry,
    history=HISTORY,
    retention=lambda: outbox_options().keeps,
    dated=DATED,
    letters=letters,
    groups=groups,
    groups_label=_("Topics"),
    changes={**CHANGES, **by_name(REPLAY)},
    why_not=why_not,
    conditions=conditions,
    at_once=["unroutable"],
    trail=trail,
    publisher=published_from_now,
    counts=relays.counts,
    missing=relays.missing,
    is_starting=lambda process: process.last_pass_at is None,
    section_name="outbox.admin.overview.SECTION",
    actions_name="outbox.admin.actions.OPERATIONS",
    status_name="outbox.management.status",
)
