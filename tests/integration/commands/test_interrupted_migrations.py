"""A migration that was stopped midway resumes, also with a backend that has no transaction around it and skips what exists."""

import dj_database_url
import psycopg
import pytest

from tests.support.projects import run_in, settings_of

BACKEND = """\
import re

from django.db.backends.postgresql import base, schema


class Editor(schema.DatabaseSchemaEditor):
    def __init__(self, connection, collect_sql=False, atomic=True):
        super().__init__(connection, collect_sql=collect_sql, atomic=False)

    def execute(self, sql, params=()):
        made = re.match(r'(?:CREATE (?:UNIQUE )?(?:TABLE|INDEX)|ALTER TABLE "\\w+" ADD CONSTRAINT) "(\\w+)"', str(sql))
        if made:
            with self.connection.cursor() as cursor:
                cursor.execute("SELECT FROM pg_class WHERE relname = %s", [made[1]])
                if cursor.fetchall() or cursor.execute("SELECT FROM pg_constraint WHERE conname = %s", [made[1]]).fetchall():
                    return
        super().execute(sql, params)


class DatabaseWrapper(base.DatabaseWrapper):
    SchemaEditorClass = Editor
"""
STOP = """
CREATE FUNCTION stop() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
    IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands() WHERE object_identity LIKE '%{name}') THEN
        RAISE EXCEPTION 'it was stopped';
    END IF;
END $$;
CREATE EVENT TRIGGER stop ON ddl_command_end EXECUTE FUNCTION stop();
"""
RELATIONS = "SELECT relname FROM pg_class WHERE relname ~ '^(exactly_once|inbox|outbox)_' ORDER BY 1"


@pytest.fixture
def database(postgres_server, request):
    """A function that returns the URL of a new, empty database."""

    def create():
        url = postgres_server.create_database()
        request.addfinalizer(lambda: postgres_server.drop_database(url.rpartition("/")[2]))
        return url

    return create


@pytest.fixture
def migrate(tmp_path):
    """Run `migrate`, of a project with this engine, on the database of a URL."""
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend" / "base.py").write_text(BACKEND)

    def migrated(url, engine="django.db.backends.postgresql"):
        database = dj_database_url.parse(url, engine=engine)
        name = database["NAME"]
        settings = settings_of("outbox", "inbox", "django.contrib.contenttypes", database=database)
        # By the name of the database: Python takes a file that is written again within a second for the compiled one.
        (tmp_path / f"settings_of_{name}.py").write_text(settings)
        return run_in(tmp_path, f"settings_of_{name}", "-m", "django", "migrate", "-v0")

    return migrated


@pytest.mark.long
@pytest.mark.parametrize("engine", ["django.db.backends.postgresql", "backend"])
@pytest.mark.parametrize(
    "name", ["outbox_outboxmessage_live", "outbox_history_given_up", "inbox_inboxmessage_history_default", "inbox_due"]
)
def test_migration_that_was_stopped_midway_resumes(database, migrate, engine, name):
    url, whole = database(), database()
    assert migrate(whole).returncode == 0

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(STOP.format(name=name))
        stopped = migrate(url, engine)
        connection.execute("DROP EVENT TRIGGER stop")
        assert "it was stopped" in stopped.stdout

        resumed = migrate(url, engine)

        assert resumed.returncode == 0, resumed.stdout
        with psycopg.connect(whole) as other:
            assert connection.execute(RELATIONS).fetchall() == other.execute(RELATIONS).fetchall()
