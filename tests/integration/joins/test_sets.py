"""The end of a published set: one message when its last message has been handled, whatever came in between."""

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from exactly_once.testing.database import travel
from inbox import Lease, Reject
from inbox.contrib.joins import when_handled
from inbox.contrib.joins.sets import check_leases
from inbox.models import InboxMessage, Receipt
from inbox.operators.editing import replace_message
from inbox.states import State
from inbox.testing import assert_effect_once, deliver, make_message
from outbox import Draft, InvalidMessage, PayloadTooLarge, cancel, publish_many, publish_now
from outbox.models import OutboxMessage
from outbox.testing import published, run_relay
from tests.support.decisions import retry, skip
from tests.support.deliveries import drain, make_due, the_effect, the_row

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True, databases=["default", "other"])]

LINE, DONE = "shop.line", "shop.import.done"
SET = f"published-set.{DONE}"
NAME = "tests.line"
fails = {"7"}


@pytest.fixture(autouse=True)
def _counted(own_handlers):
    when_handled(DONE, by=[NAME])
    fails.clear()


def takes(message):
    if message.payload["line"] in fails:
        raise Reject("not now")
    the_effect(message)


@pytest.fixture
def handler(handles):
    return handles(takes, topic=LINE, name=NAME)


def lines(*names, **options):
    return [Draft(LINE, {"line": name}, biz_id=f"line-{name}", **options) for name in names]


def a_set(*names, drafts=None, **options):
    with transaction.atomic():
        return publish_many(lines(*names) if drafts is None else drafts, on_done=Draft(DONE, {"of": [*names]}, **options))


def a_list(biz_id):
    """The message that lists a set of one message."""
    return make_message(SET, {"members": {LINE: [["an id", biz_id]]}, "on_done": {"topic": DONE, "payload": {}}})


def relayed():
    run_relay(raise_errors=False)


def again():
    make_due()
    drain()


def ends():
    return [message.payload for message in published(DONE)] if OutboxMessage.objects.filter(topic=DONE).exists() else []


def why_waiting():
    row = the_row(handler=SET)
    assert row.state == State.RETRYING
    return row.last_error


def test_end_is_published_once_when_the_last_message_has_been_handled(handler):
    assert [message.topic for message in a_set("1", "2", biz_id="import-1", headers={"by": "anna"})] == [LINE, LINE]
    relayed()
    again()
    again()

    (end,) = OutboxMessage.objects.filter(topic=DONE)
    assert (ends(), end.biz_id, end.headers) == ([{"of": ["1", "2"]}], "import-1", {"by": "anna"})
    assert the_row(handler=SET).state == State.DONE


@pytest.mark.parametrize("biz_id", [None, "line"])
def test_end_waits_for_a_dead_letter_until_it_is_retried(handles, biz_id):
    handles(takes, topic=LINE, name=NAME, biz_id=biz_id)
    fails.add("7")
    a_set("1", "7")
    relayed()
    again()
    dead = the_row(state=State.DEAD)
    assert f"waits in {NAME} for message {dead.message_id}, which is dead" in why_waiting()

    fails.clear()
    retry("default", dead.pk)
    again()
    again()
    assert len(ends()) == 1


def test_a_skipped_message_does_not_hold_up_the_end(handler):
    fails.add("7")
    a_set("1", "7")
    relayed()
    skip("default", the_row(state=State.DEAD).pk, "not needed")
    again()

    assert len(ends()) == 1


def test_end_is_published_once_although_its_counter_is_killed_at_every_step(handler):
    deliver(make_message(LINE, {"line": "1"}, biz_id="line-1"))

    assert_effect_once(SET, a_list("line-1"), effect=lambda: OutboxMessage.objects.filter(topic=DONE).count())


def test_end_waits_for_the_last_correction_of_a_dead_letter(handler):
    fails.update("678")
    a_set("7")
    relayed()
    for other in ("8", "6"):
        replace_message("default", the_row(handler=NAME, state=State.DEAD).pk, f'{{"line": "{other}"}}', by="anna")
        drain()
        again()
        assert "which is dead" in why_waiting()

    replace_message("default", the_row(handler=NAME, state=State.DEAD).pk, '{"line": "9"}', by="anna")
    again()
    again()
    assert len(ends()) == 1


def test_a_refused_message_is_waited_for_and_may_be_skipped(handles):
    handles(takes, topic=LINE, name=NAME, biz_id="number")
    a_set("1")
    relayed()
    again()
    assert "which is dead" in why_waiting()

    skip("default", the_row(handler=NAME).pk, "not needed")
    again()
    assert len(ends()) == 1


def test_messages_that_have_not_come_are_waited_for_and_duplicates_of_earlier_ones_count(handler):
    a_set("1")
    relayed()
    again()
    with transaction.atomic():
        publish_many(lines("1", "2", delay=timedelta(hours=1)), on_done=Draft(DONE, {}))
    relayed()
    again()
    assert "which has not come" in InboxMessage.objects.get(handler=SET, state=State.RETRYING).last_error

    with transaction.atomic():
        for message in OutboxMessage.objects.filter(topic=LINE, state="scheduled"):
            publish_now(message.message_id)
    relayed()
    again()
    assert len(ends()) == 2


def test_every_handler_of_by_counts(handles, handler):
    other = handles(takes, topic=LINE, name="tests.other")
    when_handled("both.done", by=[NAME, other.name])
    with transaction.atomic():
        publish_many(lines("1"), on_done=Draft("both.done", {}))
    relayed()
    again()

    assert OutboxMessage.objects.filter(topic="both.done").count() == 1


