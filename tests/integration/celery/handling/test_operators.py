"""An operator's retry of a row of a task: Celery runs tasks, so it is sent again."""

import json

import pytest
from celery.exceptions import Ignore, Reject
from django.core.management import CommandError, call_command
from django.db import connections

from inbox.errors import NotEditable, TaskNotSent
from inbox.operators.editing import replace_message
from inbox.states import State
from inbox.store import claims, due
from tests.integration.celery.handling.tracing import deliver
from tests.support import decisions
from tests.support.admin_pages import act, said, superuser_client
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import OPTIONS, an_envelope, effects, fails, the_effect, the_row
from tests.support.deliveries import deliver as deliver_message
from tests.support.inbox_rows import store_message

pytestmark = pytest.mark.django_db

HANDLER = "celery.tests.task"


@pytest.fixture(autouse=True)
def _current(current, local_app):
    current(local_app)


@pytest.fixture
def dead_letter(a_task):
    """Make a dead letter of a task that killed its worker's process each time: `dead_letter()` is its row."""

    def die(order_id, *more, how="badly"):
        raise SystemExit(13)

    task = a_task(die, biz_id="order_id")

    def make(**request):
        for _ in range(3):
            with pytest.raises(SystemExit):
                deliver(task, "o-1", 2, kwargs={"how": "well"}, task_id="t-1", redelivered=True, **request)
        deliver(task, "o-1", 2, kwargs={"how": "well"}, task_id="t-1", redelivered=True, **request)
        assert the_row().state == State.DEAD
        return the_row()

    return make


@pytest.fixture
def answers():
    """What the admin says after an action on a row."""
    operator = superuser_client()

    def do(action, row):
        return [words for _, words in said(act(operator, action, row, page="admin:inbox_inboxmessage_changelist"))]

    return do


@pytest.mark.every_database
def test_retry_sends_the_task_with_its_arguments_headers_and_chain(dead_letter, sent, a_task):
    follow = a_task(the_effect, name="tests.follow").s().set(task_id="f-1")
    row = dead_letter(chain=[follow], root_id="root", parent_id="p", timelimit=[20, 10], tenant="acme", expires="2020-01-01")

    assert decisions.retry("default", row.pk)

    [message] = sent()
    assert message.headers["task"] == "tests.task"
    assert message.headers["id"] == "t-1"
    assert (message.headers["root_id"], message.headers["parent_id"], message.headers["tenant"]) == ("root", "p", "acme")
    assert message.headers["timelimit"] == [20, 10]
    assert message.headers["expires"] is None
    args, kwargs, embedded = message.payload
    assert (args, kwargs) == (["o-1", 2], {"how": "well"})
    assert embedded["chain"][0]["options"]["task_id"] == "f-1"
    assert (the_row().state, the_row().attempts) == (State.RETRYING, 0)


def test_admin_retry_sends_the_task_again_unless_it_is_skipped(dead_letter, answers, sent):
    row = dead_letter()

    assert "due for a retry now" in answers("retry", row)[0]
    assert (the_row().state, len(sent())) == (State.RETRYING, 1)
    decisions.skip("default", row.pk, "no")
    assert not decisions.retry("default", row.pk)
    assert sent() == []


def test_admin_retry_with_an_unavailable_broker_leaves_the_row_and_shows_the_error(dead_letter, answers, local_app):
    row = dead_letter()
    local_app.conf.update(broker_url="amqp://127.0.0.1:1//", task_publish_retry=False)

    [words] = answers("retry", row)

    assert "not due for a retry now: celery.tests.task cannot be sent" in words
    assert the_row().state == State.DEAD


def test_payload_of_a_task_cannot_be_corrected_and_the_reason_says_what_to_do(dead_letter, answers):
    row = dead_letter()

    with pytest.raises(NotEditable, match="It is a Celery task"):
        replace_message("default", row.pk, "{}", by="by anna")
    [words] = answers("edit", row)

    assert "Call the task with the right arguments and another biz-id, then skip this message." in words
    assert the_row().state == State.DEAD


def test_inbox_retry_without_a_celery_app_fails_and_leaves_the_row(dead_letter, local_app):
    dead_letter()
    local_app.conf.broker_url = None

    with pytest.raises(CommandError, match=r"1 Celery task was not retried: .* no Celery app with a broker_url"):
        call_command("inbox_retry", "--all", verbosity=0)

    assert the_row().state == State.DEAD


def test_inbox_retry_with_override_maximum_age_sends_the_task_and_its_delivery_runs(a_task, sent):
    def take(order_id):
        Effect.objects.create(name=order_id)

    task = a_task(take, biz_id="order_id")
    deliver(task, "o-1", inbox_sent_at="2020-01-01T00:00:00+00:00", task_id="t-1")

    call_command("inbox_retry", "t-1", "--override-maximum-age", verbosity=0)

    [message] = sent()
    assert message.headers["inbox_sent_at"] == "2020-01-01T00:00:00+00:00"
    assert deliver(task, "o-1", inbox_sent_at=message.headers["inbox_sent_at"], task_id="t-1")[0] == "SUCCESS"
    assert (the_row().state, effects()) == (State.DONE, 1)


