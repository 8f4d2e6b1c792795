"""An idle relay polls the database rarely, and the doorbell still wakes it."""

import re
import time

import pytest

from tests.support import mortal
from tests.support.relaying import Queue, ids, published
from tests.support.waiting import wait_until
from tests.support.workers import migrate

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(200)]

mortal_database = mortal.mortal_database

COUNTED_SECONDS = 20
MOST_A_SECOND = 2


def test_idle_relay_executes_at_most_two_statements_a_second_while_the_doorbell_reaches_it(
    mortal_postgres, mortal_database, process_environment, command, rabbitmq_url, tmp_path
):
    process_environment["DATABASE_URL"] = mortal_database
    migrate(process_environment, tmp_path / "migrate.log")
    process_environment["PGOPTIONS"] = "-c log_statement=all"

    def executed():
        return len(re.findall("LOG:  (statement|execute)", mortal_postgres.log.read_text()))

    def executed_in_a_while():
        before = executed()
        time.sleep(COUNTED_SECONDS)
        return executed() - before

    with Queue(rabbitmq_url) as queue, command("outbox_relay", OUTBOX={"BROKER_URL": rabbitmq_url}):
        wait_until(lambda: executed_in_a_while() <= MOST_A_SECOND * COUNTED_SECONDS, 6 * COUNTED_SECONDS)
        message = published()
        taken = []
        wait_until(lambda: taken.extend(ids(queue.take_all())) or taken)
        assert taken == [str(message.id)]
