"""The history of a message on its page: outbox and inbox joined, for a user who may view both."""

from datetime import timedelta

import pytest
from django.urls import reverse

from exactly_once.console.display import brief
from exactly_once.process.clock import utcnow
from inbox.models import TrailEntry as InboxTrailEntry
from outbox.models import TrailEntry
from outbox.states import State
from tests.support.admin_names import DETAIL, VIEW
from tests.support.admin_pages import Page, a_message, staff_client
from tests.support.inbox_rows import store_message

pytestmark = pytest.mark.django_db(databases=["default", "other"])

VIEW_INBOX, LIFE = "view_inboxmessage", "view_trailentry"
HANDLER = "orders.reserve_stock"


def a_life(reason="refused by the broker", process="relay-1:4711:lane-1"):
    """A message that the relay published at the second attempt and that is dead in the inbox."""
    row = a_message(State.PUBLISHED, ago=timedelta(minutes=1), settled_at=utcnow())

    def after(seconds):
        return row.created_at + timedelta(seconds=seconds)

    for seconds, was, became in ((3, "ready", "retrying"), (13, "retrying", "ready"), (13.04, "ready", "published")):
        entry = {"was": was, "became": became, "reason": reason if became == "retrying" else ""}
        TrailEntry.objects.create(message_id=row.message_id, at=after(seconds), process=process, **entry)
    names = {"handler": HANDLER, "topic": row.topic, "biz_id": row.biz_id, "message_id": str(row.message_id)}
    times = {"created_at": row.created_at, "received_at": after(14), "settled_at": utcnow()}
    received = store_message(state="dead", body=b"{}", **names, **times)
    entry = {"was": "received", "became": "dead", "reason": "no such article", "process": "consumer-2:88:worker-3"}
    InboxTrailEntry.objects.create(message_id=received.message_id, handler=HANDLER, at=after(15), **entry)
    return row, received


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [(12, "12 ms"), (-3, "-3 ms"), (999, "999 ms"), (1570, "1.57 s"), (-1570, "-1.57 s"), (4000, "4 s")],
)
def test_time_between_two_moments_is_shown_in_milliseconds_below_a_second(milliseconds, shown):
    assert brief(timedelta(milliseconds=milliseconds)) == shown


def words(page):
    return " ".join(page.text.split())


@pytest.mark.every_database
def test_message_page_shows_its_history_in_time_order_with_process_and_reason():
    row, _ = a_life()

    text = words(Page(staff_client(VIEW, VIEW_INBOX, LIFE).get(reverse(DETAIL, args=[row.pk]))))

    history = text[text.index("Timeline") :]
    steps = ("Ready", "Ready → ↻ Retrying", "refused by the broker", "Retrying → ▸ Ready", "Ready → ✓ Published", "Received")
    positions = [history.index(step) for step in (*steps, "Received → ✕ Dead", "no such article", "Now")]
    assert positions == sorted(positions)
    for expected in ("3 s later", "10 s later", "40 ms later", "relay-1:4711:lane-1", "consumer-2:88:worker-3", HANDLER):
        assert expected in history


def a_failing(half, error):
    """A dead message, with the same error at each of its three attempts, and the URL of its page."""
    trail = {"process": "worker-1", "reason": error.partition(": ")[2], "became": "retrying", "was": "ready"}
    instants = [utcnow() - timedelta(seconds=seconds) for seconds in (30, 20, 10)]
    if half == "outbox":
        row = a_message(State.DEAD, last_error=error, attempts=3, payload={"article": 17})
        for at in instants:
            TrailEntry.objects.create(message_id=row.message_id, at=at, **trail)
        return reverse(DETAIL, args=[row.pk])
    failures = [
        {"attempt": number, "at": at.isoformat(), "class": "Missing", "place": "shop.py:take:3", "error": error}
        | dict.fromkeys(("own", "traceback"), f'  File "shop.py", line 3, in take\n    raise Missing(text)\nshop.{error}\n')
        for number, at in enumerate(instants, start=1)
    ]
    names = {"handler": HANDLER, "topic": "shop.order.placed", "biz_id": "order-1", "message_id": "m-1"}
    row = store_message(
        state="dead", body=b'{"article": 17}', received_at=utcnow(), last_error=error, attempts=3, failures=failures, **names
    )
    for at in instants:
        InboxTrailEntry.objects.create(message_id="m-1", handler=HANDLER, at=at, **trail)
    return reverse("admin:inbox_inboxmessage_change", args=[row.pk])


@pytest.mark.parametrize("half", ["outbox", "inbox"])
def test_message_page_begins_with_state_error_actions_and_payload_and_shows_an_error_once(half):
    error = "Missing: " + "no such article; " * 20
    url = a_failing(half, error.strip())
    client = staff_client(VIEW, VIEW_INBOX, LIFE, "cancel_outboxmessage", "skip_inboxmessage")

    text = words(Page(client.get(url)))

    text = text[text.index("State:") :]
    action = "Cancel…" if half == "outbox" else "Skip…"
    positions = [
        text.index(step) for step in ("Dead", "unless an operator", "Missing: no such", action, "17", "Timeline", "Biz-id:")
    ]
    assert positions == sorted(positions)
    assert text.count("no such article; " * 19) == 1
    assert text.count("The same error as above.") == (3 if half == "outbox" else 6)


def test_inbox_page_shows_the_same_history_and_the_two_pages_link_to_each_other():
    row, received = a_life()
    client = staff_client(VIEW, VIEW_INBOX, LIFE)

    here = Page(client.get(reverse(DETAIL, args=[row.pk])))
    there = Page(client.get(reverse("admin:inbox_inboxmessage_change", args=[received.pk])))

    assert "Ready → ↻ Retrying" in words(there)
    assert here.all("a", href=f"{reverse('admin:inbox_inboxmessage_changelist')}?q={row.message_id}")
    assert there.all("a", href=f"{reverse('admin:outbox_outboxmessage_changelist')}?q={row.message_id}")


@pytest.mark.parametrize("half", ["outbox", "inbox"])
def test_history_hides_the_app_that_the_user_may_not_view_and_says_so(half):
    row, received = a_life()
    page = reverse(DETAIL, args=[row.pk])
    if half == "inbox":
        page = reverse("admin:inbox_inboxmessage_change", args=[received.pk])

    text = words(Page(staff_client(VIEW if half == "outbox" else VIEW_INBOX, LIFE).get(page)))

    hidden, seen = ("no such article", "refused by the broker") if half == "outbox" else ("refused by", "no such article")
    assert hidden not in text
    assert seen in text
    assert "Users with the permission to view" in text
