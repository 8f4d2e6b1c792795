"""`INBOX["KEEP_HISTORY"]`: with None a message that ends done keeps its digest, and neither body nor headers."""

import json

import pytest
from django.db import connection
from django.test import override_settings
from django.urls import reverse

from exactly_once.console.operators.message_history import history_of
from inbox import Lease, Reject
from inbox.celery import IdempotentTask
from inbox.models import InboxMessage
from inbox.operators.editing import replace_message
from inbox.receiving.reading import read
from inbox.states import Outcome, State
from tests.integration.celery.handling import conftest as celery_fixtures
from tests.integration.celery.handling.tracing import deliver as deliver_task
from tests.support import decisions
from tests.support.admin_pages import superuser_client
from tests.support.deliveries import (
    OPTIONS,
    an_envelope,
    deliver,
    drain,
    effects,
    handed_over,
    make_due,
    options,
    the_effect,
    the_row,
)
from tests.support.loads import receive_together

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

a_task, local_app = celery_fixtures.a_task, celery_fixtures.local_app

KINDS = {
    "transaction": {},
    "batch": {"size": 10},
    "group commit": {"group_commit": 5},
    "ordered": {"ordered": True},
    "lease": {"lease": Lease()},
}
HEADERS = {"tenant": "acme"}


@pytest.fixture
def no_history():
    with override_settings(INBOX={"KEEP_HISTORY": None}):
        yield


def several(messages):
    for message in messages:
        the_effect(message)


def a_handler(handles, kind):
    return handles(several if "size" in KINDS[kind] else the_effect, **KINDS[kind])


def an_order():
    return an_envelope({"order_id": 1}, headers=HEADERS, key="k")


def stored_and_run(handler, envelope):
    handed_over(handler, envelope)
    drain()


def handle(handler, kind, envelope):
    if kind in {"batch", "group commit"}:
        receive_together(handler, [envelope, an_order()])
    elif kind == "ordered":
        stored_and_run(handler, envelope)
    else:
        assert deliver(handler, envelope) is Outcome.HANDLED


def kept_of(envelope):
    row = the_row(message_id=envelope.id)
    assert row.state == State.DONE
    return bytes(row.body), row.headers


@pytest.mark.every_database
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_history")
def test_done_message_has_neither_body_nor_headers_and_keeps_its_digest(handles, kind):
    """So a duplicate of it is a conflict only if its content differs."""
    handler, envelope = a_handler(handles, kind), an_order()
    digest = read(handler, envelope, OPTIONS).row.digest

    handle(handler, kind, envelope)

    stored = an_order()
    stored_and_run(handler, stored)
    assert kept_of(envelope) == kept_of(stored) == (b"", {})
    assert the_row(message_id=envelope.id).digest == digest
    for copy in (envelope, envelope._replace(body=json.dumps({"order_id": 2}).encode())):
        stored_and_run(handler, copy)
    row = the_row(message_id=envelope.id)
    assert (row.duplicates, row.conflicts, bytes(row.conflicting_body)) == (2, 1, b'{"order_id": 2}')


@pytest.mark.parametrize("kind", KINDS)
def test_every_body_is_kept_by_default(handles, kind):
    handler, envelope = a_handler(handles, kind), an_order()

    handle(handler, kind, envelope)

    assert kept_of(envelope) == (envelope.body, HEADERS)


@pytest.mark.parametrize("redelivered", [False, True])
@pytest.mark.usefixtures("no_history")
def test_message_with_a_lease_in_redis_is_emptied_when_it_is_done(handles, redis_url, redelivered):
    def fails_once(message):
        if message.attempt == 1:
            raise ValueError("not yet")
        the_effect(message)

    handler, envelope = handles(fails_once, lease=Lease()), an_order()
    given = options(LEASE_STORE=redis_url)
    deliver(handler, envelope, given=given, redelivered=redelivered)
    assert bytes(the_row().body) == envelope.body
    make_due()
    drain(given)

    assert kept_of(envelope) == (b"", {})
    assert effects() == 1


