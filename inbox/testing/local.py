"""The transport of `outbox.testing.run_relay`. The outbox finds it by name, because it does not import the inbox."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from inbox.conf import inbox_options
from inbox.handlers.handler import Handler
from inbox.local import LocalTransport
from inbox.runner import Runner
from inbox.testing.observing import Failures


class LocalTestTransport(LocalTransport):
    """`local://` without waiting for rate limits.

    Args:
        alias: the database of the outbox.
        is_broker: `local://` is the broker of the project, so its refusals apply. With another broker, a handler may write to
            another database than the outbox's.
    """

    def __init__(self, alias: str, *, is_broker: bool) -> None:
        super().__init__("local://", alias=alias, exchange="")
        self._failures = Failures()
        self._runner = Runner(inbox_options(), handlers=self._failures.watched)
        self._is_broker = is_broker

    def raising_errors(self) -> AbstractContextManager[None]:
        """At the end of the block, raise why the first message was not handled."""
        return self._failures.raising()

    def _elsewhere(self, handlers: Sequence[Handler]) -> Sequence[Handler]:
        return super()._elsewhere(handlers) if self._is_broker else ()
