"""Bulk operations: previewed and planned in the admin, executed in batches by running processes, taken over from dead ones."""

import re
from datetime import timedelta
from functools import partial

import pytest
from django.db import DatabaseError
from django.test import override_settings
from django.urls import reverse
from django.utils import translation

from exactly_once.models import AuditEntry, Operation, OperationPart
from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep import executing
from exactly_once.upkeep.executing import Operations
from inbox import Ordered
from inbox.models import InboxMessage
from inbox.models import TrailEntry as InboxTrail
from inbox.operators import decisions
from inbox.receiving.admit import admit
from inbox.receiving.reading import read
from inbox.states import State
from outbox.conf import outbox_options
from outbox.models import OutboxMessage
from outbox.operators.changes import MANAGE, operations
from outbox.relay.housekeeping import Housekeeper
from outbox.states import State as OutboxState
from tests.support.admin_pages import Page, a_message, act, act_on_all, previewed, said, staff_client
from tests.support.commands import output_of
from tests.support.deliveries import an_envelope, deliver, drain, make_due, options, the_effect
from tests.support.http_api import TOKENS
from tests.support.inbox_rows import settle, store_message
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

VIEW, RETRY, SKIP = "view_inboxmessage", "retry_inboxmessage", "skip_inboxmessage"
LIST = "admin:inbox_inboxmessage_changelist"
OPERATIONS, OPERATION = (f"admin:exactly_once_operation_{page}" for page in ("changelist", "change"))


def dead_rows(count, *, state=State.DEAD, **columns):
    given = {"topic": "shop.paid", "handler": "shop.pay", "content_type": "application/json", "body": b"{}", "digest": "-"}
    for number in range(count):
        names = {"biz_id": f"{state}-{number}", "message_id": f"m-{state}-{number}"}
        store_message(state=state, received_at=DatabaseTime(), **names, **given | columns)


def planned(client, action, query="?state=dead", **fields):
    """Plan an operation on all messages that match the list's filters; returns it."""
    response = act_on_all(client, action, page=LIST, query=query, **{"reason": "because", **fields})
    assert response.status_code == 302, Page(response).text
    return Operation.objects.get(pk=re.search(r"operation/(\d+)/", response.url)[1])


def operate(batches=None):
    """What a running consumer does with planned operations."""
    return Operations("inbox", ["default"]).drain(StopRequest())


def planned_ones():
    """Without those that are only previewed."""
    return Operation.objects.exclude(state="previewed")


def states():
    return sorted(InboxMessage.objects.values_list("state", flat=True))


