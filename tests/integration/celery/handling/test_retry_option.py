"""The `Retry` of a task: what Celery makes of it, and what is refused because Celery cannot."""

from datetime import timedelta

import pytest
from celery import Task

from inbox import Backoff, Reject, Retry
from inbox.celery import idempotent_task
from inbox.states import State
from tests.integration.celery.handling.tracing import deliver
from tests.support.deliveries import the_row

pytestmark = pytest.mark.django_db

MINUTES = Backoff(base=timedelta(minutes=1), cap=timedelta(minutes=10))


def fail(order_id):
    raise ValueError("no")


class OfKeyErrors(Task):
    autoretry_for = (KeyError,)
    max_retries = 50


class TestMapping:
    @pytest.mark.parametrize(
        ("retry", "options", "expected"),
        [
            (
                Retry(max_attempts=5, backoff=MINUTES),
                {},
                {
                    "max_retries": 4,
                    "autoretry_for": (Exception,),
                    "dont_autoretry_for": (Reject,),
                    "retry_backoff": 60,
                    "retry_backoff_max": 600,
                    "default_retry_delay": 60,
                },
            ),
            (Retry(), {}, {"max_retries": 8, "retry_backoff": 20, "retry_backoff_max": 300}),
            (
                Retry(backoff=Backoff(base=timedelta(milliseconds=300), cap=timedelta(seconds=2.5))),
                {},
                {"retry_backoff": 1, "retry_backoff_max": 3},
            ),
            (
                Retry(backoff=Backoff(base=timedelta(seconds=7), factor=1)),
                {},
                {"retry_backoff": False, "default_retry_delay": 7},
            ),
            (
                Retry(max_attempts=2, dead_on=[TypeError]),
                {"autoretry_for": [KeyError], "dont_autoretry_for": [ValueError]},
                {"max_retries": 1, "autoretry_for": [KeyError], "dont_autoretry_for": (ValueError, TypeError)},
            ),
            (Retry(max_attempts=2), {"base": OfKeyErrors}, {"max_retries": 1, "autoretry_for": (KeyError,)}),
            (None, {}, {"max_retries": 3}),
        ],
        ids=["all", "of the settings", "whole seconds", "without growth", "errors of the task", "errors of its base", "none"],
    )
    def test_retry_becomes_the_options_of_celery(self, decorated, settings, retry, options, expected):
        settings.INBOX = {"MAX_ATTEMPTS": 9, "BACKOFF": (timedelta(seconds=20), timedelta(minutes=5))}

        task = decorated(fail, **options, **({} if retry is None else {"retry": retry}))

        assert {name: getattr(task, name) for name in expected} == expected


class TestRunning:
    def test_task_that_kills_its_worker_is_dead_after_the_attempts_of_its_retry(self, decorated):
        begun = []

        def kill(order_id):
            begun.append(order_id)
            raise SystemExit

        task = decorated(kill, biz_id="order_id", retry=Retry(max_attempts=1))
        with pytest.raises(SystemExit):
            deliver(task, "o-1", task_id="t-1", redelivered=True)

        deliver(task, "o-1", task_id="t-1", redelivered=True)

        assert (the_row().state, len(begun)) == (State.DEAD, 1)


class TestRefused:
    def test_policies_of_exceptions_are_refused_with_what_to_do(self):
        with pytest.raises(
            ValueError, match=r"tests\.refused has a retry with retry_on, .*remove retry_on, or call self\.retry"
        ):
            idempotent_task(name="tests.refused", retry=Retry(retry_on={KeyError: Retry()}))(fail)

    @pytest.mark.parametrize("factor", [1.5, 2.5, 3])
    def test_factor_that_celery_cannot_keep_is_refused_with_what_to_do(self, factor):
        with pytest.raises(ValueError, match=rf"tests\.refused .*factor {factor}: .*Set the factor to 2 or 1, or remove it"):
            idempotent_task(name="tests.refused", retry=Retry(backoff=Backoff(factor=factor)))(fail)

    @pytest.mark.parametrize(
        "option", ["max_retries", "retry_backoff", "retry_backoff_max", "retry_kwargs", "default_retry_delay"]
    )
    def test_option_of_celery_that_says_the_same_is_refused(self, option):
        with pytest.raises(ValueError, match=rf"tests\.refused has both retry= and {option}, .*remove one of them"):
            idempotent_task(name="tests.refused", retry=Retry(), **{option: 3})(fail)

    @pytest.mark.parametrize("retry", [5, True, {"max_attempts": 5}], ids=repr)
    def test_value_that_is_not_a_retry_is_refused_with_the_right_form(self, retry):
        with pytest.raises(TypeError, match=r"^retry is .*such as Retry\(max_attempts=5\)"):
            idempotent_task(name="tests.refused", retry=retry)(fail)
