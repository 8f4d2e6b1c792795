"""Export and import of the outbox's dead letters."""

from __future__ import annotations

from exactly_once.operators.dead_letters import Letters
from outbox.models import OutboxMessage
from outbox.store.dead_letters import COLUMNS

letters = Letters("outbox", OutboxMessage, COLUMNS)
