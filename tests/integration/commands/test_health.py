"""Health checks: the answers to probes about relays and consumers that work, wait, hang or have ended."""

import json
import tempfile

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import override_settings
from django.urls import include, path, reverse

from exactly_once.models import Process as ProcessRow
from tests.support import mortal
from tests.support.aliases import the_default_at
from tests.support.deliveries import InAThread, at_once
from tests.support.heartbeats import a_relay
from tests.support.open_transactions import OpenTransaction
from tests.support.servers import FaultProxy
from tests.support.sql import executed
from tests.support.waiting import A_WHILE, wait_until
from tests.support.workers import GROUP, migrate

mortal_database = mortal.mortal_database
pytestmark = pytest.mark.django_db(transaction=True)

urlpatterns = [path("health/", include("exactly_once.console.health"))]
A_PROBE = 10.0
"""Seconds: an answer takes two, and longer on a busy machine; a driver that waits for the database takes much longer."""
COMMANDS = {"outbox": "outbox_relay", "inbox": "inbox_consume"}
BOTH = pytest.mark.parametrize("app", sorted(COMMANDS))


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path, monkeypatch):
    """No life sign of another test."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def running(command, process_environment):
    process_environment["TMPDIR"] = tempfile.gettempdir()
    return lambda name, url: command(name, OUTBOX={"BROKER_URL": url}, INBOX={"GROUP": GROUP})


def probe(capsys, app, *arguments):
    """The exit code of the command, and the status of each check."""
    code = 0
    try:
        call_command("exactly_once_health", "--app", app, "--json", *arguments)
    except SystemExit as end:
        code = end.code
    shown = json.loads(capsys.readouterr().out)
    assert (shown["status"] == "ok") == (code == 0)
    assert {check["app"] for check in shown["checks"]} == {app}
    return code, {check["name"].partition(" ")[0]: check["status"] for check in shown["checks"]}


def ready(client, app):
    response = client.get(reverse("exactly_once_health:ready", args=[app]))
    assert (response.status_code == 200) == (response.json()["status"] == "ok")
    assert response["Cache-Control"].startswith("max-age=0")
    return response.json()["checks"][app]


@BOTH
@pytest.mark.every_database
def test_without_a_process_a_probe_fails_and_says_which_checks(app, capsys):
    code, checks = probe(capsys, app)

    assert code == 1
    assert set(checks.values()) >= {"none running", "unknown"}
    assert checks["database"] == "ok"


@override_settings(ROOT_URLCONF=__name__)
@BOTH
def test_working_process_is_alive_and_ready_until_it_is_killed(app, capsys, client, running, rabbitmq_url):
    working = ProcessRow.objects.filter(app=app, waits_for="")
    with running(COMMANDS[app], rabbitmq_url) as process:
        process.until(lambda: working.exists() and probe(capsys, app, "--ready")[0] == 0)
        code, checks = probe(capsys, app)
        seen = ready(client, app)
        process.kill()
        process.ends()

    assert code == 0
    assert set(checks.values()) == set(seen.values()) == {"ok"}
    assert probe(capsys, app, "--live")[0] == 1


@override_settings(ROOT_URLCONF=__name__)
@BOTH
def test_process_without_its_broker_is_alive_and_not_ready_and_the_view_does_not_show_why(app, capsys, client, running):
    with running(COMMANDS[app], "amqp://guest:hidden@127.0.0.1:1//") as process:
        process.until(lambda: ProcessRow.objects.filter(app=app, waits_for__startswith="the broker").exists())
        assert probe(capsys, app, "--live")[0] == 0
        code, checks = probe(capsys, app, "--ready")
        response = client.get(reverse("exactly_once_health:ready", args=[app]))

    assert (code, response.status_code) == (1, 503)
    assert checks["broker"] == response.json()["checks"][app]["broker"] == "unavailable"
    assert "127.0.0.1" not in response.text


@BOTH
def test_process_without_its_database_is_alive_and_not_ready(
    app, capsys, running, process_environment, mortal_postgres, mortal_database, rabbitmq_url, tmp_path
):
    process_environment["DATABASE_URL"] = mortal_database
    migrate(process_environment, tmp_path / "migrate.log")
    with running(COMMANDS[app], rabbitmq_url) as process:
        process.until(ProcessRow.objects.filter(app=app).exists)
        mortal_postgres.kill()
        process.until(lambda: "is unavailable" in process.said())

        assert probe(capsys, app, "--live")[0] == 0
        code, checks = probe(capsys, app, "--ready")

    assert code == 1
    assert checks == {"database": "unavailable"}


@BOTH
def test_relay_that_runs_the_handlers_of_local_is_alive_and_ready_for_both_apps(app, capsys, running, settings):
    settings.OUTBOX, settings.INBOX = {"BROKER_URL": "local://"}, {"GROUP": GROUP}
    with running("outbox_relay", "local://") as process:
        process.until(lambda: probe(capsys, app)[0] == 0)


@override_settings(ROOT_URLCONF=__name__)
def test_views_answer_503_and_name_the_failing_checks_of_each_app(client):
    for app in COMMANDS:
        checks = ready(client, app)
        assert checks["database"] == "ok"
        assert "none running" in checks.values()
        assert checks["broker"] == "unknown"
        assert client.post(reverse("exactly_once_health:ready", args=[app])).status_code == 405
    assert client.get(reverse("exactly_once_health:live")).status_code == 200
    assert client.get(reverse("exactly_once_health:ready")).json()["checks"].keys() == {"outbox", "inbox"}
    assert client.get(reverse("exactly_once_health:ready", args=["unknown"])).status_code == 404


@override_settings(ROOT_URLCONF=__name__)
@pytest.mark.parametrize(("is_lost", "status"), [(True, "unavailable"), (False, "ok")])
def test_readiness_reads_no_text_that_is_for_people(is_lost, status, client):
    a_relay(waits_for="RabbitMQ" if is_lost else "the broker of tickets", without_broker=is_lost)

    assert ready(client, "outbox") == {"database": "ok", "relays": "waiting", "broker": status}


@override_settings(ROOT_URLCONF=__name__)
@BOTH
def test_view_on_an_unmigrated_database_says_so(app, client):
    table = f"{app}_{app}message"
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME COLUMN traceparent TO hidden")
        try:
            assert ready(client, app) == {"database": "not migrated"}
        finally:
            cursor.execute(f"ALTER TABLE {table} RENAME COLUMN hidden TO traceparent")


@pytest.fixture
def database_behind_a_proxy(mortal_postgres, mortal_database):
    """The proxy through which this test reaches its database."""
    with FaultProxy("127.0.0.1", mortal_postgres.port) as proxy, the_default_at(PORT=proxy.port):
        yield proxy
        proxy.thaw()


def while_frozen(proxy, ask, within=A_PROBE):
    """What `ask` returns although the database does not answer; an error if it waits for the database."""
    proxy.freeze()
    with InAThread(ask) as asked:
        try:
            wait_until(lambda: asked.ended, within=within)
        finally:
            proxy.thaw()
    return asked.answer


@override_settings(ROOT_URLCONF=__name__)
@BOTH
def test_view_and_command_fail_while_the_database_is_frozen_and_recover_with_it(app, client, capsys, database_behind_a_proxy):
    assert ready(client, app)["database"] == "not migrated"

    view, command = while_frozen(
        database_behind_a_proxy, lambda: (ready(client, app), probe(capsys, app, "--ready")), within=2 * A_PROBE
    )

    assert view == {"database": "unavailable"}
    assert command == (1, {"database": "unavailable"})
    wait_until(lambda: ready(client, app) == {"database": "not migrated"})


@pytest.mark.long
@override_settings(ROOT_URLCONF=__name__)
@BOTH
def test_view_answers_503_while_a_query_waits(app, client):
    other = OpenTransaction()
    try:
        other.does(lock, ProcessRow._meta.db_table).result(A_WHILE)
        with InAThread(lambda: ready(client, app)) as asked:
            try:
                wait_until(lambda: asked.ended, within=A_PROBE)
            finally:
                other.rolls_back()
    finally:
        other.ends()

    assert asked.answer == {"database": "unavailable"}


def lock(table):
    executed(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")


@override_settings(ROOT_URLCONF=__name__)
def test_probes_of_a_frozen_database_share_one_connection(client, database_behind_a_proxy):
    def probes():
        answers = at_once([lambda: ready(client, "outbox")] * 6)
        return answers, database_behind_a_proxy.connections

    answers, opened = while_frozen(database_behind_a_proxy, probes)

    assert answers == [{"database": "unavailable"}] * 6
    assert opened <= 2


@override_settings(
    ROOT_URLCONF=__name__,
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        *(f"django.contrib.auth.middleware.{name}Middleware" for name in ("Authentication", "LoginRequired")),
    ],
)
@BOTH
def test_views_need_no_login_where_the_project_requires_one(app, client):
    assert client.get(reverse("exactly_once_health:live")).status_code == 200
    assert ready(client, app)["database"] == "ok"
