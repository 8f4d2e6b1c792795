"""The failure groups of the inbox: by exception class and place in the code."""

from __future__ import annotations

from inbox.models import FailureNote, InboxMessage
from inbox.store.dialect import TABLE
from outbox.database.failure_groups import FailureGroups, Notes

groups = FailureGroups(InboxMessage, lambda connection: TABLE, place="error_place", who="handler")
notes = Notes(FailureNote)
