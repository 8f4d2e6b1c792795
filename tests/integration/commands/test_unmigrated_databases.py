"""Migrations back and forth; a database that is not migrated is refused at the start, in one line that names what to run."""

import json
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from exactly_once.models import Process as ProcessRow
from outbox.models import OutboxMessage
from outbox.states import State
from outbox.store import settling
from outbox.store.dialect import live
from outbox.store.settling import Settlement
from tests.support.commands import output_of
from tests.support.own_apps import OWN_APPS
from tests.support.relaying import published, row_of, state_of
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(transaction=True)
every_database = pytest.mark.every_database

NEWEST = {app: MigrationLoader(None).graph.leaf_nodes(app)[0] for app in OWN_APPS if app.startswith(("outbox", "inbox"))}


@pytest.fixture(params=["outbox", "inbox"])
def half_migrated(request):
    """The app that lacks a column, as before its newest migration."""
    table, (app, migration) = f"{request.param}_{request.param}message", NEWEST[request.param]
    executed(f"ALTER TABLE {table} RENAME COLUMN traceparent TO hidden")
    MigrationRecorder(connection).record_unapplied(app, migration)
    yield request.param
    executed(f"ALTER TABLE {table} RENAME COLUMN hidden TO traceparent")
    MigrationRecorder(connection).record_applied(app, migration)


def refusal(process):
    """What a process that is refused says, without the time and level of a log line."""
    with process:
        assert process.ends() == 1
    return process.said().strip()


@every_database
def test_process_on_a_half_migrated_database_ends_with_one_line_that_names_the_migrations(half_migrated, command):
    """With local:// the relay needs the tables of both apps."""
    name = {"outbox": "outbox_relay", "inbox": "inbox_consume"}[half_migrated]
    said = [refusal(command(name))]
    if half_migrated == "inbox":
        said.append(refusal(command("outbox_relay", OUTBOX={"BROKER_URL": "local://"})))

    for line in said:
        assert "\n" not in line
        assert line.startswith(f"CommandError: The database 'default' is not migrated for this version of '{half_migrated}': ")
        assert f"Run `python manage.py migrate {half_migrated}`, which applies {NEWEST[half_migrated][1]}" in line


COMMANDS = [["exactly_once_status"], ["exactly_once_purge"], ["exactly_once_export"], ["exactly_once_import", "no file"]]
TRAIL = ["exactly_once_trail", "0f7a2c1e-5b7d-4f0a-9c55-3a1f0a3f2a10"]
OF_ONE = {"outbox": [["outbox_restore"], ["outbox_resume", "--checks"]], "inbox": [["inbox_retry"]]}


@every_database
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_other_commands_on_a_half_migrated_database_name_the_migration_to_run(half_migrated):
    for command in [*COMMANDS, *OF_ONE[half_migrated], TRAIL, [*TRAIL, "--database", "default"]]:
        with pytest.raises(CommandError, match=f"Run `python manage.py migrate {half_migrated}`") as refused:
            call_command(*command)

        assert "\n" not in str(refused.value)


def test_relay_of_an_outbox_alone_does_not_ask_for_the_tables_of_the_inbox(command, rabbitmq_url):
    with without_the_tables_of("inbox"), command("outbox_relay", "--drain", OUTBOX={"BROKER_URL": rabbitmq_url}) as relay:
        assert relay.ends() == 0, relay.said()


@contextmanager
def without_the_tables_of(*apps):
    MigrationExecutor(connection).migrate([(app, None) for app in apps])
    try:
        yield
    finally:
        MigrationExecutor(connection).migrate([newest for app, newest in NEWEST.items() if app.startswith(apps)])


@every_database
def test_missing_tables_are_named_once_and_one_message_names_every_app_that_is_not_migrated(command):
    with without_the_tables_of("inbox_joins", "inbox_outgoing_webhooks"):
        with pytest.raises(CommandError, match=r"migrate inbox_joins`, .* migrate inbox_outgoing_webhooks`, "):
            call_command("inbox_retry", "--all")
        assert "Run `python manage.py migrate inbox_joins`" in refusal(command("inbox_consume"))
    missing = r"has no table outbox_outboxmessage, table outbox_(?!outboxmessage)"
    with without_the_tables_of("outbox"), pytest.raises(CommandError, match=missing):
        call_command("outbox_restore", "--all")


@every_database
@pytest.mark.parametrize("name", ["exactly_once_status", "exactly_once_processes", "exactly_once_alerts"])
def test_command_reports_an_unavailable_database_in_one_sentence(command, process_environment, name):
    process_environment["DATABASE_URL"] = "postgresql://unknown@127.0.0.1:1/nowhere"

    line = refusal(command(name))

    assert line.startswith("CommandError: The database is unavailable: ")
    assert "\n" not in line


@every_database
def test_database_that_is_newer_than_the_code_is_accepted(command):
    tables = ("outbox_outboxmessage", "exactly_once_process", "inbox_inboxmessage")
    for table in tables:
        executed(f"ALTER TABLE {table} ADD COLUMN of_the_next_version integer NULL")
    try:
        message = published(topic="worker.job", payload={})
        with command("outbox_relay", "--drain", OUTBOX={"BROKER_URL": "local://"}) as relay:
            assert relay.ends() == 0, relay.said()
        with command("inbox_consume", "--drain") as consumer:
            assert consumer.ends() == 0, consumer.said()

        assert state_of(message) == State.PUBLISHED
    finally:
        for table in tables:
            executed(f"ALTER TABLE {table} DROP COLUMN of_the_next_version")


