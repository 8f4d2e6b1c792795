"""One delivery of a task, traced as a worker's process traces it, without a worker."""

import hashlib
import json
import uuid
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from celery import Task, states
from celery.exceptions import Ignore, Reject
from django.db import DatabaseError, connections, transaction

from exactly_once.telemetry.statistics import Tally
from inbox.celery import IdempotentTask, idempotent_task
from inbox.errors import NotCallable, NotRun, TransactionBroken, TransactionEnded
from inbox.models import InboxMessage, KeptHandler
from inbox.states import State
from inbox.store import counting, sentinel
from outbox import publish
from outbox.celery import OutboxTask
from outbox.models import OutboxMessage
from tests.integration.celery.handling.conftest import INBOX
from tests.integration.celery.handling.tracing import deliver
from tests.support import decisions
from tests.support.apps.effects.models import Effect, Unique
from tests.support.deliveries import effects, the_row
from tests.support.signals import recorded_signals

pytestmark = [pytest.mark.django_db, pytest.mark.every_database]
committing = pytest.mark.django_db(transaction=True)


@pytest.fixture
def signals_sent():
    with recorded_signals() as sent:
        yield sent


def the_effect(order_id, amount=0):
    Effect.objects.create(name=str(order_id), detail=str(amount))
    return {"order": order_id}


@committing
def test_worker_records_how_long_the_receipts_of_its_tasks_are_kept(a_task, settings, monkeypatch):
    """Its processes have no housekeeping, and that of another service may have a shorter RETENTION."""
    monkeypatch.setattr("inbox.celery.receiving._record_at", {})
    task = a_task(the_effect)
    settings.INBOX = {**INBOX, "RETENTION": timedelta(days=100)}

    deliver(task, 1)

    assert list(KeptHandler.objects.values_list("handler", "retention")) == [
        (InboxMessage.objects.get().handler, timedelta(days=100))
    ]


class TestBizId:
    def test_default_biz_id_is_the_task_id_and_those_of_two_tasks_are_independent(self, a_task):
        one, other = a_task(the_effect, name="tests.one"), a_task(the_effect, name="tests.two")

        for task, task_id in ((one, "t-1"), (one, "t-1"), (one, "t-2"), (other, "t-1")):
            deliver(task, 1, task_id=task_id)

        rows = InboxMessage.objects.order_by("pk").values_list("handler", "topic", "biz_id", "duplicates")
        names = ["celery.tests.one"] * 2, ["celery.tests.two"] * 2
        assert list(rows) == [(*names[0], "t-1", 1), (*names[0], "t-2", 0), (*names[1], "t-1", 0)]
        assert effects() == 3

    @pytest.mark.parametrize(
        ("biz_id", "args", "kwargs", "known_as"),
        [
            ("order_id", ["o-1"], {}, "o-1"),
            ("order_id", [], {"order_id": 17}, "17"),
            ("amount", ["o-1"], {}, "0"),
            ("order_id.id", [{"id": uuid.UUID(int=5)}], {}, str(uuid.UUID(int=5))),
            ("order_id.of.id", [{"of": {"id": Decimal("1.50")}}], {}, "1.50"),
            (lambda order_id, amount: f"{order_id}/{amount}", ["o-1"], {}, "o-1/0"),
            (lambda *args: len(args), ["o-1"], {"amount": 3}, "2"),
        ],
    )
    def test_biz_id_is_an_argument_a_path_into_one_or_the_result_of_a_function(self, a_task, biz_id, args, kwargs, known_as):
        task = a_task(the_effect, biz_id=biz_id)

        assert deliver(task, *args, kwargs=kwargs)[0] == states.SUCCESS

        assert the_row().biz_id == known_as

    def test_biz_id_of_a_bound_task_may_be_in_its_variable_keyword_arguments(self, a_task):
        def bound(self, *numbers, **named):
            return [self.request.id, list(numbers), named]

        task = a_task(bound, bind=True, biz_id="tenant.order")

        state, returned = deliver(task, 1, 2, task_id="t-1", kwargs={"tenant": {"order": "o-1"}, "x": None})

        assert (state, returned) == (states.SUCCESS, ["t-1", [1, 2], {"tenant": {"order": "o-1"}, "x": None}])
        assert the_row().biz_id == "o-1"
        assert json.loads(bytes(the_row().body)) == {"numbers": [1, 2], "tenant": {"order": "o-1"}, "x": None}

    @pytest.mark.parametrize(
        ("order", "expected"),
        [
            ({}, LookupError),
            (None, LookupError),
            ({"id": None}, TypeError),
            ({"id": ""}, TypeError),
            ({"id": ["o-1"]}, TypeError),
            ({"id": True}, TypeError),
        ],
        ids=str,
    )
    def test_delivery_without_a_usable_biz_id_fails_and_leaves_no_row(self, a_task, order, expected):
        task = a_task(the_effect, biz_id="order_id.id")

        state, error = deliver(task, order)

        assert (state, type(error)) == (states.FAILURE, expected)
        assert (effects(), InboxMessage.objects.count()) == (0, 0)

    def test_ids_of_any_length_are_deduplicated(self, a_task):
        def take(order_id):
            the_effect(1)

        task = a_task(take, biz_id="order_id", name="tests." + "n" * 300)

        for _ in range(2):
            deliver(task, "ä" * 300, task_id="t" * 300, root_id="r" * 300, parent_id="\0")

        assert (effects(), the_row().duplicates) == (1, 1)


