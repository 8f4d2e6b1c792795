"""The `OUTBOX` setting as one frozen dataclass."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import Any

from django.conf import settings
from django.db import connections

from exactly_once.conf import settings as options
from exactly_once.conf.app_options import AppOptions
from exactly_once.conf.masking import quoted
from exactly_once.conf.settings import load
from exactly_once.transport.broker import LOCAL_BROKER, why_no_exchange
from exactly_once.wire.retry import RetryPolicy
from outbox.topic_options import TopicOptions, matching, merged, require_patterns

_POLL_SECONDS_WITH_DOORBELL = 5.0
_TOPICS_REMEMBERED = 10_000


@dataclass(frozen=True, kw_only=True)
class WheelOptions:
    """The options of `WHEEL`, with their defaults.

    Attributes:
        TICK: the resolution of the timing wheel.
        SLOTS: the size of its ring.
    """

    TICK: timedelta = timedelta(milliseconds=10)
    SLOTS: int = 64


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of `CHECKS`, with their defaults.

    Attributes:
        AFTER: how long a prepared message may stay undecided before its checker is asked.
        EVERY: time between two checks of one prepared message; a checker that takes longer is logged.
        LIMIT: answers "unknown" after which a prepared message is stuck until an operator resumes it.
    """

    AFTER: timedelta = timedelta(seconds=6)
    EVERY: timedelta = timedelta(seconds=30)
    LIMIT: int = 15


@dataclass(frozen=True, kw_only=True)
class OutboxOptions(AppOptions):
    """The options of `OUTBOX`, with their defaults, besides those that both apps have.

    Attributes:
        BROKER_URL: any kombu URL, or `local://` for this service's own handlers without a broker.
        EXCHANGE: the topic exchange that the relay publishes to.
        SOURCE: CloudEvents `source` of this service; "" derives "/<project>" from `ROOT_URLCONF`.
        BODY_LIMIT_BYTES: maximum size of the serialised payload for publish().
        WHEEL: the options of the timing wheel, see `WheelOptions`.
        CHECKS: when and how often checkers are asked, see `CheckOptions`.
        CALLBACK_TIMEOUT: how long a callback may take before PostgreSQL ends its transaction and it is called again later.
        BATCH_SIZE: maximum number of messages in one pass of the relay.
        BATCH_DEADLINE: maximum time that one pass waits for the broker.
        LISTEN_ALIAS: the database alias on which idle relays of PostgreSQL LISTEN for commits, if the outbox's own goes through
            a transaction pooler; "" for its own; None: they only poll.
        PUBLISH_HOOKS: dotted paths of functions that take a `Draft` and return headers to add to the message, or None.
        TOPICS: options of some topics by pattern, see `outbox.topic_options.TopicOptions`.
    """

    BROKER_URL: str = field(default=LOCAL_BROKER, repr=False)
    EXCHANGE: str = "outbox"
    SOURCE: str = ""
    BODY_LIMIT_BYTES: int = 1024 * 1024
    WHEEL: WheelOptions = WheelOptions()
    CHECKS: CheckOptions = CheckOptions()
    CALLBACK_TIMEOUT: timedelta = timedelta(seconds=30)
    BATCH_SIZE: int = 500
    BATCH_DEADLINE: timedelta = timedelta(seconds=5)
    LISTEN_ALIAS: str | None = ""
    PUBLISH_HOOKS: tuple[str, ...] = ()
    TOPICS: dict = field(default_factory=dict)  # type: ignore[type-arg] # the parser compares with the bare type

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.BATCH_DEADLINE, self.POLL_INTERVAL) >= self.WATCHDOG:
            raise ValueError(
                f"WATCHDOG ({self.WATCHDOG}) must be longer than BATCH_DEADLINE ({self.BATCH_DEADLINE}) and POLL_INTERVAL "
                f"({self.POLL_INTERVAL}), or it would end a relay that is only waiting."
            )
        if reason := why_no_exchange(self.EXCHANGE):
            raise ValueError(f"EXCHANGE is {quoted(self.EXCHANGE)}: {reason}.")
        require_patterns(self.TOPICS, self._every_topic)
        if self.LISTEN_ALIAS and self.LISTEN_ALIAS not in connections:
            raise ValueError(f"LISTEN_ALIAS is {quoted(self.LISTEN_ALIAS)}, and DATABASES has: {', '.join(connections)}.")

    @cached_property
    def publish_hooks(self) -> dict[str, Callable[..., Any]]:
        """The functions of PUBLISH_HOOKS by path.

        Raises:
            Exception: one cannot be loaded; `outbox.E004` reports it.
        """
        return {path: load(path) for path in self.PUBLISH_HOOKS}

    @cached_property
    def horizon(self) -> timedelta:
        """How far ahead the wheel holds scheduled messages: one turn, at least five seconds. Sooner ones ring the doorbell."""
        return max(self.WHEEL.SLOTS * self.WHEEL.TICK, timedelta(seconds=5))

    def poll_seconds(self, *, connected: bool) -> float:
        """The longest poll interval of an idle loop; longer while the doorbell of every process rings it (`connected`)."""
        polled = self.POLL_INTERVAL.total_seconds()
        return max(polled, min(_POLL_SECONDS_WITH_DOORBELL, self.WATCHDOG.total_seconds() / 4)) if connected else polled

    @cached_property
    def topic(self) -> Callable[[str], TopicOptions]:
        """A function that returns the options of a topic. It computes those of each topic once."""
        if not self.TOPICS:
            same = merged((), self._every_topic)
            return lambda topic: same
        return lru_cache(maxsize=_TOPICS_REMEMBERED)(lambda topic: merged(matching(self.TOPICS, topic), self._every_topic))

    @property
    def _every_topic(self) -> dict[str, Any]:
        return {"MAX_ATTEMPTS": self.MAX_ATTEMPTS, "BACKOFF": self.BACKOFF}

    @cached_property
    def retry(self) -> RetryPolicy:
        return merged((), self._every_topic).retry

    @cached_property
    def unroutable_retry(self) -> RetryPolicy:
        """For messages without a bound queue: the next deploy may declare it, so their retry delays are shorter."""
        first, longest = self.BACKOFF
        return replace(self.retry, base=min(first, timedelta(seconds=1)), cap=min(longest, timedelta(minutes=1)))

    @cached_property
    def source(self) -> str:
        return self.SOURCE or "/" + str(getattr(settings, "ROOT_URLCONF", "")).partition(".")[0]


outbox_options = options.reader(OutboxOptions, "OUTBOX")
