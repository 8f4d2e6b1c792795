"""Alerts: evaluated under a lease with hysteresis, stored, reported by signal, e-mail and webhook, acknowledged."""

import socket
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from django.core import mail
from django.core.management import CommandError

import inbox
from exactly_once.models import Alert, AuditEntry, Lease, Minute, Process
from exactly_once.process.clock import utcnow
from exactly_once.process.loop import Request, StopRequest
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep import alerting as module
from exactly_once.upkeep.alerting import Evaluator, alert_changed
from exactly_once.upkeep.heartbeat_table import SILENT_AFTER
from exactly_once.upkeep.minutes import OTHER
from inbox.conf import inbox_options
from inbox.models import InboxMessage, PausedHandler
from inbox.states import State as InboxState
from outbox import pause
from outbox.checks import check_options
from outbox.models import OutboxMessage, PausedTopic
from outbox.relay.heartbeat import relays
from outbox.states import State
from tests.support.admin_pages import a_message, an_inbox_message
from tests.support.commands import output_of
from tests.support.deliveries import deliver, fails, make_due, the_effect
from tests.support.fakes.receiver import Receiver, Reply
from tests.support.heartbeats import a_consumer, a_relay, fall_silent
from tests.support.signals import listening
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

HOUR = timedelta(hours=1)
OFTEN = {"EVERY": {"seconds": 0.3}}


@pytest.fixture
def alerts(settings, monkeypatch):
    """Set options of ALERTS; conditions are raised and cleared at once."""
    monkeypatch.setattr(module, "RAISED_AFTER", 1)
    monkeypatch.setattr(module, "CLEARED_AFTER", 1)

    def given(**options):
        settings.OUTBOX = {**getattr(settings, "OUTBOX", {}), "ALERTS": options}

    return given


def evaluated(app="outbox", alias="default", times=1):
    """The conditions and objects that are raised after this many evaluations."""
    evaluator = Evaluator(app, alias)
    for _ in range(times):
        assert evaluator.round() is not None
    evaluator.release()
    raised = Alert.objects.using(alias).filter(app=app, state="raised")
    return {(row.condition, row.object) for row in raised}


