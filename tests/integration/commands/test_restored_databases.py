"""What a restore, a switch to a replica, or an upgrade of the operating system leaves wrong in a database of PostgreSQL."""

import threading
from contextlib import ExitStack

import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.db.models import AutoField

from exactly_once.sql.days import day_of
from exactly_once.sql.schema import behind_their_tables, is_missing, our_apps
from inbox import Lease, housekeeping
from inbox.models import InboxMessage, Receipt
from inbox.states import Outcome
from inbox.transactions.running import DatabaseUnavailable
from outbox import cancel, publish, restore
from outbox.models import OutboxMessage
from outbox.states import State
from outbox.store import history
from tests.support.aliases import the_default_at
from tests.support.apps.effects.models import Effect, Unique
from tests.support.deliveries import an_envelope, deliver, effects, options, the_effect, the_row
from tests.support.lower_bounds import at_least
from tests.support.projects import run_in
from tests.support.relaying import published, published_many, set_columns, state_of
from tests.support.shop_day import a_busy_day
from tests.support.sql import as_another_user, executed, fetched

pytestmark = pytest.mark.django_db(transaction=True)
HISTORIES = {"outbox": history.HISTORY, "inbox": housekeeping.HISTORY}


def problems():
    """What the checks of the database say, by their id."""
    return {problem.id: problem for problem in run_checks(databases=["default"])}


def mended():
    for _, statement in behind_their_tables("default"):
        executed(statement)


class TestCollation:
    USE = """
import django
django.setup()
from django.core.management import call_command
from django.db import transaction
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect

call_command("migrate", verbosity=0)
for unique in (True, False):
    for n in range(60):
        with transaction.atomic():
            publish("worker.job", {}, biz_id=f"order-{n}{'' if unique else '-again'}", unique=unique)
call_command("outbox_relay", drain=True, verbosity=0)
print("effects:", Effect.objects.count(), "unique:", OutboxMessage.objects.filter(is_unique=True).count())
"""

    @pytest.fixture
    def database(self, postgres_server):
        """The name of a database with a collation that may change."""
        if postgres_server.start() and connection.pg_version < 150000:
            pytest.skip("PostgreSQL 14 does not store the version of a collation")
        name = postgres_server.create_database(icu_locale="en-US").rpartition("/")[2]
        yield name
        postgres_server.drop_database(name)

    def change(self, database):
        """Have sessions from now on order texts in another way, as after an upgrade: here order-2 comes before order-10."""
        column = "daticulocale" if connection.pg_version < 170000 else "datlocale"
        executed(f"UPDATE pg_database SET {column} = 'en-US-u-kn', datcollversion = '1' WHERE datname = %s", [database])

    @pytest.mark.long
    def test_changed_collation_costs_no_second_effect_and_no_second_unique_message(self, postgres_server, database, tmp_path):
        url, settings = postgres_server.url_of(database), "tests.support.apps.worker.settings"
        before = run_in(tmp_path, settings, "-c", self.USE, DATABASE_URL=url)
        self.change(database)
        after = run_in(tmp_path, settings, "-c", self.USE, DATABASE_URL=url)

        for run in (before, after):
            assert "effects: 120 unique: 60" in run.stdout, run.stdout

    def test_each_text_in_an_index_of_ours_is_compared_by_its_bytes(self):
        """Also in a column that is added later."""
        tables = [model._meta.db_table for app in our_apps() for model in app.get_models()]
        ours = (
            "SELECT DISTINCT i.indexrelid::regclass::text, c.collname FROM pg_index i, unnest(i.indcollation) key "
            "JOIN pg_collation c ON c.oid = key WHERE i.indrelid IN (SELECT t::regclass FROM unnest(%s::text[]) t UNION "
            "SELECT relid FROM unnest(%s::text[]) t, pg_partition_tree(t::regclass))"
        )
        found = executed(ours, [tables, tables])

        assert len(found) > 30
        assert {collation for _, collation in found} == {"C"}, found

    def test_changed_version_of_the_collation_is_a_warning_with_the_statements_to_run(self, database):
        with the_default_at(NAME=database):
            assert "exactly_once.W002" not in problems()
            self.change(database)
            warning = problems()["exactly_once.W002"]

        assert "has version 1 of its collation" in warning.msg
        assert f'`ALTER DATABASE "{database}" REFRESH COLLATION VERSION`' in warning.hint


