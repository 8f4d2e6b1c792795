"""The tables of both apps, migrated back to nothing and forward again."""

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader

from outbox.models import OutboxMessage
from outbox.states import State
from outbox.store import settling
from outbox.store.settling import Settlement
from tests.support.relaying import published, state_of
from tests.support.sql import executed

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]

NEWEST = {
    app: MigrationLoader(None).graph.leaf_nodes(app)[0] for app in ("outbox", "inbox", "inbox_joins", "inbox_outgoing_webhooks")
}


def tables_of(app):
    return {name for name in connection.introspection.table_names() if name.startswith(f"{app}_")}


def sequences():
    if connection.vendor != "postgresql":
        return []
    return executed("SELECT relname FROM pg_class WHERE relkind = 'S' AND relname LIKE 'outbox%'")


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


def test_models_have_no_changes_that_are_not_in_a_migration():
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


@pytest.fixture
def created_without_migrations(settings):
    """As with pytest's `--nomigrations`: Django creates the tables from the models."""
    MigrationExecutor(connection).migrate([("outbox", None)])
    settings.MIGRATION_MODULES = {"outbox": None}
    call_command("migrate", run_syncdb=True, verbosity=0)
    yield
    with connection.cursor() as cursor:
        for table in sorted(tables_of("outbox"), key=len):
            cursor.execute(f"DROP TABLE IF EXISTS {table}{' CASCADE' if connection.vendor == 'postgresql' else ''}")
    settings.MIGRATION_MODULES = {}
    MigrationExecutor(connection).migrate([NEWEST["outbox"]])


def test_messages_are_published_and_settled_in_tables_that_were_created_without_migrations(created_without_migrations):
    message = published()

    with transaction.atomic():
        assert settling.settle("default", Settlement(published=[message.position])) == 1

    assert state_of(message) == State.PUBLISHED
