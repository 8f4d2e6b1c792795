"""What a restore, a switch to a replica, or an upgrade of the operating system leaves wrong in a database of PostgreSQL."""

from __future__ import annotations

import pytest
from django.db import connection

from exactly_once.sql.schema import our_apps
from tests.support.projects import run_in
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(transaction=True)


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