class TestRefusedDeclarations:
    def test_biz_id_that_is_not_an_argument_is_refused(self, a_task):
        with pytest.raises(ValueError, match=r"'ordre_id', which is not one of its arguments: order_id, amount"):
            idempotent_task(biz_id="ordre_id")(the_effect)
        with pytest.raises(ValueError, match="is not one of its arguments"):
            idempotent_task(biz_id="self", bind=True)(lambda self, order_id: None)
        with pytest.raises(ValueError, match="is not one of its arguments"):
            a_task(the_effect, biz_id="ordre_id")

    def test_biz_id_that_is_neither_text_nor_function_is_refused(self):
        with pytest.raises(TypeError, match=r"is 17: it must be a path"):
            idempotent_task(biz_id=17)(the_effect)

    @pytest.mark.parametrize(
        ("option", "reason"),
        [
            ("acks_late", "a worker that dies would lose the task"),
            ("reject_on_worker_lost", "when its process dies during the run"),
        ],
    )
    def test_option_by_which_a_task_could_be_lost_is_refused(self, a_task, option, reason):
        with pytest.raises(ValueError, match=reason):
            idempotent_task(**{option: False})(the_effect)
        with pytest.raises(ValueError, match=f"{option}=False"):
            a_task(the_effect, **{option: False})

    def test_map_starmap_and_chunks_are_refused(self, a_task):
        task = a_task(the_effect)

        for refused in (lambda: task.map([1, 2]), lambda: task.starmap([(1, 2)]), lambda: task.chunks([(1, 2)], 1)):
            with pytest.raises(NotCallable, match="Use a group of signatures"):
                refused()

    def test_coroutine_function_is_refused(self, a_task):
        async def later(order_id):
            pass

        state, error = deliver(a_task(later), 1)

        assert (state, type(error)) == (states.FAILURE, NotCallable)
        assert not InboxMessage.objects.exists()


class TestDecorator:
    def test_decorator_passes_base_and_options_to_celery(self, local_app, current):
        class Base(Task):
            color = "red"

        @idempotent_task(base=Base, name="tests.decorated", max_retries=7, ignore_result=True, autoretry_for=[KeyError])
        def decorated(order_id):
            """Its words."""

        current(local_app)
        task = local_app.tasks["tests.decorated"]

        assert isinstance(task, IdempotentTask)
        assert isinstance(task, Base)
        assert (task.color, task.max_retries, task.ignore_result, task.__doc__) == ("red", 7, True, "Its words.")
        assert (task.acks_late, task.reject_on_worker_lost) == (True, True)
        with pytest.raises(TypeError, match="order_id"):
            task.delay()

    def test_calling_the_task_as_a_function_only_calls_the_function(self, a_task):
        task = a_task(the_effect, biz_id="order_id")

        assert [task("o-1"), task("o-1")] == [{"order": "o-1"}] * 2

        assert (effects(), InboxMessage.objects.count()) == (2, 0)

    def test_task_class_derived_from_idempotent_task_is_deduplicated(self, local_app):
        class Charge(IdempotentTask):
            name = "tests.charge"
            biz_id = "order_id"

            def run(self, order_id):
                Effect.objects.create(name=order_id)
                return self.name

        task = local_app.register_task(Charge())

        assert [deliver(task, "o-1"), deliver(task, "o-1")] == [(states.SUCCESS, "tests.charge")] * 2
        assert effects() == 1

    def test_task_that_is_idempotent_and_an_outbox_task_writes_an_outbox_row(self, a_task):
        class Both(IdempotentTask, OutboxTask):
            pass

        task = a_task(the_effect, base=Both, biz_id="order_id")

        with transaction.atomic():
            result = task.delay("o-1")

        written = OutboxMessage.objects.get()
        assert (str(written.message_id), written.topic) == (result.id, "celery.tests.task")
        assert "inbox_sent_at" in json.loads(written.wire)["headers"]


