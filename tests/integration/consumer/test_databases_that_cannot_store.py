"""A database that answers and cannot store: no delivery is acknowledged, none goes back to the broker, none is lost."""

from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from django.db import connections, transaction

from inbox import Lease
from inbox.consumer.topology import queue_name
from inbox.handlers.kinds import PLAIN, Pulled
from inbox.models import InboxMessage
from inbox.states import Outcome, State
from outbox import publish
from tests.support.aliases import unresolvable
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.deliveries import an_envelope, deliver
from tests.support.loads import receive_together
from tests.support.sql import executed
from tests.support.waiting import pass_by, wait_until
from tests.support.workers import broker_options, consumers_of, consuming, send_all

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.long]

TOPIC = "stored.elsewhere"
LIMIT = 1
"""Deliveries after which the broker drops a message, by a policy."""
EXPOSURE_SECONDS = 3.0
"""For so long the database cannot store: longer than it took a consumer that requeues once a second to reach the limit."""


def effect_on_other(message):
    Effect.objects.using("other").create(name=message.biz_id)


def effects_on_other():
    return Counter(Effect.objects.using("other").values_list("name", flat=True))


execute = partial(executed, using="other")


def end_other_sessions():
    """End every session of the database but this one: new sessions have the present settings of ALTER DATABASE."""
    execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


@contextmanager
def altered(do, undo):
    execute(do)
    end_other_sessions()
    try:
        yield
    finally:
        execute(undo)


def database():
    return connections["other"].ops.quote_name(connections["other"].settings_dict["NAME"])


@contextmanager
def read_only():
    """As a standby is, after a failover; its sessions stay so for as long as they live."""
    with altered(
        f"ALTER DATABASE {database()} SET default_transaction_read_only = on",
        f"ALTER DATABASE {database()} RESET default_transaction_read_only",
    ):
        yield


@contextmanager
def without_rights():
    execute("DROP ROLE IF EXISTS without_rights; CREATE ROLE without_rights")
    with altered(f"ALTER DATABASE {database()} SET role = without_rights", f"ALTER DATABASE {database()} RESET role"):
        yield
    end_other_sessions()
    execute("DROP ROLE without_rights")


def renamed(what, name):
    return lambda: altered(f"ALTER TABLE inbox_inboxmessage {what.format(name, 'away')}", undo_of(what, name))


@contextmanager
def refused(sqlstate, when="NEW.message_id LIKE 'bad%'"):
    """The database cannot store the rows of this condition: a trigger says what the server would say."""
    execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{sqlstate}'; END $$; "
        "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON inbox_inboxmessage FOR EACH ROW "
        f"WHEN ({when}) EXECUTE FUNCTION refuse()"
    )
    try:
        yield
    finally:
        execute("DROP TRIGGER refuse ON inbox_inboxmessage; DROP FUNCTION refuse()")


def undo_of(what, name):
    table = "away" if what == "RENAME TO {1}" else "inbox_inboxmessage"
    return f"ALTER TABLE {table} {what.format('away', name)}"


PROBLEMS = {
    "read-only": (read_only, "primary"),
    "missing table": (renamed("RENAME TO {1}", "inbox_inboxmessage"), "migrate inbox --database other"),
    "missing column": (renamed("RENAME COLUMN {0} TO {1}", "traceparent"), "migrate inbox --database other"),
    "missing right": (without_rights, "Grant"),
    "full disk": (partial(refused, "53100", "true"), "Free disk space"),
    "full memory": (partial(refused, "53200", "true"), "Free memory"),
    "I/O error": (partial(refused, "58030", "true"), "log"),
}


@pytest.fixture
def limited(rabbitmq_server, rabbitmq_url):
    """A policy that has the broker drop what it has delivered several times, as an operator may set for all queues."""
    rabbitmq_server.set_policy(rabbitmq_url, {"delivery-limit": LIMIT})
    return rabbitmq_url


@pytest.fixture
def handler(handling):
    return handling(effect_on_other, name="tests.elsewhere", topic=TOPIC, using="other")


def names(count):
    return [f"m{number}" for number in range(count)]


def send_ten(url):
    send_all(url, TOPIC, [(name, {}) for name in names(10)])


def wait_for_subscription(url, name):
    wait_until(lambda: consumers_of(url, name))


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("inbox") or "outage" in record.name]