def test_done_celery_task_is_emptied_and_still_answers_with_its_result(a_task, settings):
    settings.INBOX = {**settings.INBOX, "KEEP_HISTORY": None}

    def charge(order_id):
        return {"order": order_id}

    task = a_task(charge, base=IdempotentTask, biz_id="order_id")
    first, second = (deliver_task(task, 7, task_id=name) for name in ("t-1", "t-2"))

    assert (bytes(the_row().body), the_row().headers) == (b"", {})
    assert the_row().duplicates == 1
    assert first == second


@pytest.mark.usefixtures("no_history")
def test_message_that_is_dead_skipped_or_retrying_keeps_its_body_and_its_traceback(handles):
    def fails(message):
        raise (Reject("never") if message.payload["order_id"] == 1 else ValueError("not yet"))

    handler = handles(fails)
    dead, retrying, skipped = (an_envelope({"order_id": number}, headers=HEADERS) for number in (1, 2, 1))
    for envelope in (dead, retrying, skipped):
        deliver(handler, envelope)
    assert decisions.skip("default", the_row(message_id=skipped.id).pk, "not wanted")

    for envelope, state in ((dead, State.DEAD), (retrying, State.RETRYING), (skipped, State.SKIPPED)):
        row = the_row(message_id=envelope.id)
        assert (row.state, bytes(row.body), row.headers) == (state, envelope.body, HEADERS)
        assert "never" in row.traceback or "not yet" in row.traceback


@pytest.mark.usefixtures("no_history")
def test_dead_message_that_is_corrected_keeps_its_body_while_the_correction_is_emptied(handles):
    def handle(message):
        if message.payload["order_id"] == 1:
            raise Reject("never")

    envelope = an_order()
    deliver(handles(handle), envelope)
    row = the_row()

    new = replace_message("default", row.pk, '{"order_id": 2}', by="by anna")
    drain()

    row.refresh_from_db()
    assert (row.state, bytes(row.body)) == (State.SKIPPED, envelope.body)
    assert (the_row(pk=new).state, bytes(the_row(pk=new).body)) == (State.DONE, b"")


@pytest.mark.usefixtures("no_history")
def test_done_message_is_not_run_again_by_an_operator_and_its_history_is_complete(handles):
    envelope = an_order()
    deliver(handles(the_effect), envelope)

    assert not decisions.retry("default", the_row().pk)
    assert not decisions.skip("default", the_row().pk, "not wanted")
    assert replace_message("default", the_row().pk, "{}", by="by anna") is None

    assert [moment.became for moment in history_of(envelope.id).moments] == ["received", "done"]


@pytest.mark.usefixtures("no_history")
def test_page_of_an_emptied_message_says_that_its_body_was_not_kept_and_shows_what_conflicts(handles):
    handler, envelope = handles(the_effect), an_order()
    deliver(handler, envelope)
    deliver(handler, envelope._replace(body=b'{"order_id": 2}'))

    url = reverse("admin:inbox_inboxmessage_change", args=[InboxMessage.objects.get().pk])
    page = superuser_client().get(url).content.decode()

    said = "It was not stored: INBOX[&quot;KEEP_HISTORY&quot;] was None when the message was handled."
    assert page.count(said) == 3  # its payload, its headers, and beside what conflicts
    assert "&quot;order_id&quot;: 2" in page


@pytest.mark.parametrize("kind", ["transaction", "batch", "group commit"])
@pytest.mark.usefixtures("no_history")
def test_dead_letter_of_a_handler_that_committed_by_itself_and_failed_has_its_body(handles, kind):
    def commits(_):
        connection.connection.commit()
        raise ValueError("after the commit")

    handler, envelopes = handles(commits, **KINDS[kind]), [an_order(), an_order()]

    if kind == "transaction":
        for envelope in envelopes:
            deliver(handler, envelope)
    else:
        receive_together(handler, envelopes)

    for envelope in envelopes:
        row = the_row(message_id=envelope.id)
        assert (row.state, bytes(row.body), row.headers) == (State.DEAD, envelope.body, HEADERS)
