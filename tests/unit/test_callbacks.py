"""Functions are registered as callbacks, or refused with the reason."""

import pytest

from outbox.callbacks import on_dead, on_published, registry

TOPIC = "shop.order.placed"


@pytest.fixture(autouse=True)
def remove_new_callbacks():
    before = set(registry.names)
    yield
    for name in set(registry.names) - before:
        registry.remove(name)


def callback(message):
    pass


def other_callback(message):
    pass


def test_two_functions_cannot_share_a_callback_name():
    on_published(TOPIC, name="tests.taken")(callback)
    on_published("another", name="tests.taken")(callback)

    with pytest.raises(ValueError, match=r"Two callbacks are called 'tests\.taken'"):
        on_dead("another", name="tests.taken")(other_callback)


def test_one_function_may_be_registered_for_several_topics_and_events():
    on_dead("a")(on_published("b")(callback))

    assert {(topic, event) for topic, event, name in registry if name.endswith(".callback")} == {
        ("a", "dead"),
        ("b", "published"),
    }


@pytest.mark.parametrize("topic", ["", "orders.*", "x" * 300])
def test_an_invalid_topic_is_refused(topic):
    with pytest.raises(ValueError, match="cannot have callbacks"):
        on_published(topic)


@pytest.mark.parametrize("name", ["a\nb", "x" * 300])
def test_an_invalid_callback_name_is_refused(name):
    with pytest.raises(ValueError, match="is not valid for a callback"):
        on_published(TOPIC, name=name)(callback)


def test_a_generator_function_is_refused_as_a_callback():
    def generating(message):
        yield message

    with pytest.raises(TypeError, match="generator function"):
        on_published(TOPIC)(generating)
