"""Paused topics: those that the broker refuses, those that an operator has paused, and those with a rate.

A full or missing queue refuses every message of its topic, and a relay that tries all of them does nothing else. This is the
circuit breaker against that (Michael Nygard, "Release It!", 2007). After some refusals in a row, without a success, the relay
pauses the topic. After the pause it makes a few messages of the topic ready and sends them as probes. If the broker refuses
them, the pause is doubled; if it accepts one, the topic is resumed, in batches. A topic that the broker *forbids* is paused at
the first refusal, because each refusal costs the connection.

A topic is *silent* if the broker has messages of it and confirms none, for example because a queue has lost its majority.
RabbitMQ then may answer nothing on their channel, whatever the topic. So the relay sends one message of each silent topic on
a channel of its own. If it is not confirmed either, the topic is paused at once.

Pauses are stored in the database (`store.paused_topics`), so that every relay reads them with its next query for work, and
another relay continues when one ends. An operator's pause is a row of the same table. No relay probes it, and only an operator
ends it. Only refusals and silent topics are in memory, separately for each lane.

A topic with a rate (`TopicOptions.rate`) has a row while it has messages. Any relay makes as many of them ready as the rate
allows, and all relays send only these. The broker's answers do not matter to the rate.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.transport.interface import PublishOutcome, Verdict
from outbox.states import STOPPED, TopicState
from outbox.store import paused_topics
from outbox.store.dialect import PAUSED_TOPICS
from outbox.store.looking import TopicPause
from outbox.store.unwritable_rows import UnwritableRows

logger = escaping_logger(__name__)

_REFUSALS = 20
_PROBES = 5
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_TOPICS_TRIED_PER_ROUND = 10
_SWEEP_SECONDS = 60.0
_MOST_COUNTED = 1000
"""Topics whose refusals are counted. Those that were refused first are forgotten first."""
_REFUSED = (
    "relay: topic %r paused after %d refusals in a row (%s); a few of its messages are tried at least every %.0f s, other "
    "topics go on"
)
_FORBIDDEN = (
    "relay: topic %r paused, because the broker forbids it; a message is tried at least every %.0f s, other topics go on. "
    "Permit the relay's user to write to it (rabbitmqctl set_topic_permissions or set_permissions), or cancel its messages: %s"
)
_SILENT = (
    "relay: topic %r paused, because the broker does not confirm its messages; a message is tried at least every %.0f s, other "
    "topics go on. Find out which of its queues has no leader or is overloaded, for example by rabbitmq-diagnostics "
    "check_if_any_quorum_queue_has_no_leader"
)
_UNCONFIRMED = Verdict(PublishOutcome.UNKNOWN, "the broker does not confirm its messages")
_RESUMED = "relay: topic %r resumed: the broker takes its messages again"
_STRANDED = (
    f"relay: topic %r resumed: it had paused messages, but no row in {PAUSED_TOPICS}, which may have been deleted by hand"
)


def _spread() -> float:
    """A random factor that separates the probes of topics, because each probe of a forbidden topic costs the connection."""
    return random.uniform(0.5, 1.0)


class PausedTopics:
    """The paused topics as one lane knows them: which messages are not sent, which are probes, and the broker's answers.

    Args:
        rate: a function that returns how many messages of a topic may be sent in a second; 0: unlimited.
    """

    def __init__(self, alias: str, rate: Callable[[str], float] = lambda topic: 0.0) -> None:
        self._alias = alias
        self._rate = rate
        self._paused: Mapping[str, TopicPause] = {}
        self._limited: Mapping[str, TopicPause] = {}
        self._to_limit: dict[str, list[int]] = {}
        self._resuming: Sequence[str] = ()
        self._refusals: Counter[str] = Counter()
        self._silent: dict[str, None] = {}
        self._answered: dict[str, Verdict] = {}
        self._taken: set[str] = set()
        self._unwritable = UnwritableRows(alias)
        self._looked_at = 0.0
        self._sweep_at = 0.0

    def update(self, paused: Iterable[TopicPause]) -> None:
        """Replace the paused topics by those that a query found; they are valid for the next pass."""
        found = list(paused)
        self._looked_at = monotonic()
        self._paused = {one.topic: one for one in found if one.mode in STOPPED}
        resuming = {one.topic: one for one in found if one.mode not in STOPPED}
        rated = {topic: one for topic, one in resuming.items() if self._rate(topic)}
        self._limited = {topic: one for topic, one in rated.items() if one.mode == TopicState.LIMITED}
        self._to_limit.update({topic: [] for topic, one in rated.items() if one.mode != TopicState.LIMITED})
        self._resuming = [topic for topic in resuming if topic not in rated]

    def stops(self, topic: str, position: int) -> bool:
        """Must this message not be sent, because its topic is paused, or its rate does not allow it?"""
        paused = self._paused.get(topic) or self._limited.get(topic)
        if paused is not None:
            return position not in paused.in_trial
        if not self._rate(topic):
            return False
        self._to_limit.setdefault(topic, []).append(position)
        return True

    def is_paused(self, topic: str) -> bool:
        """Is the topic paused? Its messages that are not stopped are probes."""
        return topic in self._paused

    def is_probed(self, topic: str) -> bool:
        """Is the topic paused, or silent? Then its messages are sent one by one."""
        return topic in self._paused or topic in self._silent

    def record(
        self,
        taken: Iterable[str],
        refused: Collection[tuple[str, Verdict]] = (),
        silent: Iterable[str] = (),
        unconfirmed: Iterable[str] = (),
        crowded: Collection[str] = (),
    ) -> None:
        """Record the broker's answers of one pass.

        Args:
            taken: the topics of the messages that it accepted.
            refused: topic and verdict of each message that it refused because of its topic, or does not permit.
            silent: the topics of messages that it has not answered.
            unconfirmed: of these, the topics of messages that were sent on channels of their own.
            crowded: topics of which it has too many messages without an answer.
        """
        if not (refused or silent or crowded or self._refusals or self._silent or self._paused):
            return
        took = set(taken)
        for topic in took & self._refusals.keys():
            del self._refusals[topic]
        self._silent.update(dict.fromkeys(silent))
        for topic in took.union(topic for topic, _ in refused) & self._silent.keys():
            del self._silent[topic]
        self._answered.update({topic: _UNCONFIRMED for topic in unconfirmed if topic not in took})
        self._answered.update({topic: _UNCONFIRMED for topic in crowded if not self.is_paused(topic)})
        self._taken |= took & self._paused.keys()
        for topic, verdict in refused:
            is_forbidden = verdict.outcome is PublishOutcome.FORBIDDEN
            if topic not in took or is_forbidden:
                self._refusals[topic] += 1
                if is_forbidden or self.is_paused(topic) or self._refusals[topic] >= _REFUSALS:
                    self._answered[topic] = verdict
        for counted in (self._refusals, self._silent):
            while len(counted) > _MOST_COUNTED:
                del counted[next(iter(counted))]

    def store(self) -> None:
        """Pause topics, prolong their pauses or resume them, by the recorded answers.

        If the database fails, these answers are forgotten, and the next ones are recorded.
        """
        taken, self._taken = self._taken, set()
        answered, self._answered = self._answered, {}
        for topic in taken:
            if paused_topics.begin_resuming(self._alias, topic):
                logger.warning(_RESUMED, topic)
        for topic, verdict in answered.items():
            self._pause(topic, verdict, self._refusals.pop(topic, 0))

    def _pause(self, topic: str, verdict: Verdict, refusals: int) -> None:
        reason, is_forbidden = verdict.reason, verdict.outcome is PublishOutcome.FORBIDDEN
        if self.is_paused(topic):
            before = paused_topics.prolong(self._alias, topic, verdict, _LONGEST_PAUSE_SECONDS, _spread())
            is_new = is_forbidden and before not in {None, reason}
        else:
            first = timedelta(seconds=_spread() * _FIRST_PAUSE_SECONDS)
            is_new = paused_topics.pause_refused(self._alias, topic, verdict, _FIRST_PAUSE_SECONDS, first)
        if is_new and is_forbidden:
            logger.warning(_FORBIDDEN, topic, _LONGEST_PAUSE_SECONDS, reason)
        elif is_new and verdict is _UNCONFIRMED:
            logger.warning(_SILENT, topic, _LONGEST_PAUSE_SECONDS)
        elif is_new:
            logger.warning(_REFUSED, topic, refusals, reason, _LONGEST_PAUSE_SECONDS)

    def make_ready(self, most: int) -> int:
        """Make due probes ready, messages that a rate allows, and up to `most` of a topic that is being resumed.

        Returns the number of messages, and of topics whose rate begins to allow some.
        """
        to_limit, self._to_limit = self._to_limit, {}
        moved = sum(paused_topics.limit(self._alias, topic, self._rate(topic), first) for topic, first in to_limit.items())
        since = monotonic() - self._looked_at
        allowed = [topic for topic, one in self._limited.items() if one.probe_in <= since]
        for topic in _some(allowed, _TOPICS_TRIED_PER_ROUND):
            moved += paused_topics.release_allowed(self._alias, topic, self._rate(topic), self._unwritable)
        due = [topic for topic, one in self._paused.items() if one.probe_in <= since]
        for topic in _some(due, _TOPICS_TRIED_PER_ROUND):
            moved += paused_topics.begin_trial(self._alias, topic, _PROBES, _spread(), self._unwritable)
        for topic in _some(self._resuming, 1):
            moved += paused_topics.resume_some(self._alias, topic, most, self._unwritable)
        if monotonic() >= self._sweep_at:
            self._sweep_at = monotonic() + _SWEEP_SECONDS
            for topic in paused_topics.resume_stranded(self._alias):
                logger.warning(_STRANDED, topic)
        return moved

    def seconds_left(self) -> float:
        """Seconds until the next probes, or until a rate allows more; infinite if there are none."""
        soonest = min((one.probe_in for one in (*self._paused.values(), *self._limited.values())), default=math.inf)
        return max(0.0, soonest - (monotonic() - self._looked_at))


def _some(topics: Collection[str], most: int) -> Sequence[str]:
    return random.sample(list(topics), min(most, len(topics)))
