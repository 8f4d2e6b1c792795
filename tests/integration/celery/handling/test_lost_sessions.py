"""A task that ends its own database session is run again at once, once; after that, each loss is one of Celery's retries."""

import pytest
from celery import states

from tests.integration.celery.handling.tracing import deliver
from tests.support.sql import executed

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.mark.parametrize("redelivered", [False, True], ids=["first delivery", "redelivery"])
def test_task_that_ends_its_own_session_runs_once_per_retry_and_once_more(a_task, redelivered):
    runs = []

    def end_own_session(order_id):
        runs.append(order_id)
        executed("SELECT pg_terminate_backend(pg_backend_pid())")

    task = a_task(end_own_session)
    for retries in range(3):
        state, _ = deliver(task, "o-1", task_id="t-1", retries=retries, redelivered=redelivered and not retries)
        assert state == states.FAILURE

    assert len(runs) == 4
