"""Rows are deleted only if they still match when they are deleted, whatever receivers of signals the project has."""

from datetime import timedelta

import pytest
from django.db.models import QuerySet
from django.db.models.signals import pre_delete

from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.models import Operation, OperationState
from exactly_once.process.clock import utcnow
from exactly_once.sql.deletions import delete_matching
from exactly_once.upkeep.housekeeping import delete_in_chunks
from exactly_once.upkeep.operation_rows import OperationTable
from inbox.contrib.tasks.models import Result, Status
from tests.support.sql import while_another_session

pytestmark = pytest.mark.django_db(transaction=True)

PAST = utcnow() - timedelta(days=400)


@pytest.fixture(autouse=True)
def received():
    """The rows that a receiver without a sender, as that of an audit app, receives."""
    rows = []

    def receive(instance, **kwargs):
        rows.append(instance)

    pre_delete.connect(receive)
    yield rows
    pre_delete.disconnect(receive)


def old_answer():
    IdempotentRequest.objects.create(scope="s", key="k", at=PAST, expires_at=PAST, status=201)
    return lambda: sum(delete_in_chunks(IdempotentRequest.objects.filter(expires_at__lt=utcnow()), by="expires_at"))


def failed_result():
    Result.objects.create(message_id="m", task="t", body=b"", status=Status.FAILED, finished_at=PAST, expires_at=PAST)
    return lambda: delete_matching(Result.objects.filter(message_id="m", status=Status.FAILED))


def ended_operation():
    """Its parts are deleted with it."""
    operations = OperationTable("outbox")
    planned = operations.plan("default", Operation(action="retry", state=OperationState.STOPPED), [1, 2])
    operations.rows("default").filter(pk=planned.pk).update(ended_at=PAST)
    return lambda: sum(delete_in_chunks(operations.ended("default", timedelta(days=1)), by="ended_at"))


TAKEN_OVER = {
    old_answer: "UPDATE exactly_once_views_idempotentrequest SET expires_at = now() + interval '1 day'",
    failed_result: "UPDATE inbox_tasks_result SET status = 'SUCCESSFUL'",
    ended_operation: "UPDATE exactly_once_operation SET ended_at = NULL",
}
MODELS = {old_answer: IdempotentRequest, failed_result: Result, ended_operation: Operation}


@pytest.mark.parametrize("made", TAKEN_OVER)
def test_row_that_another_transaction_takes_over_meanwhile_is_not_deleted(made):
    assert while_another_session(TAKEN_OVER[made], made()) == 0
    assert QuerySet(MODELS[made]).count() == 1


@pytest.mark.every_database
@pytest.mark.parametrize("made", TAKEN_OVER)
def test_row_is_deleted_and_counted(made, received):
    assert made()() == 1

    assert QuerySet(MODELS[made]).count() == 0
    assert made is ended_operation or received == []
    assert delete_matching(QuerySet(MODELS[made]).filter(pk__in=[])) == 0
