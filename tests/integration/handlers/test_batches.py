"""Many deliveries in one transaction, as a batch or by group commit: each effect happens once and each message fails alone."""

import contextlib
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
from django.db import IntegrityError, connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactly_once.process.clock import monotonic
from inbox import Reject, RetryLater, signals
from inbox.consumer import reception
from inbox.models import InboxMessage
from inbox.operators import accounting
from inbox.states import Outcome, State
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect, Unique
from tests.support.deliveries import (
    OPTIONS,
    InAThread,
    Slow,
    an_envelope,
    at_once,
    deliver,
    drain,
    effects,
    effects_by_name,
    options,
    run_to_the_end,
    the_effect,
    the_row,
)
from tests.support.inbox_rows import delete_messages, rows_of
from tests.support.loads import a_delivery, receive_load, receive_together
from tests.support.signals import listening, recorded_signals
from tests.support.sql import executed

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

every_database = pytest.mark.every_database

HANDLED, DUPLICATE, STORED = Outcome.HANDLED, Outcome.DUPLICATE, Outcome.STORED
DEAD, DEFERRED = Outcome.DEAD, Outcome.DEFERRED
SIGNALS = ("message_handled", "duplicate_suppressed", "conflicting_duplicate", "message_retrying", "message_dead")
POISON = {"poison": True}


def named(*names, payload=None):
    return [an_envelope(payload, biz_id=name) for name in names]


def names_of(count):
    return [f"m{number}" for number in range(count)]


def states():
    return dict(InboxMessage.objects.values_list("biz_id", "state"))


def in_bulk(messages):
    Effect.objects.bulk_create([Effect(name=message.biz_id) for message in messages])


def refuse(message):
    if message.payload.get("poison"):
        raise ValueError("poison")


def refusing(messages):
    in_bulk(messages)
    for message in messages:
        refuse(message)


def one_refusing(message):
    the_effect(message)
    refuse(message)


@pytest.fixture(params=["batch", "group_commit"])
def together(request, handles):
    """A handler of many messages per transaction, as a batch or by group commit; `each` is called for each message."""

    def register(each=one_refusing, *, size=100, **arguments):
        def handle_all(messages):
            for message in messages:
                each(message)

        if request.param == "batch":
            return handles(handle_all, name="tests.together", size=size, **arguments)
        return handles(each, name="tests.together", group_commit=size, **arguments)

    register.way = request.param
    return register


def of(said, name):
    """The arguments of the signals of this name."""
    return [arguments for one, arguments in said if one == name]


@every_database
class TestOneTransaction:
    def test_batch_handler_gets_one_list_in_queue_order(self, handles):
        got = []
        handler = handles(got.append, size=10)

        assert receive_together(handler, named("a", "b", "c")) == [HANDLED] * 3

        assert [[message.biz_id for message in messages] for messages in got] == [["a", "b", "c"]]
        assert {(m.attempt, m.redelivered) for m in got[0]} == {(1, False)}

    def test_no_effect_is_visible_before_the_whole_load_commits(self, together):
        seen = []

        def look(message):
            the_effect(message)
            with InAThread(lambda: (effects(), InboxMessage.objects.count())) as other:
                pass
            seen.append(other.answer)

        receive_together(together(look), named(*names_of(5)))

        assert seen == [(0, 0)] * 5
        assert (effects(), InboxMessage.objects.filter(state=State.DONE).count()) == (5, 5)

    def test_message_handled_is_signalled_after_the_commit_of_the_load(self, together):
        at_the_time = []

        def listen(**arguments):
            at_the_time.append((connection.in_atomic_block, effects()))

        with listening(signals.message_handled, listen):
            receive_together(together(), named(*names_of(3)))

        assert at_the_time == [(False, 3)] * 3

    def test_rows_of_a_group_equal_the_rows_of_single_deliveries(self, handles):
        envelopes = [
            an_envelope(
                {"text": "Zoë \x00 ☃", "n": [1, None]},
                biz_id=name,
                key="k",
                headers={"tenant": "acme", "n": 2},
                correlation_id="c",
                causation_id="d",
                traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            )
            for name in ("a", "b", "ü%s")
        ]
        single, many = handles(the_effect, name="tests.single"), handles(the_effect, name="tests.many", group_commit=10)
        for envelope in envelopes:
            deliver(single, envelope)
        receive_together(many, envelopes)

        rows = rows_of(single.name)
        assert (len(rows), rows_of(many.name)) == (3, rows)
        assert all(row.settled_at >= row.received_at for row in InboxMessage.objects.all())

    def test_failing_on_commit_hook_of_one_message_keeps_the_hooks_of_the_others(self, handles):
        ran = []

        def handle(message):
            transaction.on_commit(partial(fail, message) if message.biz_id == "m1" else partial(ran.append, message.biz_id))

        def fail(message):
            raise RuntimeError(f"the hook of {message.biz_id}")

        handler = handles(handle, group_commit=50)

        assert receive_together(handler, named("m0", "m1", "m2")) == [HANDLED] * 3
        assert ran == ["m0", "m2"]