class TestSequence:
    @pytest.fixture
    def restart(self):
        """Restart a sequence, as a restore of the data alone does."""

        def restarted(model, at=1):
            executed("SELECT setval(pg_get_serial_sequence(%s, 'id'), %s, false)", [model._meta.db_table, at])

        yield restarted
        mended()

    @pytest.mark.parametrize(
        ("name", "model"),
        [
            *((name, model) for name in ("outbox_relay", "inbox_consume") for model in (OutboxMessage, Receipt)),
            ("inbox_outgoing_webhooks", OutboxMessage),
        ],
    )
    def test_process_refuses_to_start_with_a_sequence_behind_its_table_and_starts_after_the_statement(
        self, command, handles, restart, name, model
    ):
        published_many(5)
        deliver(handles(the_effect))
        restart(model)
        with command(name) as process:
            assert process.ends() == 1

        said = process.said().strip()
        assert "\n" not in said
        assert said.startswith("CommandError: In the database 'default', the sequence public.")
        statement = said.partition(" Run `")[2].removesuffix("`.")
        assert statement in problems()["exactly_once.E006"].hint
        executed(statement)
        assert "exactly_once.E006" not in problems()
        with command(name, "--drain") as process:
            assert process.ends() == 0, process.said()

    @pytest.fixture(params=["local://", "amqp"])
    def running(self, command, request):
        """A relay, and with a broker a consumer; the process that runs the handlers."""
        url = request.param if request.param == "local://" else request.getfixturevalue("rabbitmq_url")
        given = {"OUTBOX": {"BROKER_URL": url}, "INBOX": {"BROKER_URL": url, "CONCURRENCY": 1, "MAX_ATTEMPTS": 1}}
        with ExitStack() as processes:
            relay = processes.enter_context(command("outbox_relay", **given))
            runs = relay if url == "local://" else processes.enter_context(command("inbox_consume", **given))
            runs.until(lambda: runs is relay or "receiving from" in runs.said())
            yield runs

    def test_running_process_waits_until_the_statement_is_run_and_blames_no_message(self, running, restart):
        """As a switch to a replica in the middle of its life does."""
        for n in range(30):
            published(topic="worker.job", payload={}, biz_id=f"before-{n}")
        running.until(lambda: effects() == 30)
        restart(Receipt, at=Receipt.objects.earliest("pk").pk)
        for n in range(3):
            published(topic="worker.job", payload={}, biz_id=f"after-{n}")
        running.until(lambda: "Run `SELECT setval('public.inbox_receipt_id_seq'" in running.said())
        assert effects() == 30
        mended()
        running.until(lambda: effects() == 33)

        assert set(InboxMessage.objects.values_list("state", "attempts")) == {("done", 1)}
        assert {row.attempts for row in OutboxMessage.objects.all()} <= {0, 1}

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_running_process_waits_if_its_handler_cannot_publish(self, running, restart, waiting):
        published(topic="worker.job", payload={"do": "chain at the word"}, biz_id="order-1")
        running.until(lambda: Effect.objects.using("other").exists())
        restart(OutboxMessage, at=waiting)
        Unique.objects.create(name="go order-1")
        running.until(lambda: "Run `SELECT setval('public.outbox_outboxmessage_id_seq'" in running.said())
        assert not InboxMessage.objects.filter(state__in=["retrying", "dead"]).exists()
        mended()
        running.until(lambda: effects() == 2)

        assert set(InboxMessage.objects.values_list("state", "attempts")) == {("done", 1)}

    @pytest.fixture
    def waiting(self):
        """The id of the first of some messages that wait; PostgreSQL compares new ids with these only."""
        published_many(5, delay="1h")
        return OutboxMessage.objects.earliest("pk").pk

    def test_handler_is_not_blamed_for_an_id_that_exists(self, handles, restart, waiting):
        handler = handles(lambda message: publish("shop.order.confirmed", {}))
        restart(OutboxMessage, at=waiting)

        with pytest.raises(DatabaseUnavailable):
            deliver(handler)

        assert not InboxMessage.objects.exists()

    def test_id_that_exists_is_found_however_often_its_error_is_wrapped(self, restart, waiting):
        restart(OutboxMessage, at=waiting)
        with pytest.raises(IntegrityError) as raised:
            published()
        again = IntegrityError("order-1")
        again.__cause__ = raised.value

        assert is_missing(raised.value)
        assert is_missing(again)

    def test_attempt_under_a_lease_is_not_counted_if_an_id_exists(self, handles, restart, waiting):
        def publishes(message):
            with transaction.atomic():
                publish("shop.order.confirmed", {})

        handler, given = handles(publishes, lease=Lease()), options(LEASE_STORE="database", MAX_ATTEMPTS=1)
        restart(OutboxMessage, at=waiting)

        assert deliver(handler, given=given) == Outcome.STORED
        assert (the_row().state, the_row().attempts) == ("retrying", 0)

    def test_user_with_usage_alone_is_a_warning_and_what_it_may_read_is_compared(self, restart):
        published_many(5)
        restart(OutboxMessage)
        found = {}
        for name in ("inbox_receipt_id_seq", "outbox_outboxmessage_id_seq", "outbox_outboxmessage_live"):
            with as_another_user(without=name):
                found[name] = problems()
            assert f"may not read {'' if name.endswith('live') else 'public.'}{name}." in found[name]["exactly_once.W003"].msg

        assert "outbox_outboxmessage_id_seq" in found["inbox_receipt_id_seq"]["exactly_once.E006"].msg
        assert "exactly_once.E006" not in found["outbox_outboxmessage_id_seq"]
        assert "exactly_once.W003" not in problems()

    def test_sequence_is_behind_if_only_a_day_of_history_has_its_numbers(self, restart):
        today = day_of("default")
        history.HISTORY.days.make("default", today)
        set_columns(published(), state=State.PUBLISHED)
        assert fetched(f"SELECT count(*) FROM {history.HISTORY.days.name(today)}") == 1
        restart(OutboxMessage)

        assert "outbox_outboxmessage_id_seq" in problems()["exactly_once.E006"].msg

    def test_sequence_of_receipts_is_behind_if_only_messages_have_its_numbers(self, handles, restart):
        deliver(handles(the_effect))
        Receipt.objects.all().delete()
        restart(Receipt)

        assert 'FROM "inbox_inboxmessage"' in problems()["exactly_once.E006"].hint

    def test_sequence_of_each_table_is_compared(self, restart):
        """A trail, an audit log, an alert: an insert fails, too, and with it what it is recorded for."""
        a_busy_day(hours=1)
        models = [model for app in our_apps() for model in app.get_models() if not model._meta.proxy]
        numbered = [model for model in models if isinstance(model._meta.pk, AutoField) and model.objects.exists()]
        for model in numbered:
            restart(model)

        said = "".join(problem.hint for problem in run_checks(databases=["default"]) if problem.id == "exactly_once.E006")
        for model in at_least(12, numbered):
            assert f'(SELECT max(id) FROM "{model._meta.db_table}")' in said

    @pytest.mark.parametrize("is_called", [True, False])
    def test_sequence_whose_next_number_is_the_first_free_one_is_not_behind(self, restart, is_called):
        published_many(5)
        highest = OutboxMessage.objects.latest("pk").pk
        executed("SELECT setval('outbox_outboxmessage_id_seq', %s, %s)", [highest + (not is_called), is_called])

        assert "exactly_once.E006" not in problems()

    def test_rows_that_others_insert_meanwhile_are_not_ahead_of_the_sequence(self):
        stopped = threading.Event()

        def publish_on():
            try:
                while not stopped.is_set():
                    published()
            finally:
                connection.close()

        publisher = threading.Thread(target=publish_on)
        publisher.start()
        try:
            found = [behind_their_tables("default") for _ in range(50)]
        finally:
            stopped.set()
            publisher.join()

        assert OutboxMessage.objects.count() > 50
        assert found == [[]] * 50


