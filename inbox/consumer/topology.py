"""The queues of the handlers.

Each handler of a group has one queue, bound to the shared topic exchange by its topics. The name contains the topics, so that
during a rolling deploy an old worker never takes messages of a topic that only the new code knows.

A queue of an ordered handler has a *single active consumer*: the broker delivers to one subscription at a time and switches to
the next when that one ends, so messages are stored in order. `partitions` makes several such queues behind an exchange that
hashes the ordering key, so that a key is always in the same queue.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import kombu
from amqp import spec
from amqp.exceptions import AccessRefused, InvalidCommand, NotFound, PreconditionFailed, ResourceLocked

from exactly_once.conf.masking import masked
from exactly_once.process.logs import escaping_logger
from exactly_once.transport import broker
from exactly_once.transport.broker import EXCHANGE_TYPE, speaks_amqp
from exactly_once.transport.management_api import default_url, read_list
from exactly_once.wire.envelope import ORDERING_KEY_HEADER
from exactly_once.wire.text import describe, fit
from inbox.conf import InboxOptions
from inbox.consumer.names import NameWithoutCode
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry

logger = escaping_logger(__name__)

# RabbitMQ 4 drops a message after 20 redeliveries from a quorum queue without a dead-letter exchange. The database counts
# attempts; the broker must not.
_UNLIMITED = 1_000_000_000
_PLUGIN = "rabbitmq_consistent_hash_exchange"
_EQUAL_WEIGHT = "1"
_SINGLE_ACTIVE = "x-single-active-consumer"
_TYPE, _LIMIT = "x-queue-type", "x-delivery-limit"
_AUTO_DELETE, _DURABLE, _EXPIRES = "auto_delete", "durable", "x-expires"
_LIMITS_BY_DEFAULT, _DEFAULT_LIMIT = 4, 20
"""From this version of RabbitMQ on, a quorum queue has this limit by default."""
_DIFFERS = re.compile(
    r"inequivalent arg '(x-[^']+|auto_delete|durable)' .* but current is (?:none|(?:the value )?'(.*)'(?: of type '(\w+)')?)$"
)
"""RabbitMQ names the type if it differs from that of the given value."""
_FOREIGN = (
    "If another program needs it, set INBOX['GROUP'] to another name and restart. Otherwise delete it, after its messages are "
    "moved to another queue (with a shovel, or 'Move messages' in the management plugin); it is declared again within 30 s."
)
"""What to do about a queue that was declared by another program."""
_MOST_ARGUMENTS = 20
_APPLIES = {"all", "queues", "quorum_queues"}
_KINDS = ("policies", "operator-policies")


class Unusable(Exception):
    """A handler's queues cannot be used. The text has the reason and the remedy for an operator."""


def queue_name(handler: Handler, options: InboxOptions) -> str:
    return broker.queue_name(f"{options.group}.{handler.name}", *handler.topics)


def queue_of(handler: Handler, options: InboxOptions, partition: int | None = None) -> kombu.Queue:
    """The durable queue of `handler`, or one of its partitions, not declared yet."""
    name = queue_name(handler, options)
    arguments: dict[str, Any] = {}
    if speaks_amqp(options.broker_url):
        arguments[_TYPE] = options.QUEUE_TYPE
        if options.QUEUE_TYPE == "quorum":
            arguments[_LIMIT] = _UNLIMITED
        if handler.ordered:
            arguments[_SINGLE_ACTIVE] = True
    exchange = _topic_exchange(options) if partition is None else _hashing_exchange(handler, options)
    keys = handler.topics if partition is None else (_EQUAL_WEIGHT,)
    return kombu.Queue(
        name if partition is None else fit(f"{name}.{partition}"),
        bindings=[kombu.binding(exchange, routing_key=key) for key in keys],
        durable=True,
        queue_arguments=arguments,
    )


def queues_of(handler: Handler, options: InboxOptions) -> list[kombu.Queue]:
    """The queues of `handler`, not declared yet: one, or its partitions."""
    if not _is_partitioned(handler, options):
        return [queue_of(handler, options)]
    return [queue_of(handler, options, partition) for partition in range(handler.partitions)]


def declare(connection: kombu.Connection, handler: Handler, options: InboxOptions) -> str:
    """Declare and bind the queues of `handler`; return a message for the operator, or "".

    Each step uses its own channel, because a refusal closes the channel.

    Raises:
        Unusable: the queues must not be received from. The existing ones lose messages, or cannot keep the order of an ordered
            handler, an argument limits how often a message is delivered, or the user may not declare or bind them.
    """
    with refused_for_handler_only(handler, options):
        if _is_partitioned(handler, options):
            _declare_hashing(connection, handler, options)
        former = _why_former(connection, handler, options)
        # The first partition is declared last: if it exists, all exist.
        problems = [_declare(connection, queue) for queue in reversed(queues_of(handler, options))]
        if _is_partitioned(handler, options):
            # Bind their exchange last: with fewer queues, the hash would route a key to another queue.
            with connection.channel() as channel:
                _topic_exchange(options)(channel).declare()
                for topic in handler.topics:
                    _hashing_exchange(handler, options)(channel).bind_to(_topic_exchange(options), routing_key=topic)
        return " ".join(filter(None, [*problems, former]))