@every_database
class TestDuplicates:
    def test_duplicates_within_a_load_are_skipped_and_counted(self, together):
        first, other = named("a", "b")
        copy, again = an_envelope(biz_id="a", body=first.body), other

        with recorded_signals(*SIGNALS) as said:
            became = receive_together(together(), [first, other, copy, again, *named("c")])

        assert became == [HANDLED, HANDLED, DUPLICATE, DUPLICATE, HANDLED]
        assert effects_by_name() == {"a": 1, "b": 1, "c": 1}
        assert dict(InboxMessage.objects.values_list("biz_id", "duplicates")) == {"a": 1, "b": 1, "c": 0}
        assert [(arguments["cause"], arguments["biz_id"]) for arguments in of(said, "duplicate_suppressed")] == [
            ("business", "a"),
            ("resend", "b"),
        ]
        assert sorted(arguments["biz_id"] for arguments in of(said, "message_handled")) == ["a", "b", "c"]

    def test_conflicting_duplicate_within_a_load_is_counted_and_signalled(self, together):
        first = an_envelope({"total": 1}, biz_id="a")
        other = an_envelope({"total": 2}, biz_id="a")

        with recorded_signals(*SIGNALS) as said:
            assert receive_together(together(), [first, other]) == [HANDLED, DUPLICATE]

        assert [arguments["biz_id"] for arguments in of(said, "conflicting_duplicate")] == ["a"]
        assert (the_row().conflicts, bytes(the_row().body)) == (1, first.body)


class TestFailingMessage:
    @pytest.mark.parametrize("place", [0, 36, 99])
    def test_failing_message_of_a_load_fails_alone(self, together, place):
        handler = together()
        envelopes = [an_envelope(POISON if number == place else {}, biz_id=f"m{number}") for number in range(100)]

        with recorded_signals(*SIGNALS) as said:
            became = receive_together(handler, envelopes)

        assert became == [STORED if number == place else HANDLED for number in range(100)]
        assert effects_by_name() == {f"m{number}": 1 for number in range(100) if number != place}
        assert len(of(said, "message_handled")) == 99
        assert [arguments["message_id"] for arguments in of(said, "message_retrying")] == [envelopes[place].id]
        assert len(said) == 100
        row = the_row(biz_id=f"m{place}")
        assert (row.state, row.attempts, row.last_error) == (State.RETRYING, 1, "ValueError: poison")
        assert InboxMessage.objects.exclude(pk=row.pk).filter(state=State.DONE, attempts=1).count() == 99

    def test_failing_message_of_a_batch_is_found_by_bisection(self, handles):
        sizes = []

        def handle(messages):
            sizes.append(len(messages))
            refusing(messages)

        handler = handles(handle, size=100)
        receive_together(handler, [an_envelope(POISON if number == 36 else {}) for number in range(100)])

        assert sizes == [100, 50, 25, 25, 12, 6, 6, 3, 3, 1, 2, 1, 1, 13, 50]
        assert effects() == 99

    def test_failing_message_of_a_group_makes_every_message_run_singly(self, handles):
        calls = []

        def handle(message):
            calls.append(message.biz_id)
            one_refusing(message)

        handler = handles(handle, group_commit=5)
        envelopes = [*named("a", "b"), an_envelope(POISON, biz_id="c"), *named("d", "e")]
        receive_together(handler, envelopes)

        assert calls == [*"abc", *"abcde"]

    def test_payload_changed_by_a_failed_run_is_read_again_for_the_next_run(self, together):
        def consume(message):
            message.payload["done"] = message.payload.pop("amount") + len(message.payload)
            the_effect(message)
            refuse(message)

        handler = together(consume)
        envelopes = [an_envelope({"amount": 1, "poison": number == 2}) for number in range(4)]

        assert receive_together(handler, envelopes) == [HANDLED, HANDLED, STORED, HANDLED]
        assert the_row(state=State.RETRYING).last_error == "ValueError: poison"

    @pytest.mark.parametrize(
        ("does", "becomes", "state", "attempts"),
        [
            pytest.param(lambda: RetryLater(timedelta(minutes=1)), STORED, State.RETRYING, 0, id="RetryLater"),
            pytest.param(lambda: Reject("never"), DEAD, State.DEAD, 1, id="Reject"),
            pytest.param(lambda: SystemExit(3), STORED, State.RETRYING, 1, id="sys.exit"),
            pytest.param(KeyboardInterrupt, STORED, State.RETRYING, 1, id="KeyboardInterrupt"),
        ],
    )
    def test_message_that_raises_retry_later_reject_or_exit_settles_alone(self, together, does, becomes, state, attempts):
        def handle(message):
            the_effect(message)
            if message.payload.get("poison"):
                raise does()

        became = receive_together(together(handle), [*named("a"), an_envelope(POISON, biz_id="b"), *named("c")])

        assert became == [HANDLED, becomes, HANDLED]
        assert (the_row(biz_id="b").state, the_row(biz_id="b").attempts) == (state, attempts)
        assert effects_by_name() == {"a": 1, "c": 1}