@pytest.mark.every_database
class TestConditions:
    @pytest.fixture(autouse=True)
    def options(self, alerts):
        """With options of their own."""

    def test_nothing_is_raised_in_an_empty_database_or_if_it_is_ignored(self, alerts):
        assert evaluated() == evaluated("inbox") == set()
        alerts(IGNORE=["no_relay"])
        a_message(State.READY)

        assert evaluated() == set()

    def test_waiting_message_without_a_relay_and_silent_relay_without_messages_are_raised(self):
        message = a_message(State.READY)
        assert evaluated() == {("no_relay", "")}

        relay = a_relay()
        assert evaluated() == set()

        OutboxMessage.objects.filter(pk=message.pk).delete()
        fall_silent(2 * SILENT_AFTER)
        assert evaluated() == {("no_relay", "")}

        relays.mark_stopped("default", relay.id)
        assert evaluated() == set()

    @pytest.mark.parametrize("priority", [0, 5])
    def test_message_that_is_ready_for_too_long_is_raised(self, priority):
        a_relay()
        a_message(State.READY, ago=timedelta(minutes=4), priority=priority)
        assert evaluated() == set()

        a_message(State.READY, ago=timedelta(minutes=6), priority=priority, shard=2)
        assert evaluated() == {("lag", "")}

    def test_new_dead_message_is_raised_and_an_old_one_is_not_and_a_stuck_prepared_one(self):
        a_relay()
        a_message(State.DEAD, settled_at=utcnow() - HOUR)
        assert evaluated() == set()

        a_message(State.DEAD, settled_at=utcnow())
        assert evaluated() == {("dead", "")}
        a_message(State.STUCK)
        assert evaluated() == {("dead", ""), ("stuck_prepared", "")}

    def test_topic_that_is_paused_for_too_long_is_raised_with_its_reason_and_one_that_its_rate_limits_is_not(self):
        a_relay()
        a_message(State.PAUSED, topic="limited", ago=2 * HOUR)
        ago = DatabaseTime(-2 * HOUR)
        PausedTopic.objects.create(topic="limited", paused_at=ago, mode="limited", allowed_at=DatabaseTime(HOUR))
        pause("shop.order.placed", reason="defect", by="ada")
        assert evaluated() == set()

        PausedTopic.objects.update(paused_at=ago)
        assert evaluated() == {("topic_paused", "shop.order.placed")}
        assert "by ada: defect" in Alert.objects.get().summary

    def test_handler_that_is_paused_for_too_long_is_raised(self, handles):
        handles(the_effect, name="tests.h")
        a_consumer(handlers=["tests.h"])
        inbox.pause("tests.h", reason="defect", by="ada")
        assert ("handler_paused", "tests.h") not in evaluated("inbox")

        PausedHandler.objects.update(paused_at=DatabaseTime(-2 * HOUR))
        assert ("handler_paused", "tests.h") in evaluated("inbox")

    def test_handler_with_stored_messages_and_no_consumer_is_raised_also_where_other_consumers_run(self, handles):
        deliver(handles(fails, name="tests.h"))
        assert ("no_consumer", "tests.h") in evaluated("inbox")

        a_consumer(handlers=["tests.other"])
        assert ("no_consumer", "tests.h") in evaluated("inbox")
        a_consumer(handlers=["tests.h"])
        assert ("no_consumer", "tests.h") not in evaluated("inbox")

    def test_stored_message_that_is_due_for_too_long_is_raised_unless_its_handler_is_paused(self, handles):
        deliver(handles(fails, name="tests.h"))
        a_consumer(handlers=["tests.h"])
        make_due()
        InboxMessage.objects.update(next_attempt_at=DatabaseTime(-HOUR))
        assert ("lag", "tests.h") in evaluated("inbox")

        inbox.pause("tests.h")
        assert ("lag", "tests.h") not in evaluated("inbox")

    def test_process_that_falls_silent_beside_others_is_raised_until_one_is_started_on_its_host(self):
        a_relay(host="host-1", silent_for=timedelta(minutes=12))
        a_consumer(host="host-1", silent_for=timedelta(minutes=12))
        assert evaluated("inbox") == set()

        a_relay(host="host-2")
        a_consumer(host="host-2")
        for host in ("host-3", "host-4"):
            a_relay(host=host, running_for=timedelta(minutes=1))
            a_consumer(host=host, running_for=timedelta(minutes=1))
        assert evaluated() == {("silent", "host-1:4711")}
        assert evaluated("inbox") == {("silent", "host-1:4712")}, "the others may be more, and not its replacements"

        a_relay(host="host-1", pid=12, running_for=timedelta(minutes=1))
        a_consumer(host="host-1", pid=13, running_for=timedelta(minutes=1))
        assert evaluated() == evaluated("inbox") == set()

    def test_pod_that_is_killed_is_replaced_by_one_of_another_name_that_is_started_within_minutes(self):
        a_consumer(host="shop-5c9f-aaaaa", silent_for=timedelta(minutes=12))
        a_consumer(host="shop-5c9f-bbbbb", silent_for=timedelta(minutes=11))
        a_consumer(host="shop-5c9f-ccccc")
        assert {name for _, name in evaluated("inbox")} == {"shop-5c9f-aaaaa:4712", "shop-5c9f-bbbbb:4712"}

        a_consumer(host="shop-5c9f-ddddd", running_for=timedelta(minutes=9))
        assert evaluated("inbox") == {("silent", "shop-5c9f-bbbbb:4712")}

        a_consumer(host="shop-5c9f-bbbbb", pid=12, running_for=timedelta(minutes=8))
        a_consumer(host="shop-5c9f-eeeee", running_for=timedelta(minutes=8))
        assert evaluated("inbox") == set()

    def test_process_that_restarts_on_its_host_replaces_no_other_one(self):
        a_relay(host="host-1", silent_for=timedelta(minutes=9))
        a_relay(host="host-2", silent_for=timedelta(minutes=8))
        a_relay(host="host-2", pid=12, running_for=timedelta(minutes=7))
        assert evaluated() == {("silent", "host-1:4711")}

    def test_process_that_is_never_replaced_is_raised_for_an_hour(self):
        gone = a_relay(host="shop-5c9f-aaaaa", silent_for=timedelta(minutes=59))
        a_relay(host="shop-5c9f-bbbbb")
        assert evaluated() == {("silent", "shop-5c9f-aaaaa:4711")}

        fall_silent(timedelta(minutes=61), pk=gone.id)
        assert evaluated() == set()

    @pytest.mark.parametrize("request_", [Request.STOP, Request.DRAIN])
    def test_silent_process_that_an_operator_wants_to_end_is_not_raised(self, request_):
        frozen = a_relay(host="host-1", silent_for=timedelta(minutes=12))
        a_relay(host="host-2")
        assert evaluated() == {("silent", "host-1:4711")}

        assert relays.request("default", frozen.id, request_, "ada")
        assert evaluated() == set()

    def test_consumer_of_other_handlers_replaces_none_and_one_replaces_one(self):
        a_consumer(pid=1, silent_for=timedelta(minutes=12), handlers=["tests.a"])
        a_consumer(pid=2, silent_for=timedelta(minutes=11), handlers=["tests.a"])
        a_consumer(pid=3, running_for=timedelta(minutes=1), handlers=["tests.b"])
        assert evaluated("inbox") == {("silent", "consumer-1:1"), ("silent", "consumer-1:2")}

        a_consumer(pid=4, running_for=timedelta(minutes=1), handlers=["tests.a", "tests.b"])
        assert evaluated("inbox") == {("silent", "consumer-1:2")}

    def test_handler_that_hangs_in_all_threads_that_may_run_it_is_raised(self):
        run = {"what": "tests.h", "message": "m-1", "messages": 1, "thread": "worker-1", "began": 0.0}
        for runs in (1, 2):
            Process.objects.all().delete()
            a_consumer(running_for=timedelta(minutes=12), running=runs * [run], threads={"tests.h": 2})
            assert evaluated("inbox") == ({("hanging", "tests.h")} if runs == 2 else set())

        assert "for 12 min in 2 of 2 threads of consumer-1:4712" in Alert.objects.get().summary

    def test_callback_that_hangs_is_raised_and_a_pass_of_the_relay_is_not(self):
        a_run = {"message": "", "messages": 1, "thread": "callbacks-1", "began": 0.0}
        short = {**a_run, "what": "shop.short", "began": 600.0}
        running = [short, {**a_run, "what": "shop.receipt_sent"}, {**a_run, "what": "", "thread": "MainThread"}]
        a_relay(running_for=timedelta(minutes=12), running=running)

        assert evaluated() == {("hanging", "shop.receipt_sent")}
        assert "for 12 min in relay-1:4711" in Alert.objects.get().summary

    def test_ordered_handler_that_hangs_while_later_messages_of_its_key_wait_is_raised(self):
        """Its other keys are run by the other threads."""
        run = {"what": "tests.h", "message": "m-1", "messages": 1, "thread": "worker-1", "began": 0.0}
        a_consumer(running_for=timedelta(minutes=12), running=[run], threads={"tests.h": 3})
        kept = {"handler": "tests.h", "ordered": True}
        an_inbox_message(InboxState.RECEIVED, message_id="m-1", key="k", next_ago=-HOUR, **kept)
        an_inbox_message(InboxState.WAITING, key="other", **kept)
        assert evaluated("inbox") == set()

        an_inbox_message(InboxState.WAITING, key="k", **kept)
        assert evaluated("inbox") == {("hanging", "tests.h")}
        said = "in 1 of 3 threads of consumer-1:4712, and later messages of its ordering key wait."
        assert said in Alert.objects.get().summary

    @pytest.mark.parametrize(("app", "good", "bad"), [("inbox", "handled", "failed"), ("outbox", "published", "retried")])
    def test_subject_most_of_whose_attempts_fail_is_raised_before_a_message_is_dead(self, app, good, bad):
        a_relay()

        def counted(name, **counts):
            Minute.objects.create(app=app, minute=utcnow(), process="host:1", subject=name, counts=counts, times={})

        counted("tests.well", **{good: 8, bad: 7})
        counted("tests.few", **{bad: 9})
        counted("tests.failing", **{good: 4, bad: 6})
        counted("tests.failing", **{bad: 1})
        counted(OTHER, **{bad: 100})

        assert evaluated(app) == {("failing", "tests.failing")}
        assert Alert.objects.get().summary.startswith("Of 11 attempts within 10 min, 7 have failed.")

    def test_topic_that_no_queue_takes_is_raised_by_the_first_evaluation_and_once(self, monkeypatch):
        monkeypatch.setattr(module, "RAISED_AFTER", 5)
        a_relay()
        why = {"error_class": "returned", "last_error": "unroutable: no queue is bound", "failing_since": utcnow()}
        a_message(State.RETRYING, topic="shop.unknown", **why)
        paused = {"paused_at": DatabaseTime(-2 * HOUR), "error_class": "returned", "reason": "no queue is bound"}
        PausedTopic.objects.create(topic="shop.mine", paused_by="ada", **paused)
        paused["mode"] = "refused"
        PausedTopic.objects.create(topic="shop.refused", **paused)
        PausedTopic.objects.create(topic="shop.full", **{**paused, "error_class": "nacked", "reason": "unroutable: not at all"})

        assert evaluated() == {("unroutable", "shop.unknown"), ("unroutable", "shop.refused")}
        assert "no queue is bound" in Alert.objects.get(object="shop.unknown").summary

    def test_long_queue_at_the_broker_is_raised_unless_its_handler_is_paused(self, settings):
        settings.INBOX = {"ALERTS": {"BACKLOG": 50}}
        a_consumer(queued={"tests.short": 50, "tests.long": 51})
        assert evaluated("inbox") == {("backlog", "tests.long")}

        PausedHandler.objects.create(handler="tests.long", paused_at=utcnow())
        assert evaluated("inbox") == set()


