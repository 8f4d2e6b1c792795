"""`outbox_publish()` in SQL writes the row that `publish()` writes, or refuses what `publish()` refuses."""

import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import dj_database_url
import psycopg
import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import DatabaseError, transaction
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outbox import InvalidMessage, cancel, doorbell, publish
from outbox.contrib.sql import function
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import State
from outbox.store import history
from outbox.store.dialect import COLUMNS, LIVE_PART
from outbox.store.writing import shard_of
from tests.support.deliveries import drain
from tests.support.open_transactions import OpenTransaction, lock_waits
from tests.support.pages import DOCS, blocks_of
from tests.support.projects import run_in, settings_of
from tests.support.relaying import SECONDS, TOPIC, drained, published, row_of, set_columns
from tests.support.sql import another_session, executed, fetched
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db

PAGE = DOCS / "how-to" / "publish-from-sql.md"
LATER = datetime(2031, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
LONG_AGO = datetime(1999, 1, 1, tzinfo=UTC)
TEXT = json.dumps({"order": 17, "note": 'äé🍰 \n "\\" \\\\ \x00\x1f /', "list": [1.50, None, True, {}, []]}, ensure_ascii=False)
"""A document with spaces between its tokens and in its strings."""


def called(topic, payload, **options):
    """`outbox_publish()` with the arguments of `publish()`, payload and headers as JSON; the message id."""
    if "headers" in options:
        options["headers"] = None if options["headers"] is None else json.dumps(options["headers"])
    if "unique" in options:
        options["is_unique"] = options.pop("unique")
    given = "".join(f", {name} => %s" for name in options)
    return fetched(f"SELECT outbox_publish(%s, %s{given})", [topic, payload, *options.values()])


def columns_of(message_id):
    """All columns of a row; in place of ids and instants what both rows have in common."""
    [values] = executed(f"SELECT {', '.join(COLUMNS)} FROM {LIVE_PART} WHERE message_id = %s", [message_id])
    row = dict(zip(COLUMNS, values, strict=True))
    position, created_at = row.pop("id"), row.pop("created_at")
    assert row.pop("message_id").version == 7
    assert row.pop("shard") == shard_of(row["key"], message_id)
    for name in ("biz_id", "correlation_id"):
        row[name] = "the message id" if row[name] == str(message_id) else row[name]
    if row["deliver_at"] not in {LATER, LONG_AGO}:
        for name in ("deliver_at", "available_at", "expires_at"):
            row[name] = row[name] and row[name] - created_at
    row |= {"body": bytes(row["body"]), "headers": json.dumps(json.loads(row["headers"]))}
    return {**row, "ready_position": row["ready_position"] and row["ready_position"] - position}


OPTIONS = {
    "nothing": {},
    "names": {"biz_id": "ä" * 127, "key": "k" * 255},
    "headers": {
        "headers": {"tenant": "äé🍰", "n": -(2**63), "f": 1.5e300, "g": 1e-7, "z": 3.0, "b": True, "traceparent": "00-1"}
    },
    "long headers": {"headers": {"tenant": "x" * 16_000}},
    "no headers": {"headers": {}},
    "priority": {"priority": 9},
    "delay": {"delay": timedelta(days=200, microseconds=1)},
    "delay and expiry": {"delay": timedelta(hours=3), "expires_in": timedelta(days=3650)},
    "no delay": {"delay": timedelta(), "expires_in": timedelta(seconds=1)},
    "instant": {"deliver_at": LATER, "expires_in": timedelta(minutes=1)},
    "past instant": {"deliver_at": LONG_AGO},
    "unique": {"unique": True, "biz_id": "order-17"},
    "strict order": {"strict_order": True, "key": "customer-4"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_function_and_publish_write_the_same_row(name):
    options = OPTIONS[name]
    executed("SET LOCAL TIME ZONE 'Europe/Berlin'")  # some of its days have 23 or 25 hours
    message_id = called(TOPIC, TEXT, **options)
    executed("SET LOCAL TIME ZONE 'UTC'; DELETE FROM outbox_uniquemessage")
    from_sql = columns_of(message_id)
    with transaction.atomic():
        from_python = columns_of(publish(TOPIC, json.loads(TEXT), **options).id)

    assert from_sql == from_python


def test_with_all_of_the_trail_the_insert_is_recorded_as_publish_records_it(settings):
    settings.OUTBOX = {"TRAIL": "all"}
    assert "was installed with another schema or other settings" in function.why_outdated("default")
    function.install("default")
    with transaction.atomic():
        message_ids = [publish(TOPIC, {}, delay="2m").id, called(TOPIC, "{}", delay="2m")]

    entries = [TrailEntry.objects.values("was", "became", "reason").get(message_id=each) for each in message_ids]
    assert entries == [{"was": "", "became": "scheduled", "reason": ""}] * 2


def test_delay_and_expiry_count_from_the_call_not_from_the_command_of_the_client():
    before = fetched("SELECT clock_timestamp()")
    options = "delay => interval '1 ms', expires_in => interval '1 ms'"
    executed(f"DO $$ BEGIN PERFORM pg_sleep(0.2); PERFORM outbox_publish('{TOPIC}', '{{}}', {options}); END $$")

    row, slept = OutboxMessage.objects.get(), timedelta(seconds=0.2)
    assert before + slept <= row.created_at < row.available_at < row.expires_at


REFUSED = {
    "topic": {"topic": " \u3000"},
    "no topic": {"topic": None},
    "topic with a wildcard": {"topic": "shop.#"},
    "long topic": {"topic": "ä" * 128},
    "biz-id": {"biz_id": ""},
    "line in the biz-id": {"biz_id": "order\n17"},
    "no key": {"key": None},
    "blank key": {"key": " "},
    "priority": {"priority": 10},
    "priority with a key": {"priority": 1, "key": "customer-4"},
    "strict order without a key": {"strict_order": True},
    "unique without a biz-id": {"unique": True},
    "unique as nothing": {"unique": None, "biz_id": "order-17"},
    "two times": {"delay": "2m", "deliver_at": LATER},
    "delay": {"delay": timedelta(seconds=-1)},
    "long delay": {"delay": timedelta(days=3651)},
    "early instant": {"deliver_at": datetime(1970, 1, 1, tzinfo=UTC)},
    "late instant": {"deliver_at": datetime(9998, 1, 1, tzinfo=UTC)},
    "expiry": {"expires_in": timedelta()},
    "headers": {"headers": [1]},
    "header without a name": {"headers": {"": 1}},
    "header of the broker": {"headers": {"X-Death": 1}},
    "header of RabbitMQ": {"headers": {"CC": "a"}},
    "header of nothing": {"headers": {"tenant": None}},
    "header of a list": {"headers": {"tenant": []}},
    "header of a great number": {"headers": {"n": 2**63}},
    "header with a control character": {"headers": {"tenant": "a\x7f"}},
    "long header": {"headers": {"tenant": "ä" * 2731}},
    "header of the trace": {"headers": {"traceparent": 1}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_publish_refuses_is_refused_with_a_sqlstate_and_a_hint(name):
    options = {"topic": TOPIC, **REFUSED[name]}
    with transaction.atomic(), pytest.raises(InvalidMessage):
        publish(payload={}, **options)

    error = refusal(payload="{}", **options)
    assert error.sqlstate == "22023"
    assert error.diag.message_hint
    assert not OutboxMessage.objects.exists()


def refusal(**arguments):
    """What PostgreSQL says; the transaction goes on."""
    with pytest.raises(DatabaseError) as refused, transaction.atomic():
        called(**arguments)
    return refused.value.__cause__


def test_payload_that_is_not_json_or_is_null_or_too_long_is_refused():
    assert refusal(topic=TOPIC, payload='{"a": 1').sqlstate == "22P02"
    assert refusal(topic=TOPIC, payload=r'["\ud800"]').sqlstate == "22P02"
    assert refusal(topic=TOPIC, payload=None).diag.message_hint == "For the JSON value null pass 'null'."
    limit = 1024 * 1024
    too_long = refusal(topic=TOPIC, payload=json.dumps("x" * (limit - 1)))
    assert (too_long.sqlstate, "BODY_LIMIT_BYTES" in str(too_long)) == ("54000", True)

    called(TOPIC, f" {json.dumps('x' * (limit - 2))} ")
    assert len(OutboxMessage.objects.get().body) == limit


texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=6)
"""Those that a parameter of PostgreSQL can have."""
names = texts | st.sampled_from(
    ["a.#", "CC", "Compression", "x-a", "CloudEventsK", "\u2003", "\x85", "\x1c", "*", "İx-", "ä" * 127 + "a"]
)
numbers = st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
as_examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@as_examples
@example(topic=TOPIC, biz_id=None, key="", headers={"a": "\U0001f370" * 1364, "b": "x"})
@example(topic=TOPIC, biz_id=None, key="", headers={"a": "\U0001f370" * 1364, "b": "xxxxxx"})
@given(
    topic=names,
    biz_id=st.none() | names,
    key=names,
    headers=st.dictionaries(names, names | st.booleans() | numbers | st.none(), max_size=2),
)
def test_any_names_and_headers_are_stored_as_publish_stores_them_or_refused_by_both(topic, biz_id, key, headers):
    arguments = {"topic": topic, "biz_id": biz_id, "key": key, "headers": headers}
    with transaction.atomic():
        try:
            from_python = columns_of(publish(payload={}, **arguments).id)
        except InvalidMessage:
            from_python = None
        try:
            with transaction.atomic():
                from_sql = columns_of(called(payload="{}", **arguments))
        except DatabaseError as error:
            from_sql = None if error.__cause__.sqlstate == "22023" else error
        transaction.set_rollback(True)

    assert from_sql == from_python


@as_examples
@given(payload=json_values, indent=st.none() | st.integers(0, 2), in_ascii=st.booleans())
def test_any_payload_has_the_bytes_that_publish_stores_whatever_its_spaces_and_the_same_value_whatever_its_escapes(
    payload, indent, in_ascii
):
    with transaction.atomic():
        expected = bytes(row_of(publish(TOPIC, payload)).body)
        text = json.dumps(payload, indent=indent, ensure_ascii=in_ascii)
        stored = bytes(OutboxMessage.objects.get(message_id=called(TOPIC, text)).body)
        transaction.set_rollback(True)

    assert json.loads(stored) == json.loads(expected)
    assert stored == (json.dumps(payload, separators=(",", ":")).encode() if in_ascii else expected)


class TestUnique:
    @pytest.fixture
    def first(self):
        return published(biz_id="order-17", unique=True)

    def test_second_call_returns_the_first_message_whatever_wrote_it(self, first):
        assert called(TOPIC, "{}", biz_id="order-17", unique=True) == first.id
        mine = called(TOPIC, "{}", biz_id="order-18", unique=True)
        with transaction.atomic():
            again = publish(TOPIC, {}, biz_id="order-18", unique=True)

        assert (again.id, again.created) == (mine, False)
        assert OutboxMessage.objects.count() == 2

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("days", [0, 3, 400], ids=["today", "three days ago", "in the default partition"])
    def test_published_message_is_found_in_history_without_keeping_locks_and_with_the_rights_of_a_publisher(self, first, days):
        day = fetched("SELECT extract(epoch FROM now())::bigint / 86400") - days
        if days < 100:
            history.HISTORY.days.make("default", day)
        set_columns(first, state=State.PUBLISHED, day=day)

        with transaction.atomic():
            as_a_publisher()
            assert called(TOPIC, "{}", biz_id="order-17", unique=True) == first.id
            assert executed(LOCKED_PARTITIONS) == []
            assert called(TOPIC, "{}", biz_id="order-18", unique=True) != first.id
            transaction.set_rollback(True)

    def test_after_one_that_was_cancelled_or_deleted_a_new_one_is_written(self, first):
        with transaction.atomic():
            assert cancel(first.id)
        second = called(TOPIC, "{}", biz_id="order-17", unique=True)
        OutboxMessage.objects.filter(message_id=second).delete()
        third = called(TOPIC, "{}", biz_id="order-17", unique=True)

        assert len({first.id, second, third}) == 3
        assert fetched("SELECT message_id FROM outbox_uniquemessage") == third


@pytest.mark.django_db(transaction=True)
def test_of_two_unique_messages_at_once_the_second_waits_and_is_the_first_if_that_was_committed():
    unique = {"biz_id": "order-17", "unique": True}
    ids = []
    for end in (OpenTransaction.rolls_back, OpenTransaction.commits):
        first, second = OpenTransaction(), OpenTransaction()
        ids.append(first.does(called, TOPIC, "{}", **unique).result(SECONDS))
        waiting = second.does(called, TOPIC, "{}", **unique)
        wait_until(lambda: lock_waits() == 1)
        end(first)
        ids.append(waiting.result(SECONDS))
        second.rolls_back()
        for each in (first, second):
            each.ends().shutdown()

    assert [ids[0] == ids[1], ids[2] == ids[3]] == [False, True]


def as_a_publisher():
    """Until the end of the transaction, as a user with the rights that the page on PostgreSQL names."""
    tables = "outbox_outboxmessage, outbox_outboxmessage_live, outbox_outboxmessage_history, outbox_uniquemessage"
    executed(
        f"CREATE ROLE a_publisher; GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO a_publisher; "
        "GRANT SELECT, USAGE ON SEQUENCE outbox_outboxmessage_id_seq TO a_publisher; SET LOCAL ROLE a_publisher"
    )


LOCKED_PARTITIONS = (
    "SELECT relation::regclass FROM pg_locks WHERE pid = pg_backend_pid() "
    "AND relation::regclass::text ~ 'outboxmessage_([0-9]|history_)'"
)


@pytest.mark.django_db(transaction=True)
def test_with_strict_order_another_transaction_of_the_key_waits_for_the_commit_also_if_it_is_in_python():
    first = OpenTransaction()
    first.does(called, TOPIC, "{}", key="customer-1", strict_order=True).result(SECONDS)
    second = OpenTransaction()
    waiting = second.publishes("customer-1")
    wait_until(lambda: lock_waits() == 1)

    first.commits()
    waiting.result(SECONDS)
    second.commits()
    for each in (first, second):
        each.ends().shutdown()

    rows = OutboxMessage.objects.order_by("pk")
    assert [later.created_at >= earlier.created_at for earlier, later in pairwise(rows)] == [True]


@pytest.mark.django_db(transaction=True)
def test_message_of_a_client_without_django_is_relayed_to_its_handler(handles):
    received = []
    handles(lambda message: received.append((message.id, message.biz_id, message.payload, message.headers)))
    with another_session(autocommit=True) as client:
        client.execute("SET search_path = pg_catalog")  # that of the outbox was found when it was installed
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="topic is ''"):
            client.execute("SELECT public.outbox_publish('', '{}')")
        call = "SELECT public.outbox_publish(%s, %s, biz_id => %s, headers => json_build_object('tenant', %s::text))"
        [message_id] = client.execute(call, [TOPIC, '{"order": 17}', "order-17", "blue"]).fetchone()

    drained("local://")
    drain()
    assert received == [(str(message_id), "order-17", {"order": 17}, {"tenant": "blue"})]


HOSTILE = """
CREATE SCHEMA hostile;
CREATE FUNCTION hostile.octet_length(text) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile function'; END $$;
CREATE FUNCTION hostile.same(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile operator'; END $$;
CREATE OPERATOR hostile.= (LEFTARG = text, RIGHTARG = text, FUNCTION = hostile.same);
SET LOCAL search_path = hostile, pg_catalog, public;
"""


def test_functions_and_operators_of_the_callers_search_path_are_not_used():
    executed(HOSTILE)
    with pytest.raises(DatabaseError, match="hostile"), transaction.atomic():
        executed("SELECT octet_length('a'::text)")
    [[message_id]] = executed("SELECT outbox_publish('a.b', '{}', biz_id => 'x', is_unique => true)")
    [[path]] = executed("SHOW search_path")
    executed("SET LOCAL search_path = public")

    assert OutboxMessage.objects.get().message_id == message_id
    assert path == "hostile, pg_catalog, public"


def test_trigger_of_the_page_publishes_in_the_transaction_of_each_new_row():
    [trigger] = [block.code for block in blocks_of(PAGE) if block.title == "trigger"]
    executed(f"CREATE TABLE orders_order (number text, sku text); {trigger}")

    executed("INSERT INTO orders_order VALUES ('17', 'mug'), ('18', 'pen')")
    with transaction.atomic():
        executed("INSERT INTO orders_order VALUES ('19', 'cup')")
        transaction.set_rollback(True)

    rows = OutboxMessage.objects.order_by("pk").values_list("topic", "biz_id", "body")
    assert [(topic, biz_id, json.loads(bytes(body))) for topic, biz_id, body in rows] == [
        ("shop.order.placed", "order-17", {"order": "17", "sku": "mug"}),
        ("shop.order.placed", "order-18", {"order": "18", "sku": "pen"}),
    ]


def test_page_notifies_on_the_channel_that_relays_listen_on():
    assert [block.source for block in blocks_of(PAGE) if "NOTIFY" in block.source] == [f"NOTIFY {doorbell.CHANNEL};\n"]


def test_arguments_of_several_collations_are_accepted():
    executed(
        'CREATE TABLE named (topic text COLLATE "C", biz_id text COLLATE "und-x-icu", key text); '
        "INSERT INTO named VALUES ('a.b', 'order-17', 'customer-4')"
    )
    for _ in range(2):
        executed(
            "SELECT outbox_publish(topic, '{}', biz_id => biz_id, key => key, headers => json_build_object('k', key), "
            "is_unique => true) FROM named"
        )

    assert OutboxMessage.objects.get().biz_id == "order-17"


class TestVersions:
    EARLIER = """
        DROP FUNCTION outbox_publish;
        CREATE FUNCTION outbox_publish(topic text, payload json, extra text) RETURNS uuid LANGUAGE plpgsql AS $$
        -- publish() of django-exactly-once, version {version}.
        BEGIN RETURN NULL; END $$
    """

    def found(self):
        """What the check says, and the number of functions."""
        functions = fetched("SELECT count(*) FROM pg_proc WHERE proname = 'outbox_publish'")
        messages = [each for each in run_checks(databases=["default"]) if each.id == "outbox_sql.W001"]
        assert all(each.hint == "Run `python manage.py migrate outbox_sql --database default`." for each in messages)
        return [each.msg.partition("'default' ")[2] for each in messages], functions

    def test_earlier_version_is_reported_and_replaced_by_migrate(self):
        assert self.found() == ([], 1)
        executed(self.EARLIER.format(version=0))
        assert self.found() == ([f"has version 0, and this code has version {function.VERSION}."], 1)

        call_command("migrate", "outbox_sql", verbosity=0)
        assert self.found() == ([], 1)
        assert called(TOPIC, "{}")

    def test_later_version_is_kept(self):
        executed(self.EARLIER.format(version=function.VERSION + 1))
        call_command("migrate", "outbox_sql", verbosity=0)
        assert self.found() == ([], 1)
        assert fetched("SELECT outbox_publish('', '{}', '')") is None

    def test_other_settings_and_a_dropped_function_are_reported_and_mended_by_migrate(self, settings):
        settings.OUTBOX = {"BODY_LIMIT_BYTES": "ten"}
        assert self.found() == ([], 1), "outbox.E001 says so"
        settings.OUTBOX = {"BODY_LIMIT_BYTES": 10}
        assert self.found() == (["was installed with another schema or other settings, or changed by hand."], 1)
        call_command("migrate", "outbox_sql", verbosity=0)
        assert self.found() == ([], 1)
        assert refusal(topic=TOPIC, payload='"123456789"').sqlstate == "54000"
        executed("DROP FUNCTION outbox_publish")
        assert self.found() == (["does not exist."], 0)
        call_command("migrate", "outbox_sql", verbosity=0)
        assert self.found() == ([], 1)

    def test_unapplied_migration_drops_it_and_nothing_installs_it_again(self):
        call_command("migrate", "outbox_sql", "zero", verbosity=0)
        call_command("migrate", "outbox", verbosity=0)
        assert self.found() == ([], 0)


LABELLED = """
from outbox.apps import OutboxConfig


class Shop(OutboxConfig):
    label = "shop_outbox"
"""
IN_A_SCHEMA = """
import django
django.setup()
from django.core.management import call_command
from django.db import connection

with connection.cursor() as cursor:
    cursor.execute('CREATE SCHEMA "Tenant A"')
call_command("migrate", verbosity=0)
call_command("check", databases=["default"], fail_level="WARNING")
with connection.cursor() as cursor:
    cursor.execute("SET search_path = public")
    for count in (1, 1):
        cursor.execute('''SELECT "Tenant A".shop_outbox_publish('a.b', '{}', biz_id => 'x', is_unique => true)''')
    cursor.execute('SELECT biz_id, state FROM "Tenant A".shop_outbox_outboxmessage')
    assert cursor.fetchall() == [("x", "ready")], cursor.fetchall()
call_command("migrate", "outbox_sql", "zero", verbosity=0)
"""


def test_function_is_in_the_schema_of_the_outbox_with_its_label_and_names_that_schema(postgres_server, tmp_path):
    database = dj_database_url.parse(postgres_server.create_database())
    database["OPTIONS"] = {"options": '-c search_path="Tenant\\ A"'}
    (tmp_path / "labelled.py").write_text(LABELLED)
    text = settings_of("labelled.Shop", "outbox.contrib.sql", database=database, OUTBOX={"BROKER_URL": "amqp://localhost//"})
    (tmp_path / "shop_settings.py").write_text(text)

    done = run_in(tmp_path, "shop_settings", "-c", IN_A_SCHEMA)

    assert done.returncode == 0, done.stdout


@pytest.mark.every_database
@pytest.mark.only_sqlite
@pytest.mark.django_db(transaction=True)
def test_on_sqlite_the_migration_does_nothing():
    call_command("migrate", "outbox_sql", "zero", verbosity=0)
    call_command("migrate", "outbox_sql", verbosity=0)

    assert function.why_outdated("default") == ""
