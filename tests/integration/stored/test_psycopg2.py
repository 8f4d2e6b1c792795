"""A project with psycopg 2 alone: every message is published and handled, by statements that are sent as text."""

import subprocess
import sys

import pytest

from inbox.models import InboxMessage
from inbox.states import State
from outbox.models import OutboxMessage
from outbox.states import State as OutboxState
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.workers import as_environment

pytest.importorskip("psycopg2")

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

PROGRAM = f"""
import sys

sys.modules["psycopg"] = None
import django

django.setup()
from django.core.management import call_command
from django.db import connection, transaction

from outbox import Draft, publish, publish_many

assert connection.Database.__name__ == "psycopg2"
for number in range(8):
    with transaction.atomic():
        publish({JOB!r}, {{"number": number}}, biz_id=f"one-{{number}}")
with transaction.atomic():
    publish_many(Draft({JOB!r}, {{}}, biz_id=f"many-{{number}}") for number in range(12))
call_command("outbox_relay", drain=True)
call_command("inbox_consume", drain=True)
"""


def test_messages_are_published_and_handled_with_psycopg2_alone(process_environment):
    given = as_environment(OUTBOX={"BROKER_URL": "local://"}, INBOX={"BROKER_URL": "local://"})
    environment = {**process_environment, **given, "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings"}

    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)

    assert set(OutboxMessage.objects.values_list("state", flat=True)) == {OutboxState.PUBLISHED}
    assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.DONE, 1)}
    assert Effect.objects.filter(name__contains="-").count() == 20
