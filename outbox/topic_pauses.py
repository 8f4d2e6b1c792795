"""Pausing a topic: no relay sends its messages until it is resumed. `publish()` continues to write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from django.db import transaction

from exactly_once.process.logs import escaping_logger
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import NAME_LENGTH, why_no_topic
from outbox import doorbell
from outbox.errors import InvalidMessage
from outbox.states import STOPPED, TopicState
from outbox.store import paused_topics
from outbox.store.dialect import database_of

logger = escaping_logger(__name__)

_PAUSED = "outbox: topic %r paused by %s%s; publish() goes on writing its messages, and no relay sends them until it is resumed"
_RESUMED = "outbox: topic %r resumed by %s; relays make its messages ready in batches"


def pause(topic: str, *, reason: str = "", by: str = "", using: str | None = None) -> TopicState:
    """Have no relay send messages of `topic` until `resume()`; returns how it was found.

    In the transaction that is open on `using`, or else in one of its own. Once that has committed, a pass that has begun still
    sends what it has in hand. `publish()` goes on writing. The later messages of a paused message's key wait, whatever their
    topic. A topic that the circuit breaker has paused is tried no more.

    Args:
        topic: an exact name, without wildcards.
        reason: for people; shown with the topic.
        by: who; default: this process.

    Raises:
        InvalidMessage: no message can have this topic.
    """
    _check(topic)
    by = (by or process_name())[:NAME_LENGTH]
    alias = database_of(using)
    with transaction.atomic(using=alias):
        found = paused_topics.pause_topic(alias, topic, by, reason)
        _after_commit(alias, partial(logger.warning, _PAUSED, topic, by, f": {reason}" if reason else ""))
    return found


def resume(topic: str, *, by: str = "", using: str | None = None) -> TopicState:
    """Have the messages of `topic` sent again, also after a pause by the circuit breaker; returns how it was found.

    In the transaction that is open on `using`, or else in one of its own. Relays then make its messages ready in batches, the
    oldest first. A topic that the broker still refuses is paused again by the circuit breaker.

    Args:
        by: who; default: this process.

    Raises:
        InvalidMessage: no message can have this topic.
    """
    _check(topic)
    alias = database_of(using)
    with transaction.atomic(using=alias):
        found = paused_topics.resume_topic(alias, topic)
        if found in STOPPED:
            _after_commit(alias, partial(logger.warning, _RESUMED, topic, by or process_name()))
            doorbell.ring_after_commit(alias)
    return found


def _check(topic: object) -> None:
    if not isinstance(topic, str) or not topic.strip():
        raise InvalidMessage(f"topic is {topic!r}: name the topic that is meant.")
    if reason := why_no_topic(topic):
        raise InvalidMessage(f"No message has the topic {topic[:NAME_LENGTH]!r}: {reason}. Name one topic exactly.")


def _after_commit(alias: str, report: Callable[[], None]) -> None:
    transaction.on_commit(report, using=alias, robust=True)
