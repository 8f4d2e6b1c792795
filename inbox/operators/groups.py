"""The failure groups of the inbox: by exception class and place in the code."""

from __future__ import annotations

from exactly_once.operators.failure_groups import FailureGroups, Notes
from inbox.models import InboxMessage
from inbox.store.dialect import TABLE

groups = FailureGroups(InboxMessage, lambda connection: TABLE, place="error_place", who="handler")
notes = Notes("inbox")