class TestPlanning:
    @pytest.mark.every_database
    def test_all_matching_messages_become_an_operation_after_a_preview(self):
        dead_rows(3)
        dead_rows(2, state=State.RETRYING)
        client = staff_client(VIEW, RETRY)
        preview = Page(act(client, "retry", InboxMessage.objects.first(), page=LIST, query="?state=dead", select_across="1"))
        assert "It applies to 3 of 3 messages." in preview.text
        assert "state dead" in preview.text
        assert not Page(client.get(reverse(OPERATIONS))).all("a", href=reverse(OPERATION, args=[Operation.objects.get().pk]))
        assert operate() == 0

        operation = planned(client, "retry")
        assert (operation.total, operation.state, operation.sources, operation.reason) == (3, "planned", ["dead"], "because")
        assert states() == ["dead"] * 3 + ["retrying"] * 2

        assert operate() > 0
        operation.refresh_from_db()
        assert (operation.state, operation.done, operation.refused, operation.failed) == ("finished", 3, 0, 0)
        assert states() == ["retrying"] * 5
        assert not operation.parts.exists()
        reasons = set(InboxTrail.objects.filter(was="dead", became="retrying").values_list("reason", flat=True))
        assert reasons == {f"operation {operation.pk} by {operation.requested_by}: because"}

    def test_preview_counts_messages_in_quarantine_as_unchanged_and_disables_the_button_if_it_applies_to_none(self):
        dead_rows(1)
        dead_rows(2, quarantined=True, handler="other")
        client = staff_client(VIEW, RETRY)
        preview = partial(act, client, "retry", page=LIST, select_across="1")
        row = InboxMessage.objects.first()
        assert "It applies to 1 of 3 messages." in Page(preview(row)).text
        settle(InboxMessage.objects.all())
        page = Page(preview(row))
        assert "It applies to 0 of 3 messages." in page.text
        (button,) = page.all("input", type="submit")
        assert "disabled" in button
        act_on_all(client, "retry", page=LIST, reason="because")
        assert not planned_ones()

    def test_operation_needs_the_permission_of_its_action_and_skip_a_reason(self):
        dead_rows(1)
        client = staff_client(VIEW, SKIP)
        assert "This field is required" in Page(act_on_all(client, "skip", page=LIST, reason="")).text
        assert not planned_ones()
        own = act(client, "skip", InboxMessage.objects.first(), page=LIST, select_across="1")
        act(client, "retry", InboxMessage.objects.first(), page=LIST, select_across="1", **previewed(own), reason="because")
        assert not planned_ones()

    @pytest.mark.every_database
    def test_operation_is_on_the_messages_of_the_preview_and_on_no_other(self):
        dead_rows(3)
        dead_rows(2, state=State.RETRYING)
        client, row = staff_client(VIEW, SKIP), InboxMessage.objects.first()
        do = partial(act, client, "skip", row, page=LIST, query="?state=dead", select_across="1")
        preview = do()
        dead_rows(4, handler="later")
        InboxMessage.objects.filter(state=State.RETRYING).update(state=State.DEAD)

        do(**previewed(preview), reason="because")
        operate()

        operation = planned_ones().get()
        assert "Skip 3 messages" in [button["value"] for button in Page(preview).all("input", type="submit")]
        assert (operation.total, operation.done) == (3, 3)
        reasons = set(InboxTrail.objects.filter(was="dead", became="skipped").values_list("reason", flat=True))
        assert reasons == {f"because; operation {operation.pk} by {operation.requested_by}"}
        assert states() == ["dead"] * 6 + ["skipped"] * 3

    @pytest.mark.parametrize("why", ["it is too old", "it was confirmed before", "it is another user's"])
    def test_preview_that_cannot_be_confirmed_is_shown_again(self, why):
        dead_rows(3)
        client, row = staff_client(VIEW, RETRY), InboxMessage.objects.first()
        do = partial(act, client, "retry", row, page=LIST, query="?state=dead", select_across="1")
        first = do()
        if why == "it is too old":
            Operation.objects.update(planned_at=DatabaseTime(-timedelta(hours=2)))
        elif why == "it was confirmed before":
            do(**previewed(first), reason="because")
        else:
            Operation.objects.update(requested_by="ada")
        planned_before = planned_ones().count()

        again = do(**previewed(first), reason="what was typed")

        assert "Nothing was planned" in Page(again).text
        assert Page(again).all("input", name="reason", value="what was typed")
        assert previewed(again) != previewed(first)
        assert planned_ones().count() == planned_before


