"""What a rolled back transaction would have published, as the apps of this process see it; see `inbox.dry_run`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from exactly_once.half import halves


@dataclass(frozen=True, kw_only=True)
class WouldPublish:
    """A message that the open transaction has published."""

    topic: str
    biz_id: str
    key: str
    body: bytes
    content_type: str
    headers: Any


class Publisher(Protocol):
    """A half that stores published messages."""

    def mark(self, alias: str) -> Any:
        """A position before the messages of the open transaction."""

    def since(self, alias: str, mark: Any, causation_id: str) -> Sequence[WouldPublish]:
        """The messages that the open transaction has published since the mark, caused by this message."""


def marks(alias: str) -> list[tuple[Publisher, Any]]:
    return [(half.publisher, half.publisher.mark(alias)) for half in halves() if half.publisher]


def published(alias: str, marked: Sequence[tuple[Publisher, Any]], causation_id: str) -> Iterator[WouldPublish]:
    for publisher, mark in marked:
        yield from publisher.since(alias, mark, causation_id)