class TestHysteresis:
    def test_alert_is_raised_after_two_evaluations_in_a_row_and_cleared_after_three(self):
        message = a_message(State.READY)
        assert [evaluated() for _ in range(2)] == [set(), {("no_relay", "")}]

        OutboxMessage.objects.filter(pk=message.pk).delete()
        assert [evaluated() for _ in range(3)] == [{("no_relay", "")}, {("no_relay", "")}, set()]
        assert Alert.objects.get().state == "cleared"

        a_message(State.READY)
        assert [evaluated() for _ in range(2)] == [set(), {("no_relay", "")}]
        assert sorted(Alert.objects.values_list("state", flat=True)) == ["cleared", "raised"], "another alert"

    def test_condition_that_is_met_only_now_and_then_is_never_raised_and_one_that_returns_in_time_stays_one_alert(self):
        def met(condition, times=1):
            OutboxMessage.objects.all().delete()
            if condition:
                a_message(State.READY)
            return evaluated(times=times)

        assert [met(number % 2) for number in range(9)] == [set()] * 9
        assert not Alert.objects.exists()

        met(True, times=2)
        assert [met(condition) for condition in (False, True)] == [{("no_relay", "")}] * 2
        row = Alert.objects.get()
        assert (row.state, row.unmet) == ("raised", 0)


