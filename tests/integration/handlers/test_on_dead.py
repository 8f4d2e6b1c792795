"""`on_dead`: a function that is called once for each death of a message of its handler, whatever the message has died of."""

from datetime import timedelta

import pytest
from django.db import connection

from exactly_once.process.clock import utcnow
from inbox import Reject, Retry, result
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import State
from inbox.store import claims
from tests.support import decisions
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import (
    OPTIONS,
    an_envelope,
    deliver,
    drain,
    handed_over,
    make_due,
    options,
    stored_due,
    the_effect,
)
from tests.support.loads import receive_together

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]

SHOWN = ("id", "topic", "biz_id", "key", "payload", "headers", "correlation_id")


class Reported:
    """An `on_dead` function that keeps its arguments."""

    def __init__(self):
        self.messages = []

    def __call__(self, message):
        Effect.objects.create(name="reported", detail=message.error.error[:200])
        self.messages.append(message)


@pytest.fixture
def reported():
    return Reported()


@pytest.fixture
def dying(handles, reported):
    """Register a function as a handler whose dead letters are reported."""

    def register(function, **arguments):
        return handles(function, name="tests.dying", on_dead=reported, **arguments)

    return register


def fails(message):
    raise ValueError("no stock")


def rejects(message):
    raise Reject("sold out")


def commits_by_itself(message):
    the_effect(message)
    connection.connection.commit()


def run_out(handler):
    """A message that fails until its attempts are used up."""
    deliver(handler, message := an_envelope(headers={"tenant": "acme"}, key="customer-1"))
    while make_due():
        drain()
    return message


def rejected(handler):
    deliver(handler, message := an_envelope())
    return message


def rejected_by_a_runner(handler):
    return handed_over(handler)


def refused(handler, **attributes):
    deliver(handler, message := an_envelope(**attributes))
    return message


def killed_in_each_attempt(handler):
    message = stored_due(handler)
    for _ in range(OPTIONS.MAX_ATTEMPTS + 1):
        claims.claim_due("default", [handler.name], OPTIONS.REDELIVERY_AFTER)
        make_due()
    return message


def together(handler):
    receive_together(handler, [first := an_envelope(), an_envelope({"good": True})])
    return first


def fails_unless_good(message):
    if "good" not in message.payload:
        fails(message)


ONE = Retry(max_attempts=1)
WAYS = {
    "attempts exhausted": (fails, {}, run_out, "ValueError: no stock", 3),
    "rejected": (rejects, {}, rejected, "rejected: sold out", 1),
    "rejected, and stored before": (rejects, {}, rejected_by_a_runner, "rejected: sold out", 1),
    "ordered": (fails, {"ordered": True, "retry": ONE}, rejected_by_a_runner, "ValueError: no stock", 1),
    "too old": (the_effect, {}, lambda handler: refused(handler, created_at=utcnow() - timedelta(days=400)), "old, past", 0),
    "not JSON": (the_effect, {}, lambda handler: refused(handler, body=b"not JSON"), "is not JSON", 0),
    "without an id": (the_effect, {}, lambda handler: refused(handler, id="", biz_id=""), "It has no identity", 0),
    "killed in each attempt": (the_effect, {}, killed_in_each_attempt, "Its attempts never ended", 4),
    "in a batch": (lambda messages: [*map(fails_unless_good, messages)], {"size": 10, "retry": ONE}, together, "no stock", 1),
    "in a group commit": (fails_unless_good, {"group_commit": 10, "retry": ONE}, together, "no stock", 1),
    "under a lease": (rejects, {"lease": None}, rejected, "rejected: sold out", 1),
    "committed by itself": (commits_by_itself, {}, rejected, "The handler committed by itself", 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_function_gets_each_dead_letter_once_whatever_it_has_died_of(dying, reported, way):
    function, arguments, die, error, attempts = WAYS[way]
    handler = dying(function, **arguments)
    message = die(handler)
    drain()
    drain()
    (dead,) = InboxMessage.objects.filter(handler=handler.name, state=State.DEAD)

    (about,) = reported.messages
    assert (about.id, about.topic, about.key, about.headers) == (message.id, message.topic, message.key, dict(message.headers))
    assert about.biz_id == ("" if way == "without an id" else message.biz_id)
    assert about.payload == (b"not JSON" if way == "not JSON" else {"order_id": 1})
    assert error in about.error.error
    assert (about.error.attempt, about.error.at) == (attempts, dead.failed_at)
    assert Effect.objects.filter(name="reported").count() == 1


def test_death_is_reported_under_a_lease_in_redis(dying, reported, redis_url):
    given = options(LEASE_STORE=redis_url)
    deliver(dying(rejects, lease=None), message := an_envelope(), given=given)
    drain(given)

    assert [about.id for about in reported.messages] == [message.id]


def test_function_that_fails_is_retried_and_then_a_dead_letter_of_its_own(handles):
    def fails_first(message):
        the_effect(message)
        if message.attempt == 1:
            raise ValueError("not yet")

    handler = handles(rejects, name="tests.dying", on_dead=fails_first)
    message = rejected(handler)
    drain()
    about = result(message.id, handler="tests.dying.on_dead")
    make_due()
    drain()

    assert (about.state, about.last_error) == (State.RETRYING, "ValueError: not yet")
    assert result(message.id, handler="tests.dying.on_dead").state is State.DONE
    assert [*Effect.objects.values_list("name", "detail")] == [(message.biz_id, "2")]
    assert result(message.id).handler == handler.name


def test_message_that_an_operator_retries_is_reported_again_when_it_dies_again(dying, reported):
    handler = dying(rejects)
    rejected(handler)
    drain()
    assert decisions.retry("default", InboxMessage.objects.get(handler=handler.name).pk)
    drain()
    drain()

    assert len(reported.messages) == 2


def test_dead_letter_of_a_message_is_stored_in_the_transaction_in_which_it_dies(dying, reported):
    handler = dying(rejects)
    rejected(handler)

    dead, about = InboxMessage.objects.order_by("pk")
    assert (dead.state, about.state, about.handler) == (State.DEAD, State.RECEIVED, "tests.dying.on_dead")
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(DISTINCT xmin::text) FROM inbox_inboxmessage")
            assert cursor.fetchone() == (1,)


def test_handler_without_on_dead_stores_nothing_for_its_dead_letters(dying, handles):
    dying(rejects)
    rejected(handles(rejects))

    assert InboxMessage.objects.count() == 1


def test_function_belongs_to_its_handler_and_has_no_queue(dying):
    handler = dying(rejects)

    assert sorted(one.name for one in registry.selected(handler.name)) == [handler.name, f"{handler.name}.on_dead"]
    assert registry.for_topic(handler.topics[0]) == [handler]
    registry.remove(handler.name)
    assert registry.all() == []


@pytest.mark.parametrize("function", [lambda: None, "not a function"])
def test_function_that_takes_no_message_is_refused(handles, function):
    with pytest.raises((TypeError, ValueError), match=r"parameters|on_dead is"):
        handles(rejects, on_dead=function)