@pytest.mark.every_database
class TestExecution:
    def test_message_that_has_changed_since_is_refused_and_named(self):
        dead_rows(3)
        operation = planned(staff_client(VIEW, RETRY), "retry")
        changed = InboxMessage.objects.order_by("pk").last()
        settle(InboxMessage.objects.filter(pk=changed.pk), State.SKIPPED)
        operate()
        operation.refresh_from_db()
        assert (operation.done, operation.refused, operation.reasons) == (2, 1, {"it is skipped now": 1})
        ((row, _name, why),) = operation.unchanged
        assert (row, why) == (changed.pk, "it is skipped now")
        page = Page(staff_client(VIEW).get(reverse(OPERATION, args=[operation.pk])))
        assert changed.message_id in page.text
        assert "1: it is skipped now" in page.text
        assert InboxMessage.objects.get(pk=changed.pk).state == State.SKIPPED

    @override_settings(LANGUAGE_CODE="de")
    def test_outcomes_are_stored_in_english_whatever_the_language_of_the_process(self):
        dead_rows(1)
        row = a_message(OutboxState.DEAD)
        retry = planned(staff_client(VIEW, RETRY), "retry")
        with translation.override("de"):
            settle(InboxMessage.objects.all(), State.SKIPPED)
            plan = Operation(action="cancel", selection="all", sources=["dead"], requested_by="ada")
            cancel = operations.plan("default", plan, [row.pk])
            OutboxMessage.objects.filter(pk=row.pk).delete()
            operate()
            Operations("outbox", ["default"]).drain(StopRequest())
        for operation, why in ((retry, "it is skipped now"), (cancel, "it no longer exists")):
            operation.refresh_from_db()
            assert operation.reasons == {why: 1}

    @pytest.mark.long
    def test_rate_limit_bounds_each_batch(self, monkeypatch):
        dead_rows(5)
        operation = planned(staff_client(VIEW, RETRY), "retry", rate="2")
        sizes = []
        perform = decisions.decide_many

        def counting(alias, rows, decision, **given):
            sizes.append(len(rows))
            return perform(alias, rows, decision, **given)

        monkeypatch.setattr(decisions, "decide_many", counting)
        operate()
        operation.refresh_from_db()
        assert sizes == [2, 2, 1]
        assert operation.ended_at - operation.started_at >= timedelta(seconds=2)

    def test_cancelled_operation_ends_before_its_next_batch(self, monkeypatch):
        monkeypatch.setattr(executing, "BATCH", 1)
        dead_rows(3)
        client = staff_client(VIEW, RETRY)
        operation = planned(client, "retry")
        perform = decisions.decide_many

        def cancelling(alias, rows, decision, **given):
            answer = perform(alias, rows, decision, **given)
            Operation.objects.filter(pk=operation.pk).update(cancelled_by="someone")
            return answer

        monkeypatch.setattr(decisions, "decide_many", cancelling)
        act(staff_client(VIEW, SKIP), "cancel", operation, page=OPERATIONS)
        operation.refresh_from_db()
        assert operation.cancelled_by == ""
        operate()
        operation.refresh_from_db()
        assert (operation.state, operation.done, operation.total) == ("cancelled", 1, 3)
        assert states() == ["dead", "dead", "retrying"]
        assert not OperationPart.objects.exists()
        assert "it had ended already" in said(act(client, "cancel", operation, page=OPERATIONS))[-1][1]
        operation.refresh_from_db()
        assert operation.state == "cancelled"

    @pytest.mark.long
    def test_operation_whose_batches_fail_is_stopped_and_says_why(self, monkeypatch):
        dead_rows(1)
        operation = planned(staff_client(VIEW, RETRY), "retry")

        def fail(*args, **given):
            raise DatabaseError("the index is damaged")

        monkeypatch.setattr(decisions, "decide_many", fail)
        executor = Operations("inbox", ["default"])

        def is_stopped():
            executor.drain(StopRequest())
            operation.refresh_from_db()
            return operation.state == "stopped"

        wait_until(is_stopped)
        assert "the index is damaged" in operation.stopped_because
        assert states() == ["dead"]

    def test_ordered_messages_are_retried_in_the_order_of_their_key(self, handles):
        seen, fails = [], [True]

        def take(message):
            if fails:
                raise ValueError("no")
            seen.append(message.payload["n"])

        handler = handles(take, ordered=Ordered())
        given = options(MAX_ATTEMPTS=1)
        arrivals = [read(handler, an_envelope({"n": number}, key="k"), given) for number in range(3)]
        admit(handler, arrivals, given)
        drain(options(MAX_ATTEMPTS=1))
        assert states() == ["dead", "waiting", "waiting"]
        planned(staff_client(VIEW, RETRY), "retry")
        fails.clear()
        operate()
        for _ in range(4):
            make_due()
            drain()
        assert seen == [0, 1, 2]


def has_ended(operation, executor):
    """What running consumers do, once; whether it has ended the operation."""
    executor.drain(StopRequest())
    drain(options(MAX_ATTEMPTS=1))
    operation.refresh_from_db()
    return not operation.is_open