@pytest.mark.django_db(databases=["default", "other"])
def test_row_and_effect_are_in_the_database_of_using(a_task):
    def take(order_id):
        Effect.objects.using("other").create(name=order_id)

    task = a_task(take, biz_id="order_id", using="other")
    for _ in range(2):
        assert deliver(task, "o-1")[0] == states.SUCCESS

    assert Effect.objects.using("other").count() == 1
    assert InboxMessage.objects.using("other").get().duplicates == 1
    assert not InboxMessage.objects.exists()


class TestDuplicates:
    def test_duplicate_returns_what_the_first_run_returned(self, a_task):
        def charge(order_id):
            Effect.objects.create(name=order_id)
            return {"at": datetime(2030, 1, 2, tzinfo=UTC), "id": uuid.UUID(int=1), "of": Decimal("1.50"), "list": (1, None)}

        task = a_task(charge, biz_id="order_id")

        first, second = deliver(task, "o-1"), deliver(task, "o-1")

        assert second == (states.SUCCESS, {**first[1], "list": [1, None]})
        assert effects() == 1

    @pytest.mark.parametrize("redelivered", [False, True])
    @pytest.mark.parametrize("returned", [None, 0, "", [], "ä 🍰", 1e22])
    def test_every_json_result_is_returned_to_a_duplicate(self, a_task, returned, redelivered):
        def answer(order_id):
            return returned

        task = a_task(answer, biz_id="order_id")

        for _ in range(2):
            assert deliver(task, "o-1", redelivered=redelivered, chain=[]) == (states.SUCCESS, returned)

    @pytest.mark.parametrize("returned", [object(), float("nan"), "a\0b", "\ud800", {1, 2}])
    def test_result_that_is_not_json_fails_only_duplicates_with_a_task_waiting_for_it(self, local_app, a_task, returned):
        def answer(order_id):
            return returned

        def follow(before):
            pass

        local_app.conf.result_serializer = "pickle"
        task = a_task(answer, biz_id="order_id", ignore_result=True)
        follow = a_task(follow, name="tests.follow").s()

        assert deliver(task, "o-1")[0] == states.SUCCESS
        assert deliver(task, "o-1") == (states.SUCCESS, None)
        state, error = deliver(task, "o-1", callbacks=[follow])

        assert (state, type(error)) == (states.FAILURE, NotRun)
        assert "was not JSON" in str(error)
        assert (the_row().state, the_row().duplicates) == (State.DONE, 2)

    @committing
    @pytest.mark.parametrize(
        ("task_id", "redelivered", "cause"), [("t-1", True, "redelivery"), ("t-1", False, "resend"), ("t-2", False, "business")]
    )
    def test_duplicate_is_counted_and_signalled_with_its_cause(self, a_task, signals_sent, task_id, redelivered, cause):
        task = a_task(the_effect, biz_id="order_id")
        deliver(task, "o-1", task_id="t-1")

        deliver(task, "o-1", task_id=task_id, redelivered=redelivered)

        names = {"message_id": task_id, "biz_id": "o-1", "cause": cause}
        assert [name for name, _ in signals_sent] == ["message_handled", "duplicate_suppressed"]
        assert signals_sent[1][1] == {**dict.fromkeys(("handler", "topic"), "celery.tests.task"), **names}
        row = the_row()
        assert (row.duplicates, row.redeliveries, row.resends) == (1, cause == "redelivery", cause == "resend")

    def test_duplicate_with_other_arguments_is_a_conflict(self, a_task, signals_sent):
        task = a_task(the_effect, biz_id="order_id")
        deliver(task, "o-1", 5)

        deliver(task, "o-1", kwargs={"amount": 5})
        assert the_row().conflicts == 0
        deliver(task, "o-1", 6)

        assert the_row().conflicts == 1
        assert json.loads(bytes(the_row().conflicting_body)) == {"order_id": "o-1", "amount": 6}
        assert "conflicting_duplicate" in dict(signals_sent)

    def test_arguments_that_are_not_json_are_stored_as_text_and_never_conflict(self, a_task):
        def take(order_id, thing):
            pass

        task = a_task(take, biz_id="order_id")
        for _ in range(2):
            deliver(task, "o-1", object())

        row = the_row()
        assert (row.content_type, row.duplicates, row.conflicts) == ("text/plain", 1, 0)
        assert b"<object object" in bytes(row.body)
        assert row.digest == hashlib.sha256().hexdigest()


