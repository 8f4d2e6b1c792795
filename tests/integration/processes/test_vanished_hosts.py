"""A host that vanishes says no goodbye: its sessions end all the same, on both sides."""

from datetime import timedelta
from functools import partial

import pytest
from django.db import connection

from exactly_once.sql.now import DatabaseTime
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.apps.workshop import BOUNDED
from tests.support.inbox_rows import store_message
from tests.support.servers import FaultProxy, PgBouncer

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LOCAL = {"BROKER_URL": "local://"}
SHORT = timedelta(milliseconds=200)


def stored(topic, handler, name, what):
    body = b'{"do": "%s"}' % what.encode()
    names = {"handler": handler, "topic": topic, "biz_id": name, "message_id": name}
    content = {"body": body, "content_type": "application/json", "headers": {}}
    store_message(**names, **content, state="received", next_attempt_at=DatabaseTime())


def detail(name):
    return Effect.objects.filter(name=name).values_list("detail", flat=True).first()


def test_row_of_a_consumer_whose_host_vanished_in_a_handler_with_a_timeout_is_handled_by_another(command, process_environment):
    stored(BOUNDED, "workshop.bounded", "job", "hang once")
    settings = connection.settings_dict
    with FaultProxy("127.0.0.1", settings["PORT"]) as network:
        consumer = partial(command, "inbox_consume", app="workshop", INBOX={"REDELIVERY_AFTER": SHORT}, OUTBOX=LOCAL)
        with consumer(variables={"DATABASE_URL": network.through(process_environment["DATABASE_URL"])}) as vanishing:
            vanishing.until(lambda: Effect.objects.using("other").filter(name="begun job").exists())
            vanishing.freeze()
            network.freeze()
            with consumer(log="another") as another:
                another.until(lambda: detail("job"))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", "10 15000 10 15000"),
        ("?keepalives_idle=77&tcp_user_timeout=8000&options=-c%20tcp_keepalives_idle%3D88", "77 8000 88 15000"),
    ],
    ids=["by default", "given by the project"],
)
@pytest.mark.parametrize("app", ["worker", "pooled"])
def test_both_sides_of_a_session_notice_that_the_other_host_has_vanished(command, process_environment, app, query, expected):
    stored(JOB, "worker.work", "job", "record the session")
    variables = {"DATABASE_URL": process_environment["DATABASE_URL"] + query}

    with command("inbox_consume", app=app, variables=variables, OUTBOX=LOCAL) as process:
        process.until(lambda: detail("job"))

    assert detail("job") == expected


def test_session_behind_a_pooler_keeps_the_settings_of_its_server(command, process_environment):
    stored(JOB, "worker.work", "job", "record the session")
    settings = connection.settings_dict
    with PgBouncer(int(settings["PORT"]), user=settings["USER"]) as pooler:
        variables = {"DATABASE_URL": pooler.url_of(settings["NAME"])}
        with command("inbox_consume", variables=variables, OUTBOX=LOCAL) as process:
            process.until(lambda: detail("job"))

    assert detail("job").split()[2] != "10"