@contextmanager
def refused_for_handler_only(handler: Handler, options: InboxOptions) -> Iterator[None]:
    """If the broker refuses access to this handler's own queues or topic, stop only this handler.

    Raises:
        Unusable: the broker refused access to them.
    """
    try:
        yield
    except AccessRefused as error:
        refused = describe(error)
        # The login is refused, or the exchange of all handlers.
        if "access to " not in refused or (f"exchange '{options.exchange}'" in refused and "topic '" not in refused):
            raise
        raise Unusable(
            f"The broker forbids access to the queue or topic of the handler {handler.name} ({refused}). Grant the user of "
            f"{options.broker_setting} permission to configure, write and read its queue, and to read its topic: rabbitmqctl "
            "set_permissions, set_topic_permissions."
        ) from error


def _why_former(connection: kombu.Connection, handler: Handler, options: InboxOptions) -> str:
    """A message for the operator if there are queues of when `handler` had one of its topics, or other partitions; else "".

    Raises:
        Unusable: it is ordered, and its own queues must not be received from.
    """
    if not speaks_amqp(options.broker_url):
        return ""
    name, count, former = queue_name(handler, options), handler.partitions, []
    for topic in handler.topics if len(handler.topics) > 1 else ():
        alone = broker.queue_name(f"{options.group}.{handler.name}", topic)
        former += [alone, fit(f"{alone}.0")]
    if handler.ordered:
        former += [name, fit(f"{name}.{count}")] if count > 1 else [fit(f"{name}.0")]
    found = [queue for queue in former if _consumers_of(connection, queue) is not None]
    first, last = (fit(f"{name}.{partition}") for partition in (0, count - 1))
    if first != last and not found and _consumers_of(connection, first) is not None and _consumers_of(connection, last) is None:
        found = [first]
    if not found:
        return ""
    queues = (
        f"The broker has queues of the handler {handler.name} from when it had other topics, or another number of partitions: "
        f"{', '.join(found)}."
    )
    if handler.ordered:
        raise Unusable(
            f"{queues} Messages that wait in them would be handled after later ones of their keys. Stop the relays, let the "
            f"old consumers run these queues empty, delete them, and the exchange {name!r} if there is one, and start again."
        )
    return f"{queues} They get a copy of every message. When no process has the old code and they are empty, delete them."


class Policies:
    """The policies of queues, as they were last read. AMQP does not show them, so the management API of RabbitMQ is queried.

    A delivery limit set by a policy applies in addition to the queue's own argument: RabbitMQ takes the lower one. The API is
    queried at `INBOX["MANAGEMENT_URL"]`, or at its default port if the broker uses its default port. Without an answer, such
    limits are not detected.

    They are read when the consumer connects to the broker, and again while a queue may not be received from.
    """

    def __init__(self, options: InboxOptions) -> None:
        self._broker_url = options.broker_url
        # Classic queues have no delivery limit; only a queue declared earlier may still be a quorum queue.
        self._unavailable_level = logging.WARNING if options.QUEUE_TYPE == "quorum" else logging.INFO
        self._url = options.MANAGEMENT_URL
        self._tls = options.tls
        self._known: dict[str, list[dict[str, Any]]] = {}

    def read(self) -> None:
        """Read them, within a few seconds. Without an answer they stay as they were."""
        if not speaks_amqp(self._broker_url):
            return
        broker = kombu.Connection(self._broker_url)
        if not (url := self._url or default_url(self._broker_url, broker)):
            self._log_unavailable("is not queried, because the broker does not use its default port")
            return
        try:
            self._known = {kind: read_list(url, broker, kind, tls=self._tls) for kind in _KINDS}
        except Exception as error:  # noqa: BLE001 - whatever an API answers
            self._log_unavailable(f"at {masked(url)} is unavailable ({describe(error)})")

    def _log_unavailable(self, why: str) -> None:
        logger.log(
            self._unavailable_level,
            "consumer: the management API of RabbitMQ %s. Delivery limits set by policies are not detected. Enable the plugin "
            "rabbitmq_management, or set INBOX['MANAGEMENT_URL'] to the URL of the API. It is queried again at the next "
            "connection to the broker.",
            why,
        )
        self._unavailable_level = logging.INFO

    def delivery_limit(self, queue: str) -> str:
        """Why its policies forbid receiving from this queue, with the remedy; "" if no limit is known."""
        for kind, policies in self._known.items():
            policy = _effective(policies, queue)
            limit = policy["definition"].get("delivery-limit") if policy else None
            if policy and isinstance(limit, int) and limit >= 0:
                command = "set_policy" if kind == "policies" else "set_operator_policy"
                return (
                    f"The queue {queue!r} drops a message that has been delivered {limit} times, because of the policy "
                    f"{policy['name']!r} of the virtual host {policy['vhost']!r}. Remove 'delivery-limit' from the policy, or "
                    f"change its pattern {policy['pattern']!r} so that it does not match this queue (rabbitmqctl {command})."
                )
        return ""