class TestFailures:
    @committing
    def test_failed_task_leaves_no_row_and_the_next_delivery_runs(self, a_task, signals_sent):
        fails = [True]

        def sometimes(order_id):
            the_effect(order_id)
            if fails:
                raise ValueError("no")

        task = a_task(sometimes, biz_id="order_id")
        state, error = deliver(task, "o-1")
        assert (state, str(error), effects(), InboxMessage.objects.count(), signals_sent) == (states.FAILURE, "no", 0, 0, [])

        fails.clear()
        assert deliver(task, "o-1")[0] == states.SUCCESS
        assert effects() == 1

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_task_that_swallows_a_database_error_fails(self, a_task, redelivered):
        def swallow(order_id):
            the_effect(order_id)
            Unique.objects.create(name="x")
            with suppress(DatabaseError):
                Unique.objects.create(name="x")

        state, error = deliver(a_task(swallow, biz_id="order_id"), "o-1", redelivered=redelivered)

        assert (state, type(error)) == (states.FAILURE, TransactionBroken)
        assert (effects(), InboxMessage.objects.count()) == (0, 0)

    @committing
    @pytest.mark.parametrize("redelivered", [False, True])
    def test_task_that_commits_its_transaction_is_a_dead_letter(self, a_task, redelivered):
        def commit(order_id):
            the_effect(order_id)
            connections["default"].connection.commit()

        task = a_task(commit, biz_id="order_id")

        state, error = deliver(task, "o-1", redelivered=redelivered)
        again, refusal = deliver(task, "o-1", redelivered=True)

        assert (state, type(error)) == (states.FAILURE, TransactionEnded)
        assert (again, type(refusal)) == (states.FAILURE, NotRun)
        assert (the_row().state, effects()) == (State.DEAD, 1)

    def test_failed_commit_is_retried_by_autoretry(self, a_task, sent, monkeypatch):
        """As with a deferred constraint: the function has returned by then."""

        def refuse(*args, **kwargs):
            raise ConnectionResetError("at the commit")

        monkeypatch.setattr(sentinel, "finish", refuse)
        task = a_task(the_effect, biz_id="order_id", autoretry_for=[ConnectionError], retry_kwargs={"countdown": 0})

        state, _ = deliver(task, "o-1")

        assert (state, effects(), len(sent())) == (states.RETRY, 0, 1)

    @pytest.mark.parametrize("raised", ["retry", "ignore", "reject"])
    @pytest.mark.parametrize("redelivered", [False, True])
    def test_retry_ignore_and_reject_roll_back_and_leave_no_row(self, a_task, raised, redelivered, sent):
        def tell(self, order_id):
            the_effect(order_id)
            if raised == "retry":
                self.retry(countdown=0)
            raise {"ignore": Ignore, "reject": Reject}[raised]

        state, _ = deliver(a_task(tell, bind=True, biz_id="order_id"), "o-1", redelivered=redelivered)

        assert state == {"retry": states.RETRY, "ignore": states.IGNORED, "reject": states.REJECTED}[raised]
        assert (effects(), InboxMessage.objects.count()) == (0, 0)
        assert len(sent()) == (raised == "retry")

    def test_messages_published_by_a_task_name_its_ids_and_roll_back_with_it(self, a_task):
        def order(order_id):
            publish("shop.order.placed", {"order": order_id})
            if order_id == "bad":
                raise ValueError("no")

        task = a_task(order, biz_id="order_id")
        deliver(task, "bad")
        deliver(task, "good", task_id="t-1", root_id="root", parent_id="p-1", traceparent="00-x-y-01")

        published = OutboxMessage.objects.get()
        assert (published.causation_id, published.correlation_id, published.traceparent) == ("t-1", "root", "00-x-y-01")
        assert (the_row().correlation_id, the_row().causation_id) == ("root", "p-1")

    @committing
    def test_naive_eta_is_timed_as_utc(self, a_task, monkeypatch):
        tally = Tally()
        tally.ahead = timedelta()
        monkeypatch.setitem(counting.tallies, "default", tally)

        eta = datetime.now(UTC).replace(tzinfo=None).isoformat()

        assert deliver(a_task(the_effect), "o-1", eta=eta)[0] == states.SUCCESS
        [counted] = tally.take().values()
        assert [counted.times[name].total() for name in ("to_inbox", "to_effect")] == [1, 1]

    @committing
    def test_error_while_counting_does_not_undo_a_success(self, a_task, monkeypatch):
        monkeypatch.setattr(counting, "time_received", lambda *given: 1 / 0)

        assert deliver(a_task(the_effect), "o-1")[0] == states.SUCCESS
        assert effects() == 1

    @committing
    def test_failing_on_commit_hook_does_not_undo_a_success(self, a_task, caplog):
        def hook(order_id):
            the_effect(order_id)
            transaction.on_commit(lambda: 1 / 0)
            return "done"

        assert deliver(a_task(hook, biz_id="order_id"), "o-1") == (states.SUCCESS, "done")
        assert effects() == 1
        assert "failed after the commit" in caplog.text


