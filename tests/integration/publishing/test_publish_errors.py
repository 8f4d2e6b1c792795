"""Arguments of publish() are stored as given, or refused without a row."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox import Draft, InvalidMessage, PayloadTooLarge, PublishedOutsideTransaction, cancel, prepare, publish, publish_many
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.relaying import TOPIC, published, row_of

pytestmark = pytest.mark.django_db


def test_misspelt_argument_is_refused_with_the_name_of_the_function_and_a_suggestion():
    with pytest.raises(TypeError, match=r"^prepare\(\) has no argument 'bizid'. Did you mean 'biz_id'\?$"):
        prepare(TOPIC, {}, bizid="order-1")
    with transaction.atomic():
        with pytest.raises(TypeError, match=r"^publish\(\) has no argument 'bizid'. Did you mean 'biz_id'\?$"):
            publish(TOPIC, {}, bizid="order-1")
        with pytest.raises(TypeError):
            publish(TOPIC, {}, "order-17")
        with pytest.raises(InvalidMessage, match="unique is True and there is no biz_id"):
            publish(TOPIC, {}, unique=True)


def test_publish_many_names_the_draft_that_is_invalid_and_writes_none():
    drafts = [Draft(TOPIC, {}, biz_id="order-1"), Draft(TOPIC, {}, biz_id="order-2", priority=10)]
    with transaction.atomic(), pytest.raises(InvalidMessage) as refused:
        publish_many(drafts)

    assert str(refused.value) == "drafts[1] (biz_id='order-2'): priority is 10: it must be a whole number from 0 to 9."
    assert not OutboxMessage.objects.exists()

    with transaction.atomic(), pytest.raises(PayloadTooLarge, match=r"^drafts\[0\] \(biz_id=None\): The payload for topic"):
        publish_many([Draft(TOPIC, "x" * 2_000_000), *drafts])


@pytest.mark.django_db(databases=["default", "other"])
def test_messages_are_written_where_the_database_routers_say_unless_the_caller_names_a_database(settings):
    settings.DATABASE_ROUTERS = [ToOther()]

    with transaction.atomic(using="other"):
        message = publish(TOPIC, {}, biz_id="order-1")
    with transaction.atomic():
        publish(TOPIC, {}, biz_id="order-2", using="default")
        with pytest.raises(PublishedOutsideTransaction, match="other"):
            publish(TOPIC, {})
    assert cancel(message.id)
    assert not cancel(topic=TOPIC, biz_id="order-2")

    assert [row.state for row in OutboxMessage.objects.using("other")] == [State.CANCELLED]
    assert [row.state for row in OutboxMessage.objects.using("default")] == [State.READY]


class ToOther:
    def db_for_write(self, model, **hints):
        return "other" if model is OutboxMessage else None


@pytest.mark.every_database
@pytest.mark.parametrize(
    ("arguments", "stored"),
    [
        *(
            (arguments, arguments)
            for arguments in (
                {"topic": "x" * 255},
                {"topic": "käse.🍰"},
                {"topic": "c#.5*"},
                {"biz_id": "b" * 255, "key": "k" * 255},
                {"biz_id": "ä" * 127},
                {"priority": 9},
                {"deliver_at": datetime(1999, 1, 1, tzinfo=UTC)},
                {"headers": {"tenant": "x" * 16_000}},
                {"headers": {}},
            )
        ),
        ({"delay": timedelta()}, {"state": State.READY, "deliver_at": None}),
        ({"delay": timedelta(days=3650), "expires_in": timedelta(days=3650)}, {"state": State.SCHEDULED}),
        ({"headers": None}, {"headers": {}}),
    ],
)
def test_values_at_their_limits_are_stored(arguments, stored):
    row = row_of(published(**{"topic": TOPIC, **arguments}))

    assert {name: getattr(row, name) for name in stored} == stored


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3) | st.tuples(inner),
    max_leaves=8,
)
texts = st.text(st.characters(exclude_categories=["C"]), max_size=5)
names = st.text("äbc🍰", min_size=1, max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def assert_stored(message, payload, headers, topic, key):
    row = row_of(message)
    assert (row.topic, row.key) == (topic, key)
    assert row.headers == {name: value for name, value in (headers or {}).items() if name != "traceparent"}
    assert json.loads(bytes(row.body)) == json.loads(json.dumps(payload)), "tuples become lists, nothing else changes"


@pytest.mark.long
@pytest.mark.every_database
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=anything, headers=anything, topic=st.text(max_size=5), key=st.text(max_size=5) | anything)
def test_any_arguments_are_either_stored_as_given_or_refused_as_invalid(payload, headers, topic, key):
    before = OutboxMessage.objects.count()
    with transaction.atomic():
        try:
            message = publish(topic, payload, headers=headers, key=key)
        except InvalidMessage:
            assert OutboxMessage.objects.count() == before
            return
    assert_stored(message, payload, headers, topic, key)


@pytest.mark.every_database
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    payload=json_values,
    headers=st.none() | st.dictionaries(names, texts | st.booleans(), max_size=3),
    topic=names,
    key=texts.filter(lambda text: not text or text.strip()),
)
def test_any_valid_arguments_are_stored_as_given(payload, headers, topic, key):
    with transaction.atomic():
        message = publish(topic, payload, headers=headers, key=key)

    assert_stored(message, payload, headers, topic, key)
