"""`INBOX["AROUND"]`: context managers around each call of a handler, in every way of running it."""

import pytest
from django.test import override_settings

from inbox import Lease, Retry
from inbox.states import Outcome, State
from tests.support import arounds
from tests.support.deliveries import TOPIC, an_envelope, deliver, drain, effects, make_due, the_effect, the_row
from tests.support.loads import receive_together

pytestmark = pytest.mark.django_db(transaction=True)

KINDS = {"single": {}, "ordered": {"ordered": True}, "group_commit": {"group_commit": 5}, "lease": {"lease": Lease()}}


@pytest.fixture(autouse=True)
def called():
    arounds.called.clear()
    return arounds.called


def around(*names):
    return override_settings(INBOX={"AROUND": [f"tests.support.arounds.{name}" for name in names]})


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_handler_is_called_within_the_context_of_its_message(handles, called, kind):
    def handle(message):
        the_effect(message)
        called.append(("handler", arounds.TENANT.get()))

    with around("tenant_of", "inner"):
        receive_together(handles(handle, **kind), [an_envelope(headers={"tenant": "acme"}, key="k")])
        drain()

    inside = "lease" not in kind
    assert called == [("enter", TOPIC, inside), ("inner", "acme"), ("handler", "acme"), ("leave", TOPIC)]
    assert effects() == 1


def test_an_async_handler_sees_the_context(handles, called):
    async def handle(message):
        called.append(("handler", arounds.TENANT.get()))

    with around("tenant_of"):
        assert deliver(handles(handle), an_envelope(headers={"tenant": "acme"})) is Outcome.HANDLED

    assert ("handler", "acme") in called


def test_a_batch_enters_the_context_of_each_message_once_around_its_only_call(handles, called):
    with around("tenant_of"):
        handler = handles(lambda messages: called.append(("handler", len(messages))), size=5)
        receive_together(handler, [an_envelope() for _ in range(3)])

    assert called == [*[("enter", TOPIC, True)] * 3, ("handler", 3), *[("leave", TOPIC)] * 3]


@pytest.mark.parametrize("name", ["failing", "failing_at_its_end"])
def test_an_exception_of_a_context_counts_as_one_of_the_handler(handles, name):
    with around(name):
        assert deliver(handles(the_effect, retry=Retry(max_attempts=2))) is Outcome.STORED
        assert (the_row().state, effects()) == (State.RETRYING, 0)
        assert the_row().last_error.startswith("LookupError: ")

        make_due()
        drain()

    assert (the_row().state, the_row().attempts, effects()) == (State.DEAD, 2, 0)


def test_a_context_sees_the_exception_of_the_handler_and_cannot_suppress_it(handles, called):
    def handle(message):
        the_effect(message)
        raise ValueError("no")

    with around("suppressing", "tenant_of"):
        assert deliver(handles(handle)) is Outcome.STORED

    assert (the_row().state, the_row().last_error, effects()) == (State.RETRYING, "ValueError: no", 0)
    assert ("failed", ValueError) in called


def test_a_function_that_returns_no_context_manager_is_named(handles):
    with around("no_manager"):
        assert deliver(handles(the_effect)) is Outcome.STORED

    assert "tests.support.arounds.no_manager returned" in the_row().last_error
    assert "Decorate it with @contextlib.contextmanager" in the_row().last_error