@pytest.mark.parametrize(
    ("problem", "given"),
    [
        *((problem, {}) for problem in PROBLEMS),
        *((problem, {"ordered": True}) for problem in ("read-only", "missing column", "full disk")),
        *((problem, {"group_commit": 4}) for problem in ("read-only", "missing column", "full disk")),
    ],
    ids=str,
)
def test_deliveries_survive_a_database_that_cannot_store_on_a_queue_with_a_delivery_limit(
    handles, limited, length, caplog, problem, given
):
    broken, remedy = PROBLEMS[problem]
    handler, given_options = handles(effect_on_other, topic=TOPIC, using="other", **given), broker_options(limited)
    with consuming([handler], given_options):
        wait_for_subscription(limited, queue_name(handler, given_options))
        with broken():
            send_ten(limited)
            wait_until(lambda: "is unavailable" in caplog.text)
            pass_by(EXPOSURE_SECONDS)
            assert length(handler) == 10
            logged = [
                line
                for line in lines_of(caplog)
                if not line.startswith(("consumer: receiving from", "consumer: the management API"))
            ]
        wait_until(lambda: len(effects_on_other()) == 10)
        wait_until(lambda: length(handler) == 0)

    assert effects_on_other() == dict.fromkeys(names(10), 1)
    rows = InboxMessage.objects.using("other").values_list("state", "attempts", "redeliveries")
    assert set(rows) == {(State.DONE, 1, 0)}
    assert len(logged) == 1, logged
    assert "The database 'other' is unavailable" in logged[0]
    assert remedy in logged[0]


def test_restarts_while_the_database_cannot_store_do_not_count_against_the_delivery_limit(handler, limited, length, caplog):
    given = broker_options(limited)
    send_ten(limited)
    with read_only():
        for _ in range(LIMIT + 2):
            caplog.clear()
            with consuming([handler], given):
                wait_until(lambda: "is unavailable" in caplog.text)
                pass_by(0.2)
    with consuming([handler], given):
        wait_until(lambda: length(handler) == 0)

    assert effects_on_other() == dict.fromkeys(names(10), 1)
    assert set(InboxMessage.objects.using("other").values_list("redeliveries", flat=True)) == {0}


@pytest.mark.parametrize("given", [{}, {"ordered": True}], ids=["single", "ordered"])
def test_outage_longer_than_the_ack_timeout_returns_deliveries_to_the_broker_once(handles, limited, length, caplog, given):
    handler = handles(effect_on_other, topic=TOPIC, using="other", **given)
    given_options = broker_options(limited, ACK_TIMEOUT=timedelta(seconds=1.5))
    name = queue_name(handler, given_options)
    with consuming([handler], given_options):
        wait_for_subscription(limited, name)
        with read_only():
            send_ten(limited)
            wait_until(lambda: "They were returned to the broker" in caplog.text)
            pass_by(EXPOSURE_SECONDS)
            assert consumers_of(limited, name) == 0
            assert length(handler) == 10
        wait_until(lambda: length(handler) == 0)
        wait_until(lambda: len(effects_on_other()) == 10)

    assert effects_on_other() == dict.fromkeys(names(10), 1)
    assert caplog.text.count("They were returned to the broker") == 1


def test_table_lock_does_not_count_against_the_delivery_limit(handler, limited, length):
    """Another session alters the table of the inbox, and no delivery can be stored meanwhile."""
    given = broker_options(limited)
    with consuming([handler], given):
        wait_for_subscription(limited, queue_name(handler, given))
        with transaction.atomic(using="other"):
            execute("LOCK TABLE inbox_inboxmessage IN ACCESS EXCLUSIVE MODE")
            send_ten(limited)
            pass_by(EXPOSURE_SECONDS)
            assert length(handler) == 10
        wait_until(lambda: length(handler) == 0)

    assert effects_on_other() == dict.fromkeys(names(10), 1)


@pytest.mark.parametrize(
    "given",
    [{}, {"ordered": True}, {"group_commit": 4}, {"lease": Lease()}],
    ids=["single", "ordered", "group_commit", "lease"],
)
def test_message_whose_values_the_database_refuses_is_a_dead_letter_and_delays_no_other(handling, length, rabbitmq_url, given):
    handler, given_options = handling(effect_on_other, topic=TOPIC, using="other", **given), broker_options(rabbitmq_url)
    send_all(rabbitmq_url, TOPIC, [(name, {"name": name}) for name in ("first", "bad", "bad", "last")])
    with refused("23514"), consuming([handler], given_options):
        wait_until(lambda: length(handler) == 0)
        wait_until(lambda: len(effects_on_other()) == 2)

    assert effects_on_other() == {"first": 1, "last": 1}
    dead = InboxMessage.objects.using("other").get(state=State.DEAD)
    assert (bytes(dead.body), dead.duplicates) == (b'{"name": "bad"}', 1)
    assert "The database refuses its values" in dead.last_error