def swallow_a_database_error():
    with contextlib.suppress(IntegrityError):
        Unique.objects.create(name="taken")


def close_the_connection():
    connection.close()


def commit_by_sql():
    executed("COMMIT")


@every_database
class TestBadHandlers:
    @pytest.mark.parametrize(
        ("misbehave", "reason"),
        [
            (swallow_a_database_error, "can no longer commit"),
            (close_the_connection, "closed the database connection"),
            (commit_by_sql, "must commit together"),
        ],
    )
    def test_message_whose_handler_leaves_no_usable_transaction_fails_alone(self, together, misbehave, reason):
        Unique.objects.create(name="taken")

        def handle(message):
            the_effect(message)
            if message.payload.get("poison"):
                misbehave()

        became = receive_together(together(handle), [*named("a"), an_envelope(POISON, biz_id="b"), *named("c")])

        assert became == [HANDLED, STORED, HANDLED]
        assert effects_by_name() == {"a": 1, "c": 1}
        assert reason in the_row(biz_id="b").last_error

    def test_commit_through_the_driver_makes_the_whole_load_dead_letters(self, together):
        """It committed effects of the other messages as well, and it cannot be known how far each of them was."""

        def handle(message):
            the_effect(message)
            if message.payload.get("poison"):
                connection.connection.commit()

        became = receive_together(together(handle), [*named("a"), an_envelope(POISON, biz_id="b"), *named("c")])

        assert became == [DEAD] * 3
        # SQLite's driver commits each statement after that, PostgreSQL begins another transaction, which is rolled back.
        assert effects_by_name() == {"a": 1, "b": 1, **({"c": 1} if connection.vendor == "sqlite" else {})}
        rows = InboxMessage.objects.all()
        assert [row.state for row in rows] == [State.DEAD] * 3
        assert all("committed by itself" in row.last_error for row in rows)

    def test_async_batch_handler_commits_its_effects(self, handles):
        async def handle(messages):
            for message in messages:
                await Effect.objects.acreate(name=message.biz_id)

        assert receive_together(handles(handle, size=3), named("a", "b")) == [HANDLED] * 2
        assert effects() == 2


class TestPublishing:
    def test_messages_published_by_a_load_commit_once_and_with_their_effects(self, together):
        def handle(message):
            publish("next", {}, biz_id=message.biz_id)
            one_refusing(message)

        receive_together(together(handle), [*named("a"), an_envelope(POISON, biz_id="b"), *named("c")])

        assert sorted(OutboxMessage.objects.values_list("biz_id", flat=True)) == ["a", "c"]

    def test_message_published_in_a_group_has_the_causation_id_of_its_message(self, handles):
        envelopes = named("a", "b")

        receive_together(handles(lambda message: publish("next", {}, biz_id=message.biz_id), group_commit=10), envelopes)

        assert dict(OutboxMessage.objects.values_list("biz_id", "causation_id")) == {
            envelope.biz_id: envelope.id for envelope in envelopes
        }

    def test_message_published_in_a_batch_has_no_causation_id(self, handles):
        receive_together(handles(lambda messages: publish("next", {"of": len(messages)}), size=10), named("a", "b"))

        assert OutboxMessage.objects.get().causation_id == ""


