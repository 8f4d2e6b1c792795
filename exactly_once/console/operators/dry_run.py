"""What a rolled back transaction would have published, as the apps of this process see it; see `inbox.dry_run`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
    """An app that stores published messages."""

    def mark(self, alias: str) -> Any:
        """A position before the messages of the open transaction."""

    def since(self, alias: str, mark: Any, causation_id: str) -> Sequence[WouldPublish]:
        """The messages that the open transaction has published since the mark, caused by this message."""


_publishers: dict[str, Publisher] = {}


def register(app: str, publisher: Publisher) -> None:
    """Register the publisher of an app, when Django is ready. A second call for an app replaces the first."""
    _publishers[app] = publisher


def marks(alias: str) -> list[tuple[Publisher, Any]]:
    return [(publisher, publisher.mark(alias)) for publisher in _publishers.values()]


def published(alias: str, marked: Sequence[tuple[Publisher, Any]], causation_id: str) -> Iterator[WouldPublish]:
    for publisher, mark in marked:
        yield from publisher.since(alias, mark, causation_id)