def _effective(policies: list[dict[str, Any]], queue: str) -> dict[str, Any] | None:
    """The policy that applies to a quorum queue of this name: the match with the highest priority."""
    matching = [policy for policy in policies if policy["apply-to"] in _APPLIES and _matches(policy["pattern"], queue)]
    return max(matching, key=lambda policy: policy["priority"], default=None)


def _matches(pattern: str, queue: str) -> bool:
    try:
        return re.search(pattern, queue) is not None
    except re.error:  # Erlang's regular expressions have Perl's syntax: assume a match
        return True


def refuse_limits(connection: kombu.Connection, policies: Policies, handler: Handler, options: InboxOptions) -> None:
    """Check the policies of `handler`'s existing queues.

    Raises:
        Unusable: one limits how often a message is delivered, after which the broker drops it. A delivery is not an attempt:
            restarts, crashes, lost connections and outages of the database count, too.
    """
    for queue in queues_of(handler, options):
        limit = policies.delivery_limit(queue.name)
        # A classic queue has no such limit; a queue that was declared with another type is used as it is.
        if limit and (options.QUEUE_TYPE == "quorum" or _differing_arguments(connection, queue).get(_TYPE) == "quorum"):
            raise Unusable(limit)


def _declare(connection: kombu.Connection, queue: kombu.Queue) -> str:
    try:
        with connection.channel() as channel:
            queue(channel).declare()
    except PreconditionFailed as error:
        if error.method_sig != spec.Queue.Declare:
            # Waiting for an answer also reads the close of another channel, whose consumer exceeded `consumer_timeout`.
            raise
        differing = _differing_arguments(connection, queue)
        _refuse_lossy(queue.name, differing)
        if _SINGLE_ACTIVE in differing and _SINGLE_ACTIVE in queue.queue_arguments:
            raise Unusable(
                f"The queue {queue.name!r} cannot keep the order of its messages: it was declared without a single active "
                "consumer, and the broker cannot change that. When it is empty, stop its consumers, delete it and start them "
                "again. Messages that are published meanwhile wait in the outbox."
            ) from error
        if _LIMIT in differing:
            limit = differing[_LIMIT]
            _refuse_low_limit(connection, queue.name, None if limit is None else int(limit))
        with connection.channel() as channel:
            queue(channel).queue_declare(passive=True)
            for binding in queue.bindings:
                binding.declare(channel)
                binding.bind(queue(channel))
        return (
            f"The queue {queue.name!r} exists with other arguments ({describe(error)}). It is used with these. To declare it "
            "as set in INBOX, stop its consumers when it is empty, delete it and start them again."
        )
    except ResourceLocked as error:
        raise Unusable(f"The queue {queue.name!r} is exclusive to a connection of another program. {_FOREIGN}") from error
    return ""


def _differing_arguments(connection: kombu.Connection, queue: kombu.Queue) -> dict[str, str | None]:
    """The arguments and properties of an existing queue that differ from `queue`, a delivery limit included, as the broker
    names them.

    The broker names one at a time, so the queue is declared again with that value, until the broker accepts it.
    """
    differing: dict[str, str | None] = {}
    if not queue.queue_arguments:
        return differing
    arguments = {**queue.queue_arguments, _LIMIT: _UNLIMITED}
    properties = {_DURABLE: True, _AUTO_DELETE: False}
    for _ in range(_MOST_ARGUMENTS):
        try:
            with connection.channel() as channel:
                kombu.Queue(queue.name, queue_arguments=arguments, **properties)(channel).queue_declare()
        except PreconditionFailed as error:
            found = _DIFFERS.search(describe(error))
        else:
            break
        if found is None:
            break
        name, value, kind = found.groups()
        differing[name] = value
        if name in properties:
            properties[name] = value == "true"
        elif value is None:
            arguments.pop(name, None)
        else:
            arguments[name] = _read_as(value, kind)
        if name == _TYPE and value != "quorum":
            # Other queue types refuse this argument, and have no such limit.
            arguments.pop(_LIMIT, None)
    return differing