@every_database
class TestMessagesNotRunTogether:
    def test_redelivered_message_runs_singly_with_its_attempt_counted_first(self, handles):
        seen = []

        def handle(messages):
            seen.append(
                [
                    (m.biz_id, InboxMessage.objects.filter(biz_id=m.biz_id, attempts=1, state=State.RECEIVED).exists())
                    for m in messages
                ]
            )
            in_bulk(messages)

        handler = handles(handle, size=10)
        load = [a_delivery(handler, envelope, redelivered=envelope.biz_id in "bd") for envelope in named(*"abcde")]

        assert receive_load(load) == [HANDLED] * 5

        assert seen == [[("a", False), ("c", False), ("e", False)], [("b", True)], [("d", True)]]
        assert effects_by_name() == dict.fromkeys("abcde", 1)

    def test_deliveries_that_waited_too_long_are_stored_and_run_later(self, together):
        given, handler = options(ACK_TIMEOUT=timedelta(seconds=60)), together()
        load = [a_delivery(handler, envelope, waited=31) for envelope in named(*names_of(4))]

        assert receive_load(load, given) == [STORED] * 4

        assert (set(states().values()), effects()) == ({State.RECEIVED}, 0)
        drain()
        assert effects_by_name() == dict.fromkeys(names_of(4), 1)

    def test_load_whose_failed_run_took_too_long_is_stored_and_run_later(self, together, monkeypatch):
        """The failed run took so long that single runs of the whole load would exceed the broker's `consumer_timeout`."""
        begun = []

        def handle(message):
            begun.append(message)
            the_effect(message)
            if len(begun) == 3:
                monkeypatch.setattr(reception, "monotonic", lambda: monotonic() + OPTIONS.longest_silence)
                raise ValueError("slow")

        handler = together(handle)
        load = [a_delivery(handler, envelope) for envelope in named(*names_of(4))]

        assert receive_load(load) == [STORED] * 4

        assert len(begun) == 3
        drain()
        assert effects_by_name() == dict.fromkeys(names_of(4), 1)

    def test_failed_load_is_left_with_the_broker_when_the_consumer_ends(self, together):
        receptions = []

        def receive(reception, load):
            receptions.append(reception)
            reception.receive(load)

        def handle(message):
            receptions[0]._runner.stop.set()
            one_refusing(message)

        handler = together(handle)
        load = [a_delivery(handler, an_envelope(POISON if number == 1 else {})) for number in range(4)]

        assert receive_load(load, by=receive) == [None] * 4
        assert (effects(), InboxMessage.objects.count()) == (0, 0)


class TestConcurrentDuplicates:
    def test_message_being_handled_elsewhere_is_deferred_and_the_others_are_handled(self, together):
        slow = Slow()
        handler = together(lambda message: (slow if message.biz_id == "m2" else the_effect)(message))
        envelopes = named(*names_of(4))
        with slow.inside(lambda: deliver(handler, envelopes[2])):
            became = receive_together(handler, envelopes)
        drain()

        assert became == [HANDLED, HANDLED, STORED, HANDLED]
        assert effects_by_name() == dict.fromkeys(names_of(4), 1)
        assert dict(InboxMessage.objects.values_list("biz_id", "duplicates")) == {"m0": 0, "m1": 0, "m2": 1, "m3": 0}

    def test_concurrent_loads_in_opposite_order_have_one_effect_per_message(self, together):
        """Each load waits for rows of the other, which is a deadlock, many times."""
        handler, envelopes = together(), named(*names_of(10))

        for _ in range(5):
            at_once([partial(receive_together, handler, envelopes), partial(receive_together, handler, envelopes[::-1])])

        assert effects_by_name() == dict.fromkeys(names_of(10), 1)

    @pytest.mark.long
    def test_eight_concurrent_copies_of_a_load_have_one_effect_per_message(self, together):
        handler, envelopes = together(), named(*names_of(20))

        became = at_once([partial(receive_together, handler, envelopes)] * 8)

        assert effects_by_name() == dict.fromkeys(names_of(20), 1)
        counted = Counter(one for load in became for one in load)
        assert counted[HANDLED] == 20
        assert counted[HANDLED] + counted[DUPLICATE] + counted[STORED] + counted[DEFERRED] == 8 * 20
        run_to_the_end()
        assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}
        duplicates = InboxMessage.objects.values_list("duplicates", flat=True)
        assert (len(duplicates), sum(duplicates)) == (20, counted[DUPLICATE] + counted[STORED])


@pytest.mark.long
@every_database
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    loads=st.lists(
        st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["", "", "", "redelivered", "refused"])), min_size=1, max_size=8),
        min_size=1,
        max_size=4,
    ),
    poison=st.sets(st.integers(0, 7), max_size=2),
    batch=st.booleans(),
)
def test_any_loads_account_for_every_delivery_and_have_every_effect_once(handles, loads, poison, batch):
    delete_messages()
    Effect.objects.all().delete()
    handler = (
        handles(refusing, name="tests.any", size=8) if batch else handles(one_refusing, name="tests.other", group_commit=8)
    )
    sent = [
        an_envelope(POISON if number in poison else {}, biz_id=f"m{number}", id=f"00000000-0000-4000-8000-00000000000{number}")
        for number in range(8)
    ]
    deliveries, handled = 0, 0
    for load in loads:
        became = receive_load(
            [
                a_delivery(
                    handler,
                    sent[number]._replace(content_type="application/x-nothing") if how == "refused" else sent[number],
                    redelivered=how == "redelivered",
                )
                for number, how in load
            ]
        )
        deliveries += len(load)
        handled += became.count(HANDLED)
        assert None not in became
        assert DEFERRED not in became

    assert accounting.balance("default").delivered == deliveries
    assert effects() == handled
    run_to_the_end()
    meant = {f"m{number}" for load in loads for number, how in load if how != "refused" and number not in poison}
    assert effects_by_name() == dict.fromkeys(meant, 1)
