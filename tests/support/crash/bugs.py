"""Seeded bugs, one at a time, of a kind that a careful engineer may make.

BUG names the one that this process has. They are patched in from outside, so that the tests can prove that their oracle
detects them: a harness that has never reported a lost message may be unable to detect one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support.crash.failpoints import patch


def acknowledges_before_the_commit() -> None:
    """The broker forgets a message as soon as it has sent it."""

    def consume(original: Any) -> Any:
        return lambda consumer, no_ack=None: original(consumer, no_ack=True)

    def settle(original: Any) -> Any:
        return lambda acks, message: acks._outstanding.pop(message.delivery_tag)

    patch("kombu.messaging.Consumer.consume", consume)
    patch("inbox.consumer.answers.Acks.settle", settle)


def has_no_sentinel() -> None:
    """The transaction of the handler is committed without a check that it still can be."""
    patch("inbox.store.sentinel.finish", lambda original: lambda *args, **kwargs: None)
    patch("inbox.transactions.running.refuse_if_uncommitted", lambda original: lambda *args, **kwargs: None)


def settles_before_the_confirm() -> None:
    """A message that was written to the socket counts as published."""

    def sent(original: Any) -> Any:
        def sent_and_confirmed(tracker: Any, position: int, message_id: str) -> None:
            original(tracker, position, message_id)
            tracker.acked(0, True)

        return sent_and_confirmed

    patch("outbox.transports.confirms.ConfirmTracker.sent", sent)


def ignores_returned_messages() -> None:
    """The broker also confirms messages without a queue."""
    patch("outbox.transports.confirms.ConfirmTracker.returned", lambda original: lambda *args: None)


def sends_later_messages_of_a_key_first() -> None:
    """All of them are sent, in waves, and the last wave is the first."""
    patch("outbox.relay.passes.waves", lambda original: lambda batch: original(batch)[::-1])


def runs_duplicates() -> None:
    """It does not check whether the inbox row existed."""
    there_already = SimpleNamespace(begun=(0,))

    def begin(original: Any) -> Any:
        return lambda *args, **kwargs: original(*args, **kwargs) or there_already

    def finish(original: Any) -> Any:
        return lambda guard, *args, **kwargs: None if guard is there_already else original(guard, *args, **kwargs)

    def can_commit(original: Any) -> Any:
        return lambda guard, *args: guard is not there_already and original(guard, *args)

    patch("inbox.store.arrivals.begin_fresh", begin)
    patch("inbox.store.sentinel.can_commit", can_commit)
    patch("inbox.store.sentinel.finish", finish)


def writes_the_effect_outside_the_transaction() -> None:
    """The effect has a connection of its own, so it stays when the inbox row is rolled back."""

    def save(original: Any) -> Any:
        from threading import Thread  # noqa: PLC0415 - in Django, another thread is another connection

        from django.db import connections  # noqa: PLC0415

        def elsewhere(effect: Any, *args: Any, **kwargs: Any) -> None:
            def write() -> None:
                original(effect, *args, **kwargs)
                connections.close_all()

            thread = Thread(target=write)
            thread.start()
            thread.join()

        return elsewhere

    patch("tests.support.apps.effects.models.Effect.save", save)


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        acknowledges_before_the_commit,
        has_no_sentinel,
        settles_before_the_confirm,
        ignores_returned_messages,
        sends_later_messages_of_a_key_first,
        runs_duplicates,
        writes_the_effect_outside_the_transaction,
    )
}


def install_from_environment() -> None:
    if bug := os.environ.get("BUG"):
        BUGS[bug]()