@pytest.mark.every_database
class TestLease:
    def test_one_process_evaluates_at_a_time(self, alerts):
        first, second = Evaluator("outbox", "default"), Evaluator("outbox", "default")

        assert first.round() is not None
        assert second.round() is None
        assert first.round() is not None

        first.release()
        assert second.round() is not None

        Lease.objects.update(expires_at=DatabaseTime())  # as after a kill
        assert first.round() is not None


@contextmanager
def a_receiver(statuses=(200,)):
    """An HTTP server that answers with these statuses in turn, the last one for ever; yields its URL and its requests."""
    left = list(statuses)
    with Receiver() as receiver:
        receiver.answer = lambda request: Reply(left.pop(0) if len(left) > 1 else left[0], {"Location": "/elsewhere"})
        yield f"{receiver.url}?token=secret", receiver.requests


class TestDelivery:
    def test_raised_and_cleared_alerts_are_sent_by_signal_mail_and_webhook(self, alerts):
        heard = []

        def hear(sender, event, app, database, alert, **kwargs):
            heard.append((sender, event, app, database, alert.condition))

        with listening(alert_changed, hear), a_receiver() as (url, posted):
            alerts(MAIL_TO=["ops@example.org"], WEBHOOK_URL=url)
            message = a_message(State.READY)
            evaluated()
            OutboxMessage.objects.filter(pk=message.pk).delete()
            evaluated()

        assert heard == [(Alert, event, "outbox", "default", "no_relay") for event in ("raised", "cleared")]
        assert [sent.subject for sent in mail.outbox] == ["[outbox] raised: no_relay", "[outbox] cleared: no_relay"]
        assert mail.outbox[0].to == ["ops@example.org"]
        assert "No relay is running" in mail.outbox[0].body
        assert [tuple(one.json[name] for name in ("event", "condition", "app", "database")) for one in posted] == [
            ("raised", "no_relay", "outbox", "default"),
            ("cleared", "no_relay", "outbox", "default"),
        ]
        assert posted[0].json["raised_at"]
        assert Alert.objects.get().unsent == []

    def test_webhook_that_fails_is_tried_again_with_backoff_and_the_mail_is_not_repeated(self, alerts, caplog):
        with a_receiver([503, 200]) as (url, posted):
            alerts(MAIL_TO=["ops@example.org"], WEBHOOK_URL=url)
            a_message(State.READY)
            evaluated()
            row = Alert.objects.get()
            assert (row.unsent, row.send_attempts) == ([["raised", "webhook"]], 1)
            assert "503" in row.send_error
            assert "secret" not in row.send_error + caplog.text
            assert timedelta(seconds=30) < row.send_at - utcnow() <= timedelta(seconds=61)

            evaluated()
            assert len(posted) == 1, "it is not due again yet"

            Alert.objects.update(send_at=DatabaseTime())
            evaluated()

        assert (Alert.objects.get().unsent, len(posted), len(mail.outbox)) == ([], 2, 1)

    def test_delivery_is_given_up_after_its_last_try_and_a_redirect_is_a_failure(self, alerts):
        with a_receiver([302]) as (url, posted):
            alerts(WEBHOOK_URL=url)
            a_message(State.READY)
            evaluated()
            Alert.objects.update(send_at=DatabaseTime(), send_attempts=19)
            evaluated()

        row = Alert.objects.get()
        assert (row.send_at, row.unsent, len(posted)) == (None, [["raised", "webhook"]], 2)
        assert "302" in row.send_error


