"""Registering functions as callbacks."""

import pytest

from outbox.callbacks import on_dead, on_published, registry

TOPIC = "shop.order.placed"


@pytest.fixture(autouse=True)
def of_this_test():
    before = set(registry.names)
    yield
    for name in set(registry.names) - before:
        registry.remove(name)


def tell(message):
    pass


def tell_otherwise(message):
    pass


def test_a_name_belongs_to_one_function():
    on_published(TOPIC, name="tests.taken")(tell)
    on_published("another", name="tests.taken")(tell)

    with pytest.raises(ValueError, match=r"Two callbacks are called 'tests\.taken'"):
        on_dead("another", name="tests.taken")(tell_otherwise)


def test_one_function_may_be_told_of_several_things():
    on_dead("a")(on_published("b")(tell))

    assert {(topic, event) for topic, event, name in registry if name.endswith(".tell")} == {("a", "dead"), ("b", "published")}


@pytest.mark.parametrize("topic", ["", "orders.*", "x" * 300])
def test_a_topic_that_cannot_be_is_refused(topic):
    with pytest.raises(ValueError, match="cannot have callbacks"):
        on_published(topic)


@pytest.mark.parametrize("name", ["a\nb", "x" * 300])
def test_a_name_that_cannot_be_is_refused(name):
    with pytest.raises(ValueError, match="cannot be a callback's"):
        on_published(TOPIC, name=name)(tell)


def test_a_function_that_would_not_run_is_refused():
    def generating(message):
        yield message

    with pytest.raises(TypeError, match="generator function"):
        on_published(TOPIC)(generating)