class TestWorkerDeaths:
    """A worker process that dies cannot store a failure: only the attempt that was counted before the run remains."""

    def killed(self, task, *args):
        """The state that a worker leaves when it dies over a redelivered message."""
        with pytest.raises(SystemExit):
            deliver(task, *args, task_id="t-1", redelivered=True)

    @pytest.fixture
    def poison(self, a_task):
        self.deadly = True

        def die(order_id):
            the_effect(order_id)
            if self.deadly:
                raise SystemExit(13)
            return "mended"

        return a_task(die, biz_id="order_id")

    def test_task_that_kills_its_worker_is_a_dead_letter_after_max_attempts(self, poison, signals_sent):
        for attempt in (1, 2, 3):
            self.killed(poison, "o-1")
            assert (the_row().state, the_row().attempts) == (State.RECEIVED, attempt)

        state, error = deliver(poison, "o-1", task_id="t-1", redelivered=True)

        assert (state, type(error)) == (states.FAILURE, NotRun)
        assert (the_row().state, the_row().attempts, effects()) == (State.DEAD, 3, 0)
        assert "Its attempts never ended: its process died" in the_row().last_error
        assert [name for name, _ in signals_sent] == ["message_dead"]

    def test_another_delivery_of_the_biz_id_runs_a_received_row(self, poison):
        self.killed(poison, "o-1")
        self.deadly = False

        assert deliver(poison, "o-1", task_id="t-2") == (states.SUCCESS, "mended")
        assert (the_row().state, the_row().attempts, the_row().duplicates, effects()) == (State.DONE, 2, 0, 1)

    def test_ordinary_failure_after_a_worker_death_deletes_the_row(self, a_task):
        def fail(order_id):
            raise {"killed": SystemExit, "failing": ValueError}[self.way]("no")

        task = a_task(fail, biz_id="order_id")
        self.way = "killed"
        self.killed(task, "o-1")
        self.way = "failing"

        assert deliver(task, "o-1", redelivered=True)[0] == states.FAILURE
        assert not InboxMessage.objects.exists()

    def test_delivery_of_a_skipped_row_is_not_run(self, poison):
        self.killed(poison, "o-1")
        decisions.skip("default", the_row().pk, "not wanted")

        state, error = deliver(poison, "o-1")

        assert (state, "skipped: not wanted" in str(error), the_row().duplicates) == (states.FAILURE, True, 1)