class TestProcesses:
    def test_consumer_notices_that_no_relay_is_running_and_a_relay_that_no_consumer_is(self, a_process):
        raised = Alert.objects.filter(condition="no_relay")
        with a_process("inbox_consume", outbox={"ALERTS": OFTEN}) as consumer:
            a_message(State.READY)
            consumer.until(raised.filter(state="raised").exists)
            consumer.until(lambda: "alerts: raised on 'default': no_relay" in consumer.said())
            assert consumer.end() == 0
        Process.objects.update(stopped_at=None, beat_at=DatabaseTime(-2 * SILENT_AFTER))  # as after a kill

        missing = Alert.objects.filter(condition="no_consumer", object="worker.work")
        with a_process("outbox_relay", outbox={"ALERTS": OFTEN}) as relay:
            relay.until(missing.filter(state="raised").exists)
            relay.until(raised.filter(state="cleared").exists)
            with a_process("inbox_consume", outbox={"ALERTS": OFTEN}, log="again"):
                relay.until(missing.filter(state="cleared").exists)

    def test_receiver_that_never_answers_delays_neither_the_relay_nor_its_end(self, a_process):
        with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            given = {**OFTEN, "WEBHOOK_URL": url}
            a_message(State.STUCK)
            relay = stack.enter_context(a_process("outbox_relay", outbox={"ALERTS": given}))
            relay.until(lambda: Alert.objects.filter(condition="stuck_prepared", state="raised").exists())
            relay.until(lambda: relays.rows("default").filter(last_pass_at__isnull=False).exists())
            assert relay.end() == 0, relay.said()


