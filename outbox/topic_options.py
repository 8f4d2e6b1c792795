"""The option `TOPICS` of `OUTBOX`, as a dataclass: what applies to the topics that match a pattern."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import Any

from exactly_once.conf import settings as options
from exactly_once.conf.masking import kind, quoted
from exactly_once.conf.settings import load
from exactly_once.transport.broker import why_no_exchange
from exactly_once.wire.retry import RetryPolicy
from exactly_once.wire.text import matches, why_no_topic


@dataclass(frozen=True, kw_only=True)
class TopicOptions:
    """Every option of one pattern. One that is omitted is that of the next less specific pattern that has it.

    Attributes:
        MAX_ATTEMPTS, BACKOFF: in place of those of `OUTBOX`.
        RATE: how many messages all relays together publish at most, such as "100/s", "90/m" or "5/h"; "": unlimited.
        EXCHANGE: the topic exchange to publish to, which must exist; "" is that of `OUTBOX`.
        ENCODER: the dotted path of a subclass of `json.JSONEncoder` that serialises payloads; "" is `DjangoJSONEncoder`.
    """

    MAX_ATTEMPTS: int
    BACKOFF: tuple[timedelta, ...]
    RATE: str = ""
    EXCHANGE: str = ""
    ENCODER: str = ""

    def __post_init__(self) -> None:
        options.require_backoff(self.BACKOFF)
        if self.EXCHANGE and (reason := why_no_exchange(self.EXCHANGE)):
            raise ValueError(f"EXCHANGE is {quoted(self.EXCHANGE)}: {reason}.")
        _ = self.per_second

    @cached_property
    def per_second(self) -> float:
        """`RATE` as messages a second; 0: unlimited."""
        return options.per_second("RATE", self.RATE) if self.RATE else 0.0

    @cached_property
    def retry(self) -> RetryPolicy:
        return RetryPolicy(max_attempts=self.MAX_ATTEMPTS, base=self.BACKOFF[0], factor=2.0, cap=self.BACKOFF[1])


def merged(given: Iterable[tuple[str, Any]], default: Mapping[str, Any]) -> TopicOptions:
    """The options of a topic from patterns and their dictionaries. The most specific pattern that has an option decides.

    Raises:
        ValueError: a pattern or a dictionary is invalid.
    """
    chosen = dict(default)
    found = options.parse(TopicOptions, "TOPICS", chosen)
    for pattern, own in sorted(given, key=lambda item: (not item[0].endswith("*"), len(item[0]))):
        if not isinstance(own, Mapping):
            raise ValueError(f"TOPICS[{pattern!r}] must be a dict, not {kind(own)}.")  # noqa: TRY004 - a wrong setting
        found = options.parse(TopicOptions, f"TOPICS[{pattern!r}]", chosen | dict(own))
        chosen |= own
    return found


def require_patterns(given: Mapping[Any, Any], default: Mapping[str, Any]) -> None:
    """Check every pattern and its options.

    Raises:
        ValueError: naming the first that is invalid.
    """
    for pattern, own in given.items():
        if not isinstance(pattern, str) or (pattern != "*" and why_no_topic(pattern.removesuffix(".*"))):
            shown = repr(pattern[:60]) if isinstance(pattern, str) else kind(pattern)
            raise ValueError(
                f'TOPICS has the pattern {shown}: it must be a topic, or the beginning of topics with ".*" after it, '
                'or "*" for all, as in "shop.*".'
            )
        merged([(pattern, own)], default)


def matching(given: Mapping[str, Any], topic: str) -> list[tuple[str, Any]]:
    return [(pattern, own) for pattern, own in given.items() if matches(pattern, topic)]


@lru_cache(maxsize=64)
def load_encoder(path: str) -> json.JSONEncoder:
    """An encoder of the class with this dotted path.

    Raises:
        Exception: it cannot be loaded; `outbox.E005` reports it.
    """
    found: Any = load(path)
    if not (isinstance(found, type) and issubclass(found, json.JSONEncoder)):
        raise TypeError("it is not a subclass of json.JSONEncoder")
    # NaN and Infinity are Python's own extension; no other JSON reader takes them.
    return found(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
