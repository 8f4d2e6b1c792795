"""An unavailable dependency: log it, wait with a cap, log it again at growing intervals, and log its recovery once."""

import logging
import threading
from collections.abc import Callable

from exactly_once.conf.masking import masked
from exactly_once.metrics import OUTAGE_SECONDS, OUTAGES
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import StopRequest
from exactly_once.wire.retry import Pause

logger = escaping_logger(__name__)

_FIRST_REMINDER_SECONDS = 10.0
_LONGEST_REMINDER_SECONDS = 600.0
_NOTHING_LOST = "no message is lost and no attempt is counted"
_REFUSAL_REMEDY = "Correct its user, password or virtual host, or grant the user its permissions on the broker."
_CERTIFICATE_REMEDY = "Name its authority in BROKER_SSL['ca_certs'], and in the URL the host that the certificate is for."
_DRAIN_WAITS = (
    "This process drains: it ends once the broker is available and nothing is due. To end it before that, send SIGTERM."
)


class OutageLog:
    """The log lines about one dependency, called `what` ("the broker", "the database").

    Several loops of a process share it, so that an outage is logged once and not once for each loop. It is repeated after
    10 s, then at intervals that double up to ten minutes.
    """

    def __init__(self, what: str) -> None:
        self._name = what[:1].upper() + what[1:]
        self._dependency = what.removeprefix("the ").split()[0]
        self._counted_at = 0.0
        self._lock = threading.Lock()
        self._since: float | None = None
        self._remind_at = 0.0
        self._interval = _FIRST_REMINDER_SECONDS
        self._is_error = False

    def failed(self, reason: object, remedy: str, describe_error: Callable[[], str] | None) -> None:
        """A loop could not use the dependency. See `Outage.record` for the arguments."""
        with self._lock:
            now = monotonic()
            first = self._since is None
            self._count(now, first=first)
            if self._since is None:
                self._since, self._interval, self._is_error = now, _FIRST_REMINDER_SECONDS, False
            is_worse = describe_error is not None and not self._is_error
            if not (first or is_worse or now >= self._remind_at):
                return
            self._remind_at = now + self._interval
            self._interval = min(2 * self._interval, _LONGEST_REMINDER_SECONDS)
            self._is_error = describe_error is not None
            seconds = now - self._since
        if describe_error is not None:
            lasted = "" if first or seconds < 1 else f" This has lasted {seconds:.0f} s."
            self._log(logging.ERROR, describe_error(), remedy, f"The process tries again; {_NOTHING_LOST}.{lasted}")
        else:
            state = "unavailable" if first else f"still unavailable after {seconds:.0f} s"
            why = str(reason).strip() or repr(reason)
            self._log(logging.WARNING, f"{self._name} is {state} ({why}).", remedy, f"Waiting for it; {_NOTHING_LOST}.")

    def over(self) -> None:
        """A loop that reported the outage can use the dependency again."""
        with self._lock:
            since, self._since = self._since, None
            if since is not None:
                self._count(monotonic(), first=False)
        if since is not None:
            logger.warning("%s is available again after %.1f s.", self._name, monotonic() - since)

    def _count(self, now: float, *, first: bool) -> None:
        if first:
            OUTAGES.add(1, self._dependency)
        else:
            OUTAGE_SECONDS.add(max(now - self._counted_at, 0.0), self._dependency)
        self._counted_at = now

    @staticmethod
    def _log(level: int, *sentences: str) -> None:
        logger.log(level, "%s", " ".join(filter(None, sentences)))


class Outage:
    """The outage of one dependency, as one loop meets it.

    An outage counts no attempt: the caller waits here and leaves every message unchanged.

    Args:
        what: what is unavailable: "the broker", "the database".
        log: the log that this loop shares with others; default: a log of its own.
    """

    def __init__(self, what: str, pause: Pause | None = None, *, log: OutageLog | None = None) -> None:
        self._log = log or OutageLog(what)
        self._pause = pause or Pause()
        self.ongoing = False

    def wait(
        self, reason: object, stop: StopRequest, *, remedy: str = "", describe_error: Callable[[], str] | None = None
    ) -> None:
        """The dependency failed for `reason`: wait, longer each time, up to the cap. See `record` for the arguments."""
        stop.wait(self.record(reason, remedy, describe_error=describe_error))

    def record(self, reason: object, remedy: str = "", *, describe_error: Callable[[], str] | None = None) -> float:
        """As `wait`, without blocking: return the seconds until the next try.

        Args:
            remedy: sentences that say what the operator can do.
            describe_error: waiting alone does not help, as with a refused login: the outage is logged as an error. Called
                for its description, in sentences, only when a line is logged.
        """
        self.ongoing = True
        self._log.failed(reason, remedy, describe_error)
        return self._pause.next_seconds()

    def over(self) -> None:
        """The dependency is available."""
        if self.ongoing:
            self._log.over()
        self.ongoing = False
        self._pause.reset()


def wait_for_broker(
    outage: Outage, stop: StopRequest, reason: str, *, setting: str, url: str, refused: bool, drain: bool
) -> None:
    """Wait, longer each time; the log names the address without the password.

    Args:
        setting: where `url` is from.
        refused: the broker refuses the login, see `exactly_once.transport.broker.is_refusal`.
        drain: the process ends when nothing is due, which it says while it waits.
    """
    drains = _DRAIN_WAITS if drain else ""
    if not refused:
        outage.wait(f"{masked(url)}: {reason}", stop, remedy=drains)
        return
    remedy, refusal = _REFUSAL_REMEDY, f"The broker refuses {setting}, {masked(url)}: {reason}."
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        remedy, refusal = _CERTIFICATE_REMEDY, f"The certificate of the broker in {setting}, {masked(url)}, fails: {reason}."
    remedy = f"{remedy} {drains}".strip()
    outage.wait(reason, stop, remedy=remedy, describe_error=lambda: refusal)
