"""Checkers of prepared messages: one per topic, which returns an `Answer` and nothing else."""

import uuid

import pytest

from exactly_once.process.clock import utcnow
from outbox import Answer, UndecidedMessage, checker
from outbox.callbacks import checkers

TOPIC = "checkers.topic"


@pytest.fixture(autouse=True)
def remove_checker():
    yield
    checkers.remove(TOPIC)


def a_message():
    return UndecidedMessage(
        id=uuid.uuid4(), topic=TOPIC, biz_id="b", key="", payload={}, headers={}, created_at=utcnow(), checks=0
    )


def certain(message):
    return Answer.COMMIT


def doubtful(message):
    return Answer.UNKNOWN


def test_the_decorator_returns_the_function_itself_and_may_be_applied_twice():
    assert checker(TOPIC)(certain) is checker(TOPIC)(certain) is certain
    assert checkers.ask(a_message()) is Answer.COMMIT


def test_a_second_checker_for_a_topic_is_refused_and_the_error_names_both():
    checker(TOPIC)(certain)

    with pytest.raises(ValueError, match=rf"'{TOPIC}': .*test_checkers\.certain \(line \d+\) and .*test_checkers\.doubtful"):
        checker(TOPIC)(doubtful)


def test_an_async_checker_is_run_to_completion():
    @checker(TOPIC)
    async def ask(message):
        return Answer.ROLLBACK

    assert checkers.ask(a_message()) is Answer.ROLLBACK


@pytest.mark.parametrize("answer", ["commit", True, None, Answer])
def test_a_return_value_that_is_not_an_answer_is_refused(answer):
    checker(TOPIC)(lambda message: answer)

    with pytest.raises(TypeError, match=r"Answer\.UNKNOWN"):
        checkers.ask(a_message())


def test_a_generator_function_and_a_wildcard_topic_are_refused():
    def asking(message):
        yield Answer.UNKNOWN

    with pytest.raises(TypeError, match="generator"):
        checker(TOPIC)(asking)
    with pytest.raises(ValueError, match="wildcard"):
        checker("bank.*")
