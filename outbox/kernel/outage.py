"""Something this process depends on is away: say so once, wait with a cap, say once that it is back."""

from __future__ import annotations

import logging

from outbox.kernel.clock import monotonic
from outbox.kernel.loop import StopRequest
from outbox.kernel.retry import Pause

logger = logging.getLogger(__name__)


class Outage:
    """The absence of one dependency, called `what` ("the broker", "the database").

    An outage is nobody's attempt: the caller pauses here and leaves every message as it is.
    """

    def __init__(self, what: str, pause: Pause | None = None) -> None:
        self._what = what
        self._pause = pause or Pause()
        self._since: float | None = None
        self._reason = ""

    @property
    def ongoing(self) -> bool:
        return self._since is not None

    def wait(self, reason: object, stop: StopRequest) -> None:
        """It did not answer, for `reason`: pause, longer each time, at most the cap. Another reason is told as well."""
        stop.wait(self.note(reason))

    def note(self, reason: object) -> float:
        """As `wait`, for a caller with something else to do meanwhile: how many seconds not to ask."""
        told, self._reason = self._reason, str(reason).strip() or repr(reason)
        if self._since is None:
            self._since = monotonic()
            logger.warning(
                "%s is away (%s). Waiting for it; no message is lost and no attempt is counted.",
                self._what.capitalize(),
                self._reason,
            )
        elif self._reason != told:
            logger.info("%s is still away, now because: %s", self._what.capitalize(), self._reason)
        return self._pause.next_seconds()

    def enter(self) -> float:
        """As `note`, for a caller that reports it itself."""
        if self._since is None:
            self._since = monotonic()
        return self._pause.next_seconds()

    def over(self) -> None:
        """It answered."""
        if self._since is not None:
            logger.warning("%s is back after %.1f s.", self._what.capitalize(), monotonic() - self._since)
        self._since = None
        self._reason = ""
        self._pause.reset()