def _refuse_lossy(queue: str, differing: Mapping[str, str | None]) -> None:
    if differing.get(_TYPE) == "stream":
        why = "is a stream, of which a consumer receives only what is published while it is subscribed"
    elif differing.get(_AUTO_DELETE) == "true":
        why = "is deleted with its messages when its last consumer ends (auto_delete)"
    elif differing.get(_DURABLE) == "false":
        why = "is lost with its messages when the broker restarts (it is not durable)"
    elif (unused := differing.get(_EXPIRES)) is not None:
        why = f"is deleted with its messages when no consumer has used it for {unused} ms (its argument {_EXPIRES})"
    else:
        return
    raise Unusable(f"The queue {queue!r} {why}, and the broker cannot change that. {_FOREIGN}")


def _refuse_low_limit(connection: kombu.Connection, queue: str, limit: int | None) -> None:
    if (
        limit is None
        and int(connection.connection.server_properties.get("version", "0").partition(".")[0]) >= _LIMITS_BY_DEFAULT
    ):
        limit = _DEFAULT_LIMIT
    if limit is None or not 0 <= limit < _UNLIMITED:
        return
    raise Unusable(
        f"The queue {queue!r} drops a message that has been delivered {limit} times (its argument {_LIMIT}), and the broker "
        "cannot change that. Move its messages to another queue (with a shovel, or 'Move messages' in the management plugin), "
        "delete it, start the consumer, which declares it without a limit, and move the messages back."
    )


def _read_as(value: str, kind: str | None) -> Any:
    if kind == "bool" or (kind is None and value in {"true", "false"}):
        return value == "true"
    return int(value) if value.isdecimal() and kind != "longstr" else value


def _declare_hashing(connection: kombu.Connection, handler: Handler, options: InboxOptions) -> None:
    """On a separate connection, because the broker closes the connection over an unknown exchange type."""
    try:
        with connection.clone() as own, own.channel() as channel:
            _hashing_exchange(handler, options)(channel).declare()
    except (InvalidCommand, PreconditionFailed) as error:
        # From RabbitMQ 4 on, an unknown type is a failed precondition, too.
        if isinstance(error, PreconditionFailed) and "invalid exchange type" not in str(error):
            raise Unusable(
                f"The exchange {queue_name(handler, options)!r}, which distributes the keys of {handler.name} to its queues, "
                f"exists with another type or other arguments ({describe(error)}). Delete it."
            ) from error
        raise Unusable(
            f"The handler {handler.name} has partitions={handler.partitions}, but this broker has no consistent-hash exchange. "
            f"Run `rabbitmq-plugins enable {_PLUGIN}` on every node, or set partitions=1."
        ) from error


def _consumers_of(connection: kombu.Connection, queue: str) -> int | None:
    """How many subscriptions a queue has; None if it does not exist."""
    try:
        with connection.channel() as channel:
            declared = kombu.Queue(queue)(channel).queue_declare(passive=True)
    except NotFound:
        return None
    return int(declared.consumer_count)


def why_left(connection: kombu.Connection, old: NameWithoutCode, options: InboxOptions) -> str:
    """A warning if a handler without code for a topic still has a queue of it from which no process receives; else ""."""
    known = registry.get(old.name)
    former = {(old.topic,), old.topics, (*old.topics, *(known.topics if known else ()))}
    for queue in {broker.queue_name(f"{options.group}.{old.name}", *{*topics}) for topics in former}:
        try:
            found = [_consumers_of(connection, name) for name in (queue, fit(f"{queue}.0"))]
        except AccessRefused:
            continue
        if 0 in found and not any(found):
            why = "which does not handle that topic any more" if known else "of which this process has no code"
            renamed = "" if known else f" If the handler was renamed, set renamed_from={old.name!r}."
            return (
                f"The queue {queue!r} collects a copy of every message of {old.topic} for the handler {old.name}, {why}, and "
                f"no process receives from it.{renamed} If neither another version nor another service has this handler, "
                "delete the queue on the broker."
            )
    return ""


def _is_partitioned(handler: Handler, options: InboxOptions) -> bool:
    return handler.partitions > 1 and speaks_amqp(options.broker_url)


def _topic_exchange(options: InboxOptions) -> kombu.Exchange:
    return kombu.Exchange(options.exchange, EXCHANGE_TYPE, durable=True)


def _hashing_exchange(handler: Handler, options: InboxOptions) -> kombu.Exchange:
    """Messages without a key in this header all go to one queue."""
    return kombu.Exchange(
        queue_name(handler, options), "x-consistent-hash", durable=True, arguments={"hash-header": ORDERING_KEY_HEADER}
    )
