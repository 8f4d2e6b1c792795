"""What the handler decorator accepts and refuses, and how a handler is named."""

import functools
from dataclasses import replace

import pytest

from inbox.consumer.topology import queue_name
from inbox.errors import NotCallable
from inbox.handlers.decorator import batch_handler, idempotent_handler, leased_handler
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.testing import make_message
from tests.support.workers import broker_options

pytestmark = pytest.mark.usefixtures("own_handlers")

MESSAGE = make_message("t", {"order_id": 7}, biz_id="b")


def handle(message):
    """A handler of a module that belongs to no app."""


@functools.wraps(lambda: None)
def wrapped(*given):
    """It hides the message from the function that it wraps."""


def a_handler(function=handle, **changes):
    return Handler(**{"name": "n", "topics": ("t",), "function": function, "biz_id": None, "using": "default", **changes})


class TestDecorating:
    def test_a_handler_outside_of_apps_is_named_by_module_and_function(self):
        idempotent_handler("t")(handle)

        assert registry.get(f"{__name__}.handle").topics == ("t",)

    def test_a_handler_inside_an_app_is_named_by_app_label_and_function(self):
        def reserve_stock(message):
            pass

        reserve_stock.__module__ = "tests.support.apps.effects.handlers"
        idempotent_handler("t")(reserve_stock)

        assert registry.get("testapp.reserve_stock").topics == ("t",)

    @pytest.mark.parametrize("topic", ["", "shop.*", "#", "a.#.b", "x" * 256, "nul\x00"])
    def test_an_invalid_topic_is_refused(self, topic):
        with pytest.raises(ValueError, match="cannot be handled"):
            idempotent_handler(topic)

    @pytest.mark.parametrize(
        ("decorator", "function", "arguments"),
        [
            (idempotent_handler, lambda: None, "message"),
            (leased_handler, lambda *, message: None, "message"),
            (batch_handler, lambda first, second: None, "messages"),
        ],
    )
    def test_a_function_that_does_not_accept_its_argument_is_refused_with_the_remedy(self, decorator, function, arguments):
        with pytest.raises(
            NotCallable, match=rf"<lambda> \(line \d+\) has the parameters .* calls it with \({arguments}\): declare"
        ):
            decorator("t")(function)

    @pytest.mark.parametrize(
        "function", [lambda *args: None, lambda message, more=1: None, lambda message=None, **more: None, wrapped]
    )
    def test_a_function_that_accepts_further_arguments_is_registered(self, function):
        assert idempotent_handler("t", name="n")(function) is function

    def test_a_misspelt_option_is_refused_with_the_closest_one(self):
        with pytest.raises(TypeError, match=r"idempotent_handler\(\) has no argument 'retires'. Did you mean 'retry'\?"):
            idempotent_handler("t", retires=3)

    def test_a_second_function_of_the_same_name_does_not_replace_the_first(self):
        def handle(message):
            pass

        first = idempotent_handler("t", name="n")(handle)

        with pytest.raises(ValueError, match=r"handle \(line \d+\) on t .*handle \(line \d+\) on t.*name="):

            @idempotent_handler("t", name="n")
            def handle(message):
                pass

        assert registry.get("n").function is first

    def test_registering_the_same_function_again_keeps_one_handler(self):
        idempotent_handler("t", name="n")(handle)
        idempotent_handler("t", name="n")(handle)

        assert [handler.name for handler in registry.for_topic("t")] == ["n"]

    def test_one_function_for_two_topics_needs_two_names(self):
        """Otherwise the second would silently replace the first, and no handler would get the messages of its topic."""
        with pytest.raises(ValueError, match=r"name=.*or give all topics to one decorator"):

            @idempotent_handler("a")
            @idempotent_handler("b")
            def handle_both(message):
                pass

    @pytest.mark.parametrize("decorator", [idempotent_handler, batch_handler, leased_handler])
    def test_a_handler_of_several_topics_gets_the_messages_of_each(self, decorator):
        decorator("a", "b", name="n")(handle)

        assert [[handler.name for handler in registry.for_topic(topic)] for topic in "abc"] == [["n"], ["n"], []]
        assert registry.topics_of("n") == ("a", "b")

    def test_a_handler_without_a_topic_is_refused(self):
        with pytest.raises(ValueError, match="needs at least one"):
            idempotent_handler(name="n")

    def test_a_topic_given_twice_is_refused(self):
        with pytest.raises(ValueError, match=r"\['a', 'b', 'a'\]: .*each may be given once"):
            idempotent_handler("a", "b", "a", name="n")

    def test_a_decorator_without_parentheses_is_refused_with_the_remedy(self):
        with pytest.raises(TypeError, match=r"The function handle\(\) is not the name of a topic: write it in parentheses"):
            idempotent_handler(handle)

    def test_the_queue_of_several_topics_does_not_depend_on_their_order(self):
        both = [queue_name(a_handler(topics=topics), broker_options("amqp://")) for topics in (("a", "b"), ("b", "a"))]

        assert both == ["tests.n@a+b"] * 2

    def test_one_function_may_handle_two_topics_under_two_names(self):
        idempotent_handler("a", name="of a")(idempotent_handler("b", name="of b")(handle))

        assert [registry.get(name).topics for name in ("of a", "of b")] == [("a",), ("b",)]


class TestCalling:
    def test_a_partial_of_an_async_function_is_run_to_completion(self):
        seen = []

        async def handle(extra, message):
            seen.append((extra, message))

        idempotent_handler("t", name="n")(functools.partial(handle, 1))
        registry.get("n").call(MESSAGE)

        assert seen == [(1, MESSAGE)]


class TestIdentifying:
    def test_the_biz_id_function_of_the_handler_takes_precedence(self):
        assert a_handler(biz_id=lambda message: message.payload["order_id"]).identify(MESSAGE) == "7"


class TestQueueNames:
    def test_a_queue_name_too_long_for_the_broker_is_hashed_and_not_truncated(self):
        first, second = (
            queue_name(a_handler(name="n" * 200, topics=("t" * 200 + end,)), broker_options("amqp://")) for end in "ab"
        )

        assert first != second
        assert len(first) <= 255


class TestBizIdPath:
    """The business key as the path of a payload's field."""

    @staticmethod
    def identify(path, payload):
        idempotent_handler("t", biz_id=path, name="by a field")(handle)
        return registry.get("by a field").identify(replace(MESSAGE, payload=payload))

    @pytest.mark.parametrize(("path", "payload"), [("order_id", {"order_id": 17}), ("order.id", {"order": {"id": 17}})])
    def test_a_field_path_selects_the_biz_id_from_the_payload(self, path, payload):
        assert self.identify(path, payload) == "17"

    @pytest.mark.parametrize("payload", [{}, {"order": None}, {"order": {"other": 1}}, [1], "text", None])
    def test_a_field_path_that_the_payload_does_not_have_is_an_error(self, payload):
        with pytest.raises(LookupError, match=r"no field 'order\.id'"):
            self.identify("order.id", payload)

    def test_biz_id_must_be_a_path_or_a_function(self):
        with pytest.raises(TypeError, match="biz_id is 17"):
            idempotent_handler("t", biz_id=17, name="by a number")(handle)
