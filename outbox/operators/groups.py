"""The failure groups of the outbox: by the broker's kind of answer and topic."""

from __future__ import annotations

from django.db.models import Q

from exactly_once.operators.failure_groups import FailureGroups, Notes
from outbox.models import OutboxMessage
from outbox.states import LIVE
from outbox.store.dialect import live

groups = FailureGroups(OutboxMessage, live, place="topic", who="topic", only=Q(day=LIVE))
notes = Notes("outbox")