@pytest.mark.long
class TestCanary:
    @pytest.fixture
    def canary(self, handles):
        """Plan a canary on dead letters whose handler raises the first of `errors`, if there is one left."""

        def plan(count, errors):
            def handle(message):
                if errors:
                    raise errors[0]
                the_effect(message)

            handler = handles(handle)
            for _ in range(count):
                deliver(handler, an_envelope(), given=options(MAX_ATTEMPTS=1))
            return planned(staff_client(VIEW, RETRY), "retry", canary="on")

        return plan

    @pytest.mark.parametrize("returns", ["as before", "in another way"])
    def test_canary_stops_by_itself_when_messages_fail_again(self, canary, returns):
        operation = canary(20, errors := [ValueError("broken"), KeyError("second")])
        if returns == "in another way":
            del errors[0]
        executor = Operations("inbox", ["default"])
        executor.drain(StopRequest())
        assert states() == ["dead"] * 19 + ["retrying"]

        wait_until(partial(has_ended, operation, executor))
        assert (operation.state, operation.done, operation.failed_again) == ("stopped", 1, 1)
        error = type(errors[0]).__name__
        said = f"wave 1: 1 of 1 messages failed {'again as before' if returns == 'as before' else returns} ({error}"
        assert said in operation.stopped_because
        assert states() == ["dead"] * 20
        page = Page(staff_client(VIEW).get(reverse(OPERATION, args=[operation.pk])))
        assert "It stopped by itself" in page.text
        assert error in page.text
        failing = InboxMessage.objects.order_by("pk").first()
        assert page.all("a", href=reverse("admin:inbox_inboxmessage_change", args=[failing.pk]))
        assert not page.all("button", value="continue")

    def test_stopped_canary_is_continued_with_one_of_the_messages_that_are_left(self, canary):
        operation = canary(20, errors := [ValueError("broken")])
        executor = Operations("inbox", ["default"])
        wait_until(partial(has_ended, operation, executor))
        assert (operation.state, operation.done) == ("stopped", 1)
        errors.clear()
        other = staff_client(VIEW, RETRY)
        assert Page(other.get(reverse(OPERATION, args=[operation.pk]))).all("button", value="continue")
        act(staff_client(VIEW, SKIP), "continue", operation, page=OPERATIONS)
        operation.refresh_from_db()
        assert operation.state == "stopped"
        act(other, "continue", operation, page=OPERATIONS)
        act(other, "continue", operation, page=OPERATIONS)
        executor.drain(StopRequest())
        operation.refresh_from_db()
        assert (operation.state, operation.done) == ("running", 2)

        wait_until(partial(has_ended, operation, executor))
        assert (operation.state, operation.done, operation.succeeded, operation.failed_again) == ("finished", 20, 19, 1)
        assert states() == ["dead"] + ["done"] * 19
        assert [entry.action for entry in AuditEntry.objects.filter(kind="operation").order_by("pk")] == ["retry", "continue"]
        assert not OperationPart.objects.exists()

    def test_canary_retries_1_10_and_100_messages_while_they_succeed(self, canary):
        operation = canary(40, errors := [ValueError("broken")])
        errors.clear()
        executor, waves = Operations("inbox", ["default"]), []

        def has_finished():
            executor.drain(StopRequest())
            waves.append(InboxMessage.objects.exclude(state=State.DEAD).count())
            return has_ended(operation, executor)

        wait_until(has_finished)
        assert sorted(set(waves)) == [1, 11, 40]
        assert (operation.state, operation.done) == ("finished", 40)
        assert (operation.succeeded, operation.failed_again) == (40, 0)
        assert states() == ["done"] * 40