@every_database
def test_missing_column_is_named_although_all_migrations_are_recorded(command):
    executed("ALTER TABLE inbox_step RENAME COLUMN result TO hidden")
    try:
        missing = r"it has no column inbox_step\.result\. Run `python manage\.py migrate inbox`"
        with pytest.raises(CommandError, match=missing):
            output_of("exactly_once_status")
    finally:
        executed("ALTER TABLE inbox_step RENAME COLUMN hidden TO result")


@every_database
def test_database_that_the_routers_keep_an_app_out_of_is_refused_and_left_out_by_a_command_for_both_apps(settings):
    settings.DATABASE_ROUTERS = [Nowhere()]

    for command in (["exactly_once_status", "--app", "outbox"], ["outbox_resume", "--checks"]):
        with pytest.raises(CommandError, match="The database routers keep the app 'outbox' out of the database 'default'"):
            call_command(*command)
    assert json.loads(output_of("exactly_once_status", "--json")).keys() == {"inbox"}


class Nowhere:
    """A router that keeps the tables of the outbox out of every database."""

    def allow_migrate(self, db, app_label, **hints):
        return False if app_label == "outbox" else None


LATER = "The database 'default' is not migrated for this version"


@pytest.mark.parametrize("broker", [pytest.param("local://", marks=every_database), "amqp"])
def test_schema_that_is_taken_from_a_running_relay_is_one_line_and_no_attempt(command, request, broker):
    """Callbacks, checks, the timer and two lanes meet it, again and again; the message goes out when the schema is back."""
    url = broker if broker == "local://" else request.getfixturevalue("rabbitmq_url")
    with command("outbox_relay", OUTBOX={"BROKER_URL": url}) as relay:
        relay.until(lambda: "relay: sending" in relay.said() and ProcessRow.objects.exclude(last_pass_at=None).exists())
        taken = "inbox_inboxmessage" if broker == "local://" else live(connection)
        message = published(topic="worker.job", payload={}, delay=timedelta(seconds=1))
        executed(f"ALTER TABLE {taken} RENAME TO hidden")
        try:
            relay.until(lambda: LATER in relay.said())
            relay.until(lambda: ProcessRow.objects.filter(waits_for="the database, which is not migrated").exists())
        finally:
            executed(f"ALTER TABLE hidden RENAME TO {taken}")
        relay.until(lambda: "is available again after" in relay.said())
        if broker == "local://":
            relay.until(lambda: state_of(message) == State.PUBLISHED)
        assert relay.end() == 0

    first, *again = [line for line in relay.said().splitlines() if " ERROR " in line and LATER in line]
    assert taken in first
    assert "Run `python manage.py migrate" in first
    assert all("This has lasted" in line for line in again)
    row = row_of(message)
    assert row.attempts == (1 if row.state == State.PUBLISHED or "unroutable" in row.last_error else 0)
    assert broker == "local://" or "Traceback" not in relay.said(), "with local:// a runner of handlers is there, too"


def tables_of(app):
    return {name for name in connection.introspection.table_names() if name.startswith(f"{app}_")}


def sequences():
    if connection.vendor != "postgresql":
        return []
    return executed("SELECT relname FROM pg_class WHERE relkind = 'S' AND relname LIKE 'outbox%'")


@every_database
@pytest.mark.parametrize("app", NEWEST)
def test_migrating_an_app_to_zero_leaves_none_of_its_tables_and_forward_again_all_of_them(app):
    before = tables_of(app)
    if app == "outbox":
        published()

    MigrationExecutor(connection).migrate([(app, None)])
    try:
        assert tables_of(app) == set()
        assert app != "outbox" or sequences() == []
    finally:
        # With the migrations of an optional package that depends on it.
        MigrationExecutor(connection).migrate([newest for name, newest in NEWEST.items() if name.startswith(app)])

    assert tables_of(app) == before
    assert app != "outbox" or not OutboxMessage.objects.exists()


@every_database
def test_models_have_no_changes_that_are_not_in_a_migration():
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


@pytest.fixture
def created_without_migrations(settings):
    """As with pytest's `--nomigrations`: Django creates the tables from the models."""
    MigrationExecutor(connection).migrate([("outbox", None)])
    settings.MIGRATION_MODULES = {"outbox": None, "outbox_recurring": None}
    call_command("migrate", run_syncdb=True, verbosity=0)
    yield
    with connection.cursor() as cursor:
        for table in sorted(tables_of("outbox"), key=len):
            cursor.execute(f"DROP TABLE IF EXISTS {table}{' CASCADE' if connection.vendor == 'postgresql' else ''}")
    settings.MIGRATION_MODULES = {}
    MigrationExecutor(connection).migrate([NEWEST["outbox"], NEWEST["outbox_recurring"]])


@every_database
def test_messages_are_published_and_settled_in_tables_that_were_created_without_migrations(created_without_migrations):
    message = published()

    with transaction.atomic():
        assert settling.settle("default", Settlement(published=[message.position])) == 1

    assert state_of(message) == State.PUBLISHED
