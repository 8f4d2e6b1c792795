"""What a test asks of the inbox, and what it is shown instead."""

import uuid

import pytest

from inbox.testing import assert_duplicate, assert_handled, dead, deliver, handled, make_message

TOPIC = "tests.received"

pytestmark = pytest.mark.django_db


def fails(assertion):
    with pytest.raises(AssertionError) as raised:
        assertion()
    return str(raised.value)


@pytest.fixture
def reserve(handles):
    def reserve(message):
        if message.payload.get("bad"):
            raise ValueError("no")

    handles(reserve, topic=TOPIC, name="tests.reserve")
    return reserve


def receive(payload, **attributes):
    deliver(make_message(TOPIC, payload, **attributes), raise_errors=False)


class TestHandled:
    def test_messages_are_those_whose_effect_is_committed(self, reserve):
        receive({"order": "1"})
        receive({"order": "2", "bad": True})

        assert [message.payload for message in handled()] == [{"order": "1"}]
        assert dead() == []

    def test_topic_function_and_values_choose(self, reserve, handles):
        handles(lambda message: None, topic=TOPIC, name="tests.other")
        order = uuid.uuid4()
        receive({"order": order}, headers={"tenant": "acme"})

        assert len(handled(TOPIC)) == 2
        assert [message.handler for message in handled(reserve)] == ["tests.reserve"]
        assert len(handled(handler="tests.other", payload__order=order, headers__tenant="acme")) == 1
        assert handled("tests.nothing") == handled(payload__order="2") == []

    def test_unknown_name_and_function_are_refused(self, reserve):
        with pytest.raises(TypeError, match=r"paylod__order: a message has no 'paylod'\. Did you mean 'payload'"):
            handled(paylod__order="1")
        with pytest.raises(LookupError, match=r"is not a handler.*'tests\.reserve'"):
            handled(print)


class TestAssertHandled:
    def test_first_of_the_messages_is_given(self, reserve):
        receive({"order": "1"}, biz_id="order-1")
        receive({"order": "2"})

        assert assert_handled(TOPIC, count=2).biz_id == "order-1"
        assert assert_handled(reserve, payload__order="2").attempts == 1

    def test_failure_shows_what_is_in_the_inbox(self, reserve):
        receive({"order": "2"})
        receive({"order": "1", "bad": True}, biz_id="order-1")

        said = fails(lambda: assert_handled(TOPIC, payload__order="1"))

        assert said == (
            "No message was handled on the topic 'tests.received' with payload__order='1' on 'default', 1 expected.\n"
            "In the inbox:\n"
            "  tests.reserve tests.received done payload={'order': '2'}\n"
            "      payload__order: '2', expected '1'\n"
            "  tests.reserve tests.received retrying biz_id='order-1' last_error='ValueError: no' "
            "payload={'order': '1', 'bad': True}\n"
            "      state: 'retrying', expected 'done'"
        )

    def test_too_many_and_none_are_a_failure_and_no_count(self, reserve):
        assert fails(lambda: assert_handled(reserve)) == (
            "No message was handled by tests.reserve on 'default', 1 expected.\nThe inbox is empty."
        )
        receive({"order": "1"})
        receive({"order": "1"})

        assert fails(lambda: assert_handled(TOPIC)).startswith("2 messages were handled on the topic 'tests.received' on")
        with pytest.raises(ValueError, match=r"assert that handled\(\) is empty"):
            assert_handled(TOPIC, count=0)
        with pytest.raises(ValueError, match="count is 0"):
            assert_duplicate(TOPIC, count=0)


class TestAssertDuplicate:
    def test_number_of_duplicates_is_exact(self, reserve):
        deliver(make_message(TOPIC, {"order": "1"}), times=3)

        assert assert_duplicate(TOPIC, count=2, payload__order="1").handler == "tests.reserve"
        said = fails(lambda: assert_duplicate(TOPIC))
        assert said.startswith("2 duplicates were suppressed on the topic 'tests.received' on 'default', 1 expected.")
        assert said.endswith("duplicates: 2, expected 1")

    def test_one_message_is_meant(self, reserve):
        assert fails(lambda: assert_duplicate(TOPIC)).startswith("No message was received on the topic 'tests.received'")
        receive({"order": "1"})
        assert fails(lambda: assert_duplicate(reserve)).startswith("No duplicate was suppressed by tests.reserve on 'default'")
        receive({"order": "2"})
        assert fails(lambda: assert_duplicate(TOPIC)).startswith("2 messages were received on the topic 'tests.received'")


@pytest.mark.django_db(databases=["default", "other"])
def test_another_database_has_messages_of_its_own(handles):
    handles(lambda message: None, topic=TOPIC, using="other")
    receive({"order": "1"})

    assert assert_handled(TOPIC, using="other").payload == {"order": "1"}
    assert handled(TOPIC) == []