def test_retry_of_a_row_without_stored_headers_sends_its_arguments_unless_they_were_not_json(sent):
    """A first delivery stores no headers, so how the task was sent is not known."""
    row = a_row(body=json.dumps({"order_id": "o-1"}).encode(), content_type="application/json")

    assert decisions.retry("default", row.pk)

    [message] = sent()
    assert (message.headers["id"], message.payload[1]) == ("t-1", {"order_id": "o-1"})
    row = a_row(body=b"{'order_id': <object>}", content_type="text/plain", biz_id="o-2")
    with pytest.raises(TaskNotSent, match="its arguments were not JSON"):
        decisions.retry("default", row.pk)
    assert the_row(biz_id="o-2").state == State.DEAD


def a_row(**columns):
    given = {"handler": HANDLER, "topic": HANDLER, "biz_id": "o-1", "message_id": "t-1", "digest": "", "state": State.DEAD}
    return store_message(**{**given, **columns}, received_at="2026-01-01T00:00:00Z")


@pytest.fixture
def resent(sent):
    """A row of a task that an operator has retried."""
    a_row(body=b"{}", content_type="application/json")
    decisions.retry("default", the_row().pk)
    sent()


@pytest.mark.usefixtures("resent")
@pytest.mark.parametrize(
    ("options", "raised", "state"),
    [
        ({}, ValueError("out of stock"), "FAILURE"),
        ({"autoretry_for": [Exception], "dont_autoretry_for": [ValueError]}, ValueError("out of stock"), "FAILURE"),
        ({"autoretry_for": [ValueError], "max_retries": 0}, ValueError("out of stock"), "FAILURE"),
        ({"autoretry_for": [ValueError], "retry_kwargs": {"max_retries": 0}}, ValueError("out of stock"), "FAILURE"),
        ({}, Ignore("bad"), "IGNORED"),
        ({}, Reject("bad", requeue=False), "REJECTED"),
    ],
    ids=str,
)
def test_resent_task_that_fails_and_is_not_retried_is_a_dead_letter_with_its_new_error(a_task, sent, options, raised, state):
    def fail(order_id):
        raise raised

    task = a_task(fail, biz_id="order_id", **options)

    assert deliver(task, "o-1", task_id="t-1")[0] == state
    assert sent() == []
    assert (the_row().state, the_row().last_error) == (State.DEAD, f"{type(raised).__name__}: {raised}")


@pytest.mark.usefixtures("resent")
def test_resent_task_whose_reject_is_retried_by_autoretry_stays_retrying(a_task, sent):
    def stop(order_id):
        raise Reject("bad", requeue=False)

    task = a_task(stop, biz_id="order_id", autoretry_for=[Exception], max_retries=1)

    assert deliver(task, "o-1", task_id="t-1")[0] == "RETRY"
    assert (the_row().state, len(sent())) == (State.RETRYING, 1)
    assert deliver(task, "o-1", task_id="t-1", retries=1)[0] == "REJECTED"
    assert the_row().state == State.DEAD


@pytest.mark.django_db(transaction=True)
def test_retry_of_a_task_that_committed_its_transaction_sends_it_with_headers_and_chain(a_task, sent):
    """At its first delivery, before which nothing had been stored."""

    def commit(order_id):
        connections["default"].connection.commit()

    task = a_task(commit, biz_id="order_id")
    follow = a_task(the_effect, name="tests.follow").s().set(task_id="f-1")
    deliver(task, "o-1", task_id="t-1", chain=[follow], tenant="acme")

    assert decisions.retry("default", the_row().pk)

    [message] = sent()
    args, _, embedded = message.payload
    assert (args, message.headers["tenant"], embedded["chain"][0]["options"]["task_id"]) == (["o-1"], "acme", "f-1")


@pytest.mark.usefixtures("resent")
@pytest.mark.parametrize("by_autoretry", [False, True])
def test_resent_task_that_celery_retries_stays_retrying(a_task, by_autoretry):
    def again(self, order_id):
        if self.request.retries:
            return
        if by_autoretry:
            raise ValueError("not yet")
        raise self.retry(countdown=0)

    task = a_task(again, bind=True, biz_id="order_id", autoretry_for=[ValueError] if by_autoretry else [])

    assert deliver(task, "o-1", task_id="t-1")[0] == "RETRY"
    assert the_row().state == State.RETRYING
    assert deliver(task, "o-1", task_id="t-1", retries=1)[0] == "SUCCESS"
    assert (the_row().state, the_row().duplicates) == (State.DONE, 0)


def test_retry_of_a_message_of_a_handler_sends_no_task(handles, sent):
    deliver_message(handles(fails), an_envelope())

    assert decisions.retry("default", the_row().pk)
    assert sent() == []


def test_retrying_rows_of_tasks_are_neither_orphans_nor_claimed_by_a_handler_named_like_the_task(dead_letter, handles):
    handler = handles(the_effect, name="tests.task")
    decisions.retry("default", dead_letter().pk)

    assert claims.claim_due("default", [handler.name], OPTIONS.REDELIVERY_AFTER) is None
    assert due.orphans("default", []) == {}