class TestOutbox:
    LIST = "admin:outbox_outboxmessage_changelist"

    @staticmethod
    def executed(client, action, query, **fields):
        response = act_on_all(client, action, query=query, **{"reason": "because", **fields})
        assert response.status_code == 302, Page(response).text
        Operations("outbox", ["default"]).drain(StopRequest())
        return Operation.objects.get(pk=re.search(r"operation/(\d+)/", response.url)[1])

    @pytest.mark.parametrize(
        ("action", "query", "fields", "before", "after"),
        [
            ("restore", "?state=dead", {"overdue": "on"}, ["dead"] * 2 + ["published"], ["published", "ready", "ready"]),
            ("cancel", "", {}, ["dead", "ready", "retrying", "published"], ["cancelled"] * 3 + ["published"]),
            ("publish_now", "?state=retrying", {}, ["retrying"], ["ready"]),
        ],
        ids=["all dead messages are restored", "all unpublished ones are cancelled", "retrying ones are published now"],
    )
    def test_all_messages_that_match_and_may_be_changed_are_changed(self, action, query, fields, before, after):
        for state in before:
            a_message(OutboxState(state))
        changed = [state for state in before if state != "published"]
        permission = "reschedule" if action == "publish_now" else action

        operation = self.executed(staff_client("view_outboxmessage", f"{permission}_outboxmessage"), action, query, **fields)

        assert (operation.state, operation.total, operation.done) == ("finished", len(changed), len(changed))
        assert operation.sources == sorted(set(changed))
        assert sorted(OutboxMessage.objects.values_list("state", flat=True)) == after

    def test_operation_of_an_http_client_is_continued_with_the_permission_of_the_user(self):
        message, user = a_message(OutboxState.DEAD), staff_client("view_outboxmessage", "restore_outboxmessage")
        client = {"requested_by": "the HTTP client removed", "client": "removed", "permission": MANAGE}
        given = {"topic": message.topic, "overdue": True}
        plan = Operation(action="restore", selection=f"topic {message.topic}", sources=["dead"], given=given, **client)
        operation = operations.plan("default", plan, [message.pk])
        with override_settings(OUTBOX={"HTTP": {"TOKENS": {"partner": TOKENS["partner"]}}}):
            Operations("outbox", ["default"]).drain(StopRequest())
            operation.refresh_from_db()
            assert operation.state == "stopped"

            act(user, "continue", operation, page=OPERATIONS)
            Operations("outbox", ["default"]).drain(StopRequest())

        operation.refresh_from_db()
        assert (operation.state, operation.done, operation.stopped_because) == ("finished", 1, "")


@pytest.mark.every_database
class TestProcesses:
    @pytest.fixture
    def process(self, command):
        return partial(command, OUTBOX={"BROKER_URL": "local://"}, INBOX={"BROKER_URL": "local://"})

    def test_operation_of_a_killed_process_is_continued_by_another_and_no_message_is_counted_twice(self, process):
        dead_rows(60)
        operation = planned(staff_client(VIEW, SKIP), "skip", rate="4")

        def processed(count):
            operation.refresh_from_db()
            return operation.processed >= count

        with process("inbox_consume") as first:
            wait_until(partial(processed, 8))
            first.kill()
            first.ends()
        holder = Operation.objects.get().holder
        Operation.objects.update(rate=None)
        with process("outbox_relay"):  # with local:// it executes those of the inbox, too
            wait_until(lambda: Operation.objects.get().state == "finished")
        operation.refresh_from_db()
        assert (operation.done, operation.refused, operation.failed) == (60, 0, 0)
        assert operation.holder != holder
        assert states() == ["skipped"] * 60
        assert InboxTrail.objects.filter(became="skipped").count() == 60


@pytest.mark.every_database
@pytest.mark.parametrize(("app", "by"), [("outbox", "purge"), ("inbox", "purge"), ("outbox", "relay")])
def test_operations_are_deleted_some_time_after_their_end(app, by):
    def ended(ago, state="finished"):
        at = DatabaseTime(-ago) if ago else None
        given = {"requested_by": "ada", "planned_at": DatabaseTime(), "ended_at": at, "state": state}
        return Operation.objects.create(app=app, action="retry", **given)

    kept = {ended(timedelta(days=29)).pk, ended(None, state="planned").pk}
    # With the rows that were left, which are deleted with it and not counted.
    OperationPart.objects.create(operation=ended(timedelta(days=31), state="stopped"), rows=[1])
    if by == "relay":
        Housekeeper("default", outbox_options()).drain(StopRequest())
    else:
        for arguments, left in ((["--dry-run"], 3), ([], 2)):
            said = output_of("exactly_once_purge", *arguments, app=app)
            assert re.findall(r"^bulk operations +(\d+)$", said, re.MULTILINE) == ["1"]
            assert Operation.objects.count() == left

    assert set(Operation.objects.values_list("pk", flat=True)) == kept
