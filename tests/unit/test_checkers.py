"""Who is asked about prepared messages: one checker a topic, which gives an answer and nothing else."""

from __future__ import annotations

import uuid

import pytest

from outbox import Answer, HalfMessage, checker
from outbox.checkers import checkers
from outbox.kernel.clock import utcnow

TOPIC = "checkers.topic"


@pytest.fixture(autouse=True)
def forgotten():
    yield
    checkers.remove(TOPIC)


def a_message():
    return HalfMessage(id=uuid.uuid4(), topic=TOPIC, biz_id="b", key="", payload={}, headers={}, created_at=utcnow(), checks=0)


def certain(message):
    return Answer.COMMIT


def doubtful(message):
    return Answer.UNKNOWN


def test_a_function_stays_what_it_was_and_may_be_registered_again():
    assert checker(TOPIC)(certain) is checker(TOPIC)(certain) is certain
    assert checkers.ask(a_message()) is Answer.COMMIT


def test_a_second_checker_names_both():
    checker(TOPIC)(certain)

    with pytest.raises(ValueError, match=rf"'{TOPIC}': .*test_checkers\.certain and .*test_checkers\.doubtful"):
        checker(TOPIC)(doubtful)


def test_an_async_function_is_run_to_its_end():
    @checker(TOPIC)
    async def ask(message):
        return Answer.ROLLBACK

    assert checkers.ask(a_message()) is Answer.ROLLBACK


@pytest.mark.parametrize("answer", ["commit", True, None, Answer])
def test_what_is_no_answer_is_refused(answer):
    checker(TOPIC)(lambda message: answer)

    with pytest.raises(TypeError, match=r"Answer\.UNKNOWN"):
        checkers.ask(a_message())


def test_what_cannot_be_asked_is_refused():
    def asking(message):
        yield Answer.UNKNOWN

    with pytest.raises(TypeError, match="generator"):
        checker(TOPIC)(asking)
    with pytest.raises(ValueError, match="wildcard"):
        checker("bank.*")
