"""An unavailable dependency: log it, wait with a cap, log it again once a minute, and log its recovery once."""

from __future__ import annotations

import logging

from outbox.kernel.clock import monotonic
from outbox.kernel.loop import StopRequest
from outbox.kernel.retry import Pause

logger = logging.getLogger(__name__)

_REMINDER_SECONDS = 60.0


class Outage:
    """The outage of one dependency, called `what` ("the broker", "the database").

    An outage counts no attempt: the caller waits here and leaves every message unchanged.
    """

    def __init__(self, what: str, pause: Pause | None = None) -> None:
        self._name = what[:1].upper() + what[1:]
        self._pause = pause or Pause()
        self._since: float | None = None
        self._logged_at = 0.0

    @property
    def ongoing(self) -> bool:
        return self._since is not None

    def wait(self, reason: object, stop: StopRequest) -> None:
        """The dependency failed for `reason`: wait, longer each time, up to the cap."""
        stop.wait(self.record(reason))

    def record(self, reason: object, remedy: str = "") -> float:
        """As `wait`, without blocking: return the seconds until the next try.

        Args:
            remedy: sentences that say what the operator can do.
        """
        now = monotonic()
        if self._since is None or now - self._logged_at >= _REMINDER_SECONDS:
            first, self._logged_at = self._since is None, now
            logger.warning(
                "%s is %s (%s). %sWaiting for it; no message is lost and no attempt is counted.",
                self._name,
                "unavailable" if first else f"still unavailable after {now - (self._since or now):.0f} s",
                str(reason).strip() or repr(reason),
                f"{remedy} " if remedy else "",
            )
        if self._since is None:
            self._since = now
        return self._pause.next_seconds()

    def enter(self) -> float:
        """As `note`, for a caller that reports it itself."""
        if self._since is None:
            self._since = monotonic()
        return self._pause.next_seconds()

    def over(self) -> None:
        """The dependency is available."""
        if self._since is not None:
            logger.warning("%s is available again after %.1f s.", self._name, monotonic() - self._since)
        self._since = None
        self._pause.reset()