def test_a_second_declaration_of_a_topic_does_not_replace_the_first():
    when_handled(DONE, by=(NAME,))  # as when its module is imported again
    with pytest.raises(ValueError, match=r"by=\['tests.line'\], and with by=\['tests.other'\].*one by="):
        when_handled(DONE, by=["tests.other"])


def test_end_of_an_empty_set_is_published_at_once(handler):
    assert a_set(drafts=[]) == []
    relayed()

    assert ends() == [{"of": []}]


@pytest.mark.parametrize("by", [["tests.missing"], []])
def test_set_that_no_handler_counts_for_is_a_dead_letter(handler, by):
    when_handled("never", by=by)
    with transaction.atomic():
        publish_many(lines("1"), on_done=Draft("never", {}))
    relayed()

    row = the_row(handler="published-set.never")
    assert (row.state, "Correct its by=" in row.last_error) == (State.DEAD, True)


def test_set_that_a_handler_with_leases_in_redis_counts_for_is_a_dead_letter_and_an_error(handles, settings):
    """Its success writes nothing to the database."""
    handles(takes, topic=LINE, name=NAME, lease=Lease())
    assert check_leases(None) == []

    settings.INBOX = {"LEASE_STORE": "redis://127.0.0.1:1/0"}
    (problem,) = check_leases(None)
    assert (problem.id, f"when_handled({DONE!r}) counts [{NAME!r}]" in problem.msg) == ("inbox_joins.E003", True)
    with pytest.raises(Reject, match="leases in Redis"):
        deliver(a_list("line-1"))


@pytest.mark.parametrize("age", [timedelta(days=6), timedelta(days=8)], ids=["within", "beyond"])
def test_set_whose_history_is_deleted_is_a_dead_letter_once_history_does_not_show_what_was_handled(handles, age):
    """With a biz-id of its own the handler leaves nothing that names the message as it was published."""
    handles(takes, topic=LINE, name=NAME, biz_id="line")
    fails.add("7")
    a_set("1", "7")
    relayed()
    InboxMessage.objects.filter(handler=NAME, state=State.DONE).delete()
    travel(age)
    again()

    row = the_row(handler=SET)
    assert (row.state, "waits" in row.last_error, "KEEP_HISTORY" in row.last_error) == (
        (State.RETRYING, True, False) if age < timedelta(days=7) else (State.DEAD, False, True)
    )
    assert not ends()


def test_set_whose_end_no_service_declares_says_what_is_missing(handler):
    with transaction.atomic():
        publish_many(lines("1"), on_done=Draft("shop.other.done", {}))
    relayed()

    unsent = OutboxMessage.objects.get(topic="published-set.shop.other.done")
    assert "declare when_handled('shop.other.done', by=[...])" in unsent.last_error


def test_set_waits_for_a_message_that_is_delayed_for_longer_than_history_is_kept(handles):
    handles(takes, topic=LINE, name=NAME, biz_id="line")
    a_set(drafts=[Draft(LINE, {"line": "1"}, delay=timedelta(days=10))])
    relayed()
    travel(timedelta(days=8))
    again()
    assert "which has not come" in why_waiting()

    travel(timedelta(days=3))
    relayed()
    again()
    again()
    assert len(ends()) == 1


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "expired"])
def test_set_with_a_message_that_never_comes_is_a_dead_letter_after_keep_history(handler, is_cancelled):
    a_set(drafts=lines("1", delay=timedelta(hours=1), expires_in=timedelta(hours=1)))
    relayed()
    if is_cancelled:
        cancel(OutboxMessage.objects.get(topic=LINE).message_id)
    travel(timedelta(days=6))
    relayed()
    again()
    assert "which has not come" in why_waiting()

    travel(timedelta(days=2))
    again()
    row = the_row(handler=SET)
    assert (row.state, "was cancelled, has expired" in row.last_error) == (State.DEAD, True)


@pytest.mark.parametrize("on_done", [Draft(DONE, {1, 2}), Draft("", {}), Draft(DONE, {}, delay="2h"), Draft(DONE, {}, key=5)])
def test_invalid_end_is_refused_before_anything_is_written(on_done):
    with transaction.atomic(), pytest.raises(InvalidMessage):
        publish_many(lines("1"), on_done=on_done)

    assert not OutboxMessage.objects.exists()


def test_statements_for_a_large_set_are_bounded(handles):
    handler = handles(takes, topic=LINE, name=NAME)
    with transaction.atomic(), CaptureQueriesContext(connection) as publishing:
        publish_many(lines(*map(str, range(10_000))), on_done=Draft(DONE, {}))
    assert len(publishing) < 40

    rows = OutboxMessage.objects.filter(topic=LINE).values_list("message_id", "biz_id")
    store_as_done(handler, rows)
    OutboxMessage.objects.filter(topic=LINE).delete()
    with CaptureQueriesContext(connection) as counting:
        relayed()
    assert len(ends()) == 1
    assert sum("biz_id IN" in each["sql"].replace('"', "") for each in counting) == 10


def store_as_done(handler, messages):
    Receipt.objects.bulk_create(
        Receipt(handler=handler.name, topic=LINE, biz_id=biz_id, message_id=name, digest="", received_at=timezone.now())
        for name, biz_id in messages
    )


def test_set_that_is_refused_when_its_members_are_known_leaves_none_of_them(settings):
    settings.OUTBOX = {**settings.OUTBOX, "BODY_LIMIT_BYTES": 400}

    with transaction.atomic():
        with pytest.raises(PayloadTooLarge):
            publish_many(lines(*map(str, range(10))), on_done=Draft(DONE, {}))
        assert not OutboxMessage.objects.exists()