class TestCommands:
    def test_once_evaluates_lists_and_acknowledges_unless_a_running_process_evaluates(self, alerts):
        assert output_of("exactly_once_alerts") == "No alert is raised."
        a_message(State.READY)

        assert "raised: no_relay" in output_of("exactly_once_alerts", once=True)
        alert = Alert.objects.get()
        assert "No relay is running" in output_of("exactly_once_alerts", acknowledge=alert.pk)

        alert.refresh_from_db()
        assert alert.acknowledged_by.endswith("with exactly_once_alerts")
        assert (AuditEntry.objects.get().action, AuditEntry.objects.get().kind) == ("acknowledge", "alert")
        with pytest.raises(CommandError, match="acknowledged already"):
            output_of("exactly_once_alerts", acknowledge=alert.pk)
        Evaluator("outbox", "default").round()
        assert "not evaluated: a running process evaluates the alerts" in output_of("exactly_once_alerts", once=True)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"MAIL_TOO": []}, "OUTBOX['ALERTS'] has no option 'MAIL_TOO'. Did you mean 'MAIL_TO'?"),
        (
            {"EVERY": 5},
            "OUTBOX['ALERTS']['EVERY'] is an int: it must be a timedelta, or text such as \"90s\", such as timedelta(",
        ),
        ({"WEBHOOK_URL": "http://a.org/"}, "WEBHOOK_URL is 'http://a.org/': it must be a URL like https://"),
        ({"BACKLOG": 0}, "OUTBOX['ALERTS']['BACKLOG'] is 0: it must be greater than zero."),
        ([], "OUTBOX['ALERTS'] must be a dict, not a list."),
    ],
    ids=["misspelt", "type", "not https", "zero", "not a dict"],
)
def test_check_names_each_mistake_in_alerts(settings, given, problem):
    settings.OUTBOX = {"ALERTS": given}

    [error] = check_options(None)
    assert (error.id, problem in error.msg) == ("outbox.E001", True), error.msg


def test_inbox_takes_the_alerts_of_the_outbox_unless_it_has_its_own(settings):
    settings.OUTBOX = {"ALERTS": {"BACKLOG": 7}}
    assert inbox_options().alerts.BACKLOG == 7

    settings.INBOX = {"ALERTS": {"BACKLOG": 3}}
    assert inbox_options().alerts.BACKLOG == 3


def test_thread_of_the_alerts_survives_an_error_and_goes_on(alerts, monkeypatch, caplog):
    alerts(EVERY=timedelta(milliseconds=20))
    real, failing = module.Evaluator.round, [True]

    def round_(self):
        if failing:
            raise RuntimeError("a receiver failed")
        return real(self)

    monkeypatch.setattr(module.Evaluator, "round", round_)
    stop = StopRequest()
    with module.alerting(["default"], stop):
        wait_until(lambda: "alerts: an evaluation on 'default' failed" in caplog.text and "a receiver failed" in caplog.text)
        a_message(State.READY)
        failing.clear()
        wait_until(Alert.objects.exists)


def test_alerts_of_each_app_are_evaluated_at_its_own_interval(alerts, settings):
    alerts(EVERY=timedelta(milliseconds=20))
    settings.INBOX = {"ALERTS": {"EVERY": HOUR}}
    evaluated_at = Lease.objects.filter(name="outbox: alerts", done_at__isnull=False).values_list("done_at", flat=True)
    with module.alerting(["default"], StopRequest()):
        first = wait_until(evaluated_at.first)
        wait_until(lambda: evaluated_at.first() > first)
    assert not Lease.objects.filter(name="inbox: alerts").exists()