REMEDIES = {"53100": "Free disk space", "58030": "see the server's log", "42501": "Grant"}


def send_one_bad_among_others(url):
    send_all(url, TOPIC, [(name, {}) for name in ("first", "bad", *names(10))])
    return {"first", *names(10)}


@pytest.mark.parametrize(
    ("sqlstate", "given"),
    [
        pytest.param("53100", {}, id="full disk"),
        pytest.param("58030", {}, id="I/O error"),
        pytest.param("42501", {}, id="missing right"),
        pytest.param("P0001", {}, id="trigger"),
        pytest.param("XX001", {}, id="damaged page"),
        pytest.param("P0001", {"group_commit": 4}, id="group_commit"),
        pytest.param("P0001", {"size": 5}, id="batch"),
        pytest.param("P0001", {"lease": Lease()}, id="lease"),
    ],
)
def test_message_that_alone_cannot_be_stored_delays_no_other_and_is_handled_when_it_can(
    handling, length, rabbitmq_url, caplog, sqlstate, given
):
    def effects(messages):
        for message in messages if isinstance(messages, list) else [messages]:
            effect_on_other(message)

    handler, given_options = handling(effects, topic=TOPIC, using="other", **given), broker_options(rabbitmq_url)
    others = send_one_bad_among_others(rabbitmq_url)
    with refused(sqlstate), consuming([handler], given_options):
        wait_until(lambda: effects_on_other() == dict.fromkeys(others, 1))
        wait_until(lambda: length(handler) == 1 and "while other messages can" in caplog.text)
        [logged] = [line for line in lines_of(caplog) if "refused" in line]
    with consuming([handler], given_options):
        wait_until(lambda: length(handler) == 0)
        wait_until(lambda: "bad" in effects_on_other())

    assert effects_on_other() == dict.fromkeys({*others, "bad"}, 1)
    assert f"{handler.name}: message bad cannot be stored, while other messages can" in logged
    assert REMEDIES.get(sqlstate, "Look for a trigger") in logged


def test_handler_of_which_no_message_can_be_stored_holds_no_more_than_its_prefetch_and_delays_no_other_handler(
    handling, length, rabbitmq_url, caplog
):
    stuck = handling(effect_on_other, name="tests.stuck", topic="stored.nowhere", using="other")
    other = handling(effect_on_other, name="tests.elsewhere", topic=TOPIC, using="other")
    send_all(rabbitmq_url, "stored.nowhere", [(f"bad{number}", {}) for number in range(10)])
    with refused("P0001"), consuming([stuck, other], broker_options(rabbitmq_url, PREFETCH=3)) as consumer:
        wait_until(lambda: consumer.outcomes[Outcome.UNSTORED] == 3)
        send_ten(rabbitmq_url)
        wait_until(lambda: len(effects_on_other()) == 10)
        assert consumer.outcomes[Outcome.UNSTORED] == 3
        assert length(stuck) == 10
        assert len([line for line in lines_of(caplog) if "refused" in line]) == 1


def test_later_messages_of_an_ordered_handler_wait_for_one_that_cannot_be_stored(handling, rabbitmq_url, caplog):
    handler, given = handling(effect_on_other, topic=TOPIC, using="other", ordered=True), broker_options(rabbitmq_url)
    others = send_one_bad_among_others(rabbitmq_url)
    with ExitStack() as refusing:
        # Before the consumer starts: it stores the whole queue at once.
        refusing.enter_context(refused("P0001"))
        with consuming([handler], given):
            wait_until(lambda: "is unavailable" in caplog.text)
            pass_by(0.5)
            assert set(effects_on_other()) <= {"first"}
            refusing.close()
            wait_until(lambda: effects_on_other() == dict.fromkeys({*others, "bad"}, 1))


def test_message_that_cannot_be_stored_does_not_harm_the_others_that_are_stored_with_it(handles):
    handler = replace(handles(effect_on_other, topic=TOPIC, using="other"), kind=Pulled())
    envelopes = [an_envelope({"name": name}, topic=TOPIC, biz_id=name) for name in ("a", "bad", "b")]
    # Whatever the dead letter is called, its body cannot be stored either.
    with refused("23514", "position('bad'::bytea IN NEW.body) > 0"):
        assert receive_together(handler, envelopes) == [Outcome.STORED, Outcome.UNSTORED, Outcome.STORED]

    rows = InboxMessage.objects.using("other").values_list("biz_id", "state", "attempts", "duplicates")
    assert sorted(rows) == [("a", State.RECEIVED, 0, 0), ("b", State.RECEIVED, 0, 0)]


