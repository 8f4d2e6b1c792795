"""The dry run of a message in the admin: what its handler would write and publish, without any effect."""

import threading
import time
from datetime import timedelta

import pytest

from inbox import Lease, Reject, RetryLater
from inbox.models import InboxMessage
from inbox.states import State
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.admin_pages import NASTY, Page, act, said, staff_client
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import an_envelope, deliver, options, the_effect, the_row
from tests.support.inbox_rows import settle
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

VIEW, DRY_RUN = "view_inboxmessage", "dry_run_inboxmessage"
LIST, DETAIL = "admin:inbox_inboxmessage_changelist", "admin:inbox_inboxmessage_change"


class Handler:
    """Fails at its delivery, and does what the test says in a dry run."""

    def __init__(self):
        self.does = None

    def __call__(self, message):
        if self.does is None:
            raise ValueError("at first")
        return self.does(message)


@pytest.fixture
def dead(handles):
    """A dead message, and the handler that made it one."""
    function = Handler()
    deliver(handles(function), an_envelope(), given=options(MAX_ATTEMPTS=1))
    return function


def run(row=None, **fields):
    client = staff_client(VIEW, DRY_RUN)
    return act(client, "dry_run", row or the_row(), page=LIST, confirmed="yes", seconds="10", **fields)


def untouched(before):
    now = InboxMessage.objects.values().get()
    return now == before


@pytest.mark.every_database
def test_dry_run_shows_what_would_be_written_and_published_and_leaves_nothing(dead):
    def work(message):
        the_effect(message)
        publish("shop.reserved", {"order": 7}, biz_id="reserved-7")

    dead.does = work
    before = InboxMessage.objects.values().get()
    page = Page(run())
    assert "It would be handled" in page.text
    assert "INSERT INTO" in page.text
    assert Effect._meta.db_table in page.text
    assert "shop.reserved reserved-7" in page.text
    assert '"order": 7' in page.text
    assert not Effect.objects.exists()
    assert not OutboxMessage.objects.exists()
    assert untouched(before)


@pytest.mark.every_database
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("the card was refused"), "It would fail"),
        (RetryLater(timedelta(minutes=1), "out of stock"), "It would be deferred"),
        (Reject("nonsense"), "It would become a dead letter"),
        (SystemExit(3), "It would fail"),
    ],
)
def test_dry_run_shows_what_the_handler_raises(dead, error, outcome):
    def fail(message):
        the_effect(message)
        raise error

    dead.does = fail
    before = InboxMessage.objects.values().get()
    page = Page(run())
    assert outcome in page.text
    assert str(error) in page.text
    assert "tests/integration/admin/test_dry_run.py" in page.text
    assert not Effect.objects.exists()
    assert untouched(before)


@pytest.mark.long
@pytest.mark.every_database
def test_handler_that_takes_too_long_is_interrupted(dead):
    ended = threading.Event()

    def loop(message):
        try:
            the_effect(message)
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    dead.does = loop
    client = staff_client(VIEW, DRY_RUN)
    page = Page(act(client, "dry_run", the_row(), page=LIST, confirmed="yes", seconds="1"))
    assert "It did not end in time" in page.text
    assert ended.wait(10)
    assert not Effect.objects.exists()


@pytest.mark.every_database
def test_statement_that_would_end_the_transaction_is_refused(dead):

    def commit(message):
        the_effect(message)
        executed("COMMIT")

    dead.does = commit
    assert "It would fail" in Page(run()).text
    assert not Effect.objects.exists()


def test_dry_run_asks_first_and_warns_of_real_effects(dead):
    page = Page(act(staff_client(VIEW, DRY_RUN), "dry_run", the_row(), page=LIST))
    assert "Mail, HTTP requests and other effects outside the database are real." in page.text


def test_handler_under_a_lease_is_refused(handles):
    ran = []

    def work(message):
        ran.append(message)
        raise ValueError("no")

    deliver(handles(work, lease=Lease()), an_envelope(), given=options(MAX_ATTEMPTS=1))
    assert the_row().state == State.DEAD
    ran.clear()
    ((level, words),) = said(run())
    assert (level, "cannot be rolled back" in words) == ("error", True)
    assert not ran


def test_done_message_is_refused(dead):
    ran = []
    dead.does = ran.append
    settle(InboxMessage.objects.all())
    ((level, words),) = said(run())
    assert (level, "only dead and retrying messages" in words) == ("error", True)
    assert not ran


def test_markup_in_writes_and_payloads_stays_text(dead):
    def work(message):
        Effect.objects.create(name="x", detail=NASTY[:60])
        publish("shop.x", {"text": NASTY})

    dead.does = work
    page = Page(run())
    assert "<script>" in page.text
    assert not page.all("img")