class TestMessageAge:
    def sent_at(self, **ago):
        return (datetime.now(UTC) - timedelta(**ago)).isoformat()

    def test_retries_keep_the_time_of_the_first_call(self, a_task, sent):
        def again(self):
            self.retry(countdown=0)

        task = a_task(again, bind=True)
        task.delay()
        [first] = sent()
        deliver(task, inbox_sent_at=first.headers["inbox_sent_at"])
        [second] = sent()

        assert first.headers["inbox_sent_at"] == second.headers["inbox_sent_at"]
        assert datetime.fromisoformat(first.headers["inbox_sent_at"]).tzinfo

    def test_delivery_older_than_the_deduplication_window_is_quarantined_and_runs_after_an_operators_override(
        self, a_task, signals_sent, local_app, current
    ):
        current(local_app)
        task = a_task(the_effect, biz_id="order_id")

        state, error = deliver(task, "o-1", inbox_sent_at=self.sent_at(days=366))

        assert (state, type(error), effects()) == (states.FAILURE, NotRun, 0)
        row = the_row()
        assert (row.state, row.quarantined, row.attempts) == (State.DEAD, True, 0)
        assert "past the deduplication window" in row.last_error
        assert [name for name, _ in signals_sent] == ["message_dead"]
        assert not decisions.retry("default", row.pk)
        assert decisions.override_maximum_age("default", row.pk)
        assert deliver(task, "o-1", inbox_sent_at=self.sent_at(days=366))[0] == states.SUCCESS
        assert (the_row().state, effects()) == (State.DONE, 1)

    def test_old_delivery_whose_row_still_exists_is_a_duplicate(self, a_task):
        task = a_task(the_effect, biz_id="order_id")
        deliver(task, "o-1", inbox_sent_at=self.sent_at(days=1))

        assert deliver(task, "o-1", inbox_sent_at=self.sent_at(days=366)) == (states.SUCCESS, {"order": "o-1"})
        assert the_row().duplicates == 1

    @pytest.mark.parametrize("eta", [{"days": 1}, {"days": 29}])
    def test_age_of_a_task_with_an_eta_counts_from_its_eta(self, a_task, eta):
        eta = (datetime.now(UTC) - timedelta(days=eta["days"] - 0.5)).isoformat()

        assert deliver(a_task(the_effect), "o-1", inbox_sent_at=self.sent_at(days=400), eta=eta)[0] == states.SUCCESS
        assert effects() == 1

    @pytest.mark.parametrize("said", [None, "", "yesterday", 17, "2020-01-01T00:00:00", {}])
    def test_delivery_without_a_readable_call_time_is_run(self, a_task, said):
        assert deliver(a_task(the_effect), "o-1", inbox_sent_at=said)[0] == states.SUCCESS
        assert effects() == 1


class TestEagerMode:
    @committing
    def test_eager_task_inside_a_transaction_is_part_of_it(self, local_app, a_task):
        local_app.conf.task_always_eager = True
        task = a_task(the_effect, biz_id="order_id")

        with transaction.atomic():
            task.delay("o-1")
            task.delay("o-1")
            assert (effects(), the_row().duplicates) == (1, 1)
            transaction.set_rollback(True)
        assert (effects(), InboxMessage.objects.count()) == (0, 0)

        with transaction.atomic():
            task.delay("o-1")
        assert (effects(), the_row().state) == (1, State.DONE)

    def test_failed_eager_task_rolls_back_its_own_savepoint_only(self, a_task):
        def fail(order_id):
            the_effect(order_id)
            raise ValueError("no")

        task = a_task(fail, biz_id="order_id")
        with transaction.atomic():
            the_effect("before")
            with pytest.raises(ValueError, match="no"):
                task.apply(["o-1"]).get()

        assert [effect.name for effect in Effect.objects.all()] == ["before"]
        assert not InboxMessage.objects.exists()

    @pytest.mark.parametrize("autoretry_for", [[], [ValueError]])
    def test_eager_retry_runs_after_the_rollback(self, a_task, autoretry_for):
        def again(self, order_id):
            the_effect(order_id, self.request.retries)
            if not self.request.retries:
                if autoretry_for:
                    raise ValueError("not yet")
                raise self.retry()
            return "done"

        task = a_task(again, bind=True, biz_id="order_id", autoretry_for=autoretry_for)

        assert task.apply(["o-1"]).get() == "done"
        assert [effect.detail for effect in Effect.objects.all()] == ["1"]