def rows_of_each_transaction():
    """How many rows each transaction has inserted, the smallest first."""
    found = executed("SELECT count(*) FROM inbox_inboxmessage GROUP BY xmin::text ORDER BY 1", using="other")
    return [count for (count,) in found]


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
def test_load_with_refused_values_is_halved_and_stored_in_order(handles, ordered):
    handler = replace(handles(effect_on_other, using="other", ordered=ordered), kind=PLAIN if ordered else Pulled())
    names_of_load = [*(f"m{number:02}" for number in range(11)), "m11-bad", *(f"m{number}" for number in range(12, 32))]
    with refused("23514", "NEW.message_id LIKE '%bad'"):
        became = receive_together(handler, [an_envelope(id=name, biz_id=name, key="k") for name in names_of_load])

    assert became == [Outcome.STORED] * 11 + [Outcome.DEAD] + [Outcome.STORED] * 20
    assert rows_of_each_transaction() == [1, 1, 2, 4, 8, 16]
    stored = InboxMessage.objects.using("other").order_by("pk")
    assert [row.biz_id for row in stored if row.state != State.DEAD] == [name for name in names_of_load if name != "m11-bad"]


def test_group_that_the_database_refuses_is_halved(handles):
    handler = handles(effect_on_other, using="other", group_commit=16)
    envelopes = [an_envelope(id=f"m{number}", biz_id=f"m{number}") for number in range(15)]
    with refused("P0001"):
        became = receive_together(handler, [*envelopes, an_envelope(id="bad", biz_id="bad")])

    assert became == [Outcome.HANDLED] * 15 + [Outcome.UNSTORED]
    assert rows_of_each_transaction() == [1, 2, 4, 8]


@pytest.fixture
def measurements():
    """A project's own table in partitions, which has none for most of its rows."""
    execute(
        "CREATE TABLE measurements (at int) PARTITION BY RANGE (at); "
        "CREATE TABLE measurements_1 PARTITION OF measurements FOR VALUES FROM (1) TO (2)"
    )
    yield
    execute("DROP TABLE measurements")


@pytest.mark.usefixtures("measurements")
@pytest.mark.parametrize(
    ("statement", "error"),
    [
        pytest.param("SELECT * FROM missing", "ProgrammingError", id="missing table"),
        pytest.param("INSERT INTO measurements VALUES (7)", "IntegrityError", id="row without a partition"),
        pytest.param("INSERT INTO measurements_1 VALUES (7)", "IntegrityError", id="row in a wrong partition"),
    ],
)
def test_error_about_a_table_of_the_project_is_a_failed_attempt_of_its_handler(handles, statement, error):
    deliver(handles(lambda message: execute(statement), using="other"), an_envelope())

    row = InboxMessage.objects.using("other").get()
    assert (row.state, row.attempts, row.error_class) == (State.RETRYING, 1, f"django.db.utils.{error}")


def test_relay_on_local_continues_when_a_read_only_database_is_writable_again(handler, process_environment, command):
    """A session that was opened while the database was read-only stays read-only."""
    process_environment["DATABASE_URL"] = process_environment["OTHER_DATABASE_URL"]
    given = {"INBOX": {"POLL_INTERVAL": timedelta(seconds=0.1)}, "OUTBOX": {"BROKER_URL": "local://"}}
    with read_only(), command("outbox_relay", **given) as relay:
        # The runner asks the database, when it has met the error, whether that can store.
        relay.until(lambda: "The database 'default' is unavailable" in relay.said())
        for name in names(20):
            with transaction.atomic(using="other"):
                publish(JOB, {}, biz_id=name, using="other")
        execute(f"ALTER DATABASE {database()} RESET default_transaction_read_only")
        relay.until(lambda: len(effects_on_other()) == 20)
        relay.until(lambda: "The database 'default' is available again" in relay.said())


def test_consumer_waits_while_the_name_of_its_database_does_not_resolve(handler, rabbitmq_url, caplog):
    with consuming([handler], broker_options(rabbitmq_url)):
        send_ten(rabbitmq_url)
        wait_until(lambda: effects_on_other() == Counter(names(10)))
        with unresolvable("other"):
            end_other_sessions()
            send_all(rabbitmq_url, TOPIC, [(f"late-{number}", {}) for number in range(5)])
            wait_until(lambda: "failed to resolve host" in caplog.text)
        wait_until(lambda: sum(effects_on_other().values()) == 15)

    assert [record for record in caplog.records if record.exc_info] == []
    assert not InboxMessage.objects.using("other").filter(attempts__gt=1).exists()
