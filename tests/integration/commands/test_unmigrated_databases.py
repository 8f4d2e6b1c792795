"""A database that is not migrated for this version is refused at the start, in one line that names what to run."""

import io
import json
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from exactly_once.models import Process as ProcessRow
from outbox.states import State
from outbox.store.dialect import live
from tests.support.relaying import published, row_of, state_of
from tests.support.sql import executed

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]

NEWEST = {
    app: MigrationLoader(None).graph.leaf_nodes(app)[0] for app in ("outbox", "inbox", "inbox_joins", "inbox_outgoing_webhooks")
}


def migrate_to(*targets):
    MigrationExecutor(connection).migrate(list(targets))


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
OF_ONE = {"outbox": [["outbox_restore"], ["outbox_resume", "--checks"]], "inbox": [["inbox_retry"]]}


def test_other_commands_on_a_half_migrated_database_name_the_migration_to_run(half_migrated):
    for command in [*COMMANDS, *OF_ONE[half_migrated]]:
        with pytest.raises(CommandError, match=f"Run `python manage.py migrate {half_migrated}`") as refused:
            call_command(*command)

        assert "\n" not in str(refused.value)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("options", [[], ["--database", "default"]], ids=["every database", "one database"])
def test_trail_command_on_a_half_migrated_database_names_the_migration_to_run(half_migrated, options):
    with pytest.raises(CommandError, match=f"Run `python manage.py migrate {half_migrated}`") as refused:
        call_command("exactly_once_trail", "0f7a2c1e-5b7d-4f0a-9c55-3a1f0a3f2a10", *options)

    assert "\n" not in str(refused.value)


def test_relay_of_an_outbox_alone_does_not_ask_for_the_tables_of_the_inbox(command, rabbitmq_url):
    migrate_to(("inbox", None))
    try:
        with command("outbox_relay", "--drain", OUTBOX={"BROKER_URL": rabbitmq_url}) as relay:
            assert relay.ends() == 0, relay.said()
    finally:
        migrate_to(NEWEST["inbox"], NEWEST["inbox_joins"], NEWEST["inbox_outgoing_webhooks"])


def test_consumer_without_the_tables_of_an_optional_package_names_the_migration_to_run(command):
    migrate_to(("inbox_joins", None))
    try:
        assert "Run `python manage.py migrate inbox_joins`" in refusal(command("inbox_consume"))
    finally:
        migrate_to(NEWEST["inbox_joins"])


def test_one_message_names_every_app_that_is_not_migrated():
    packages = ("inbox_joins", "inbox_outgoing_webhooks")
    migrate_to(*((package, None) for package in packages))
    try:
        with pytest.raises(CommandError, match=r"migrate inbox_joins`, .* migrate inbox_outgoing_webhooks`, "):
            call_command("inbox_retry", "--all")
    finally:
        migrate_to(*(NEWEST[package] for package in packages))


def test_each_missing_table_is_named_once():
    migrate_to(("outbox", None))
    try:
        with pytest.raises(CommandError, match=r"has no table outbox_outboxmessage, table outbox_(?!outboxmessage)"):
            call_command("outbox_restore", "--all")
    finally:
        migrate_to(NEWEST["outbox"])


@pytest.mark.parametrize("name", ["exactly_once_status", "exactly_once_processes", "exactly_once_alerts"])
def test_command_reports_an_unavailable_database_in_one_sentence(command, process_environment, name):
    process_environment["DATABASE_URL"] = "postgresql://unknown@127.0.0.1:1/nowhere"

    line = refusal(command(name))

    assert line.startswith("CommandError: The database is unavailable: ")
    assert "\n" not in line


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


def test_missing_column_is_named_although_all_migrations_are_recorded(command):
    executed("ALTER TABLE inbox_step RENAME COLUMN result TO hidden")
    try:
        missing = r"it has no column inbox_step\.result\. Run `python manage\.py migrate inbox`"
        with pytest.raises(CommandError, match=missing):
            call_command("exactly_once_status", stdout=io.StringIO())
    finally:
        executed("ALTER TABLE inbox_step RENAME COLUMN hidden TO result")


def test_database_that_the_routers_keep_the_app_out_of_is_refused(settings):
    settings.DATABASE_ROUTERS = [Nowhere()]

    for command in (["exactly_once_status", "--app", "outbox"], ["outbox_resume", "--checks"]):
        with pytest.raises(CommandError, match="The database routers keep the app 'outbox' out of the database 'default'"):
            call_command(*command)


def test_command_for_both_apps_leaves_out_the_one_that_the_routers_keep_out_of_the_database(settings):
    settings.DATABASE_ROUTERS = [Nowhere()]
    call_command("exactly_once_status", "--json", stdout=(out := io.StringIO()))

    assert json.loads(out.getvalue()).keys() == {"inbox"}


class Nowhere:
    """A router that keeps the tables of the outbox out of every database."""

    def allow_migrate(self, db, app_label, **hints):
        return False if app_label == "outbox" else None


LATER = "The database 'default' is not migrated for this version"


@pytest.mark.parametrize("broker", ["local://", "amqp"])
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