class TestPublication:
    """PostgreSQL refuses to update and delete published rows that have no identity, whatever `wal_level` is."""

    @pytest.fixture(params=["in its partition", "in the default partition"])
    def everything_is_published(self, request):
        """All tables, as for change data capture, or a switch to a new server; and where the history of today is."""
        today = day_of("default")
        for kept in HISTORIES.values():
            if request.param == "in its partition":
                kept.days.make("default", today)
            else:
                kept.days.drop("default", today)
        executed("CREATE PUBLICATION everything FOR ALL TABLES")
        yield
        executed("DROP PUBLICATION everything")

    def test_duplicates_are_counted_and_messages_restored_and_purged(self, everything_is_published, handles):
        handler, envelope = handles(the_effect), an_envelope()
        message = published(delay="1h")
        with transaction.atomic():
            cancel(message.id)

        assert [deliver(handler, envelope), deliver(handler, envelope)] == [Outcome.HANDLED, Outcome.DUPLICATE]
        with transaction.atomic():
            assert restore(message.id)
        assert state_of(message) != State.CANCELLED
        assert the_row().duplicates == effects() == 1
        with transaction.atomic():
            cancel(message.id)
        call_command("exactly_once_purge", older_than="0d", verbosity=0)
        assert not OutboxMessage.objects.exists()
        assert not InboxMessage.objects.exists()

    def test_each_partition_has_a_primary_key(self):
        for kept in HISTORIES.values():
            kept.days.make("default", day_of("default"))

        assert not {"outbox.W010", "inbox.W011"} & problems().keys()

    @pytest.mark.parametrize(("app", "check"), [("outbox", "outbox.W010"), ("inbox", "inbox.W011")])
    def test_partition_without_one_is_a_warning_with_the_statement_to_run(self, app, check):
        """As one that was made by hand."""
        executed(f"ALTER TABLE {app}_{app}message_history_default DROP CONSTRAINT {app}_{app}message_history_default_pkey")
        warning = problems()[check]
        executed(warning.hint.partition("`")[2].partition("`")[0])

        assert f"the partition {app}_{app}message_history_default has no primary key" in warning.msg
        assert check not in problems()
