"""The backend of `django.tasks` under the contract of another project, `pytest-obligation`, without a declared gap.

In its histories a worker dies after each of its commits and after each call of a provider, and each receiver of a signal and
each hook after a commit fails. All of them must end as if nothing had happened.
"""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from django.core.management import call_command
from pytest_obligation import configure, due_work_contract_suite
from pytest_obligation.contract import Claim, ExtraProof, NotApplicable, ObligationContract, Profile
from pytest_obligation.crash_histories import CallableDelivery, ExternalCall
from pytest_obligation.gap_probes import MissingReclaim
from pytest_obligation.integrations import task_queues
from pytest_obligation.integrations.django import django_host
from pytest_obligation.integrations.django.receivers import django_receiver_breaker
from pytest_obligation.integrations.task_queues import TaskOutcome
from pytest_obligation.profiles.bounded_ownership import FencedOwnership
from pytest_obligation.profiles.crash_ambiguity import AmbiguityAware
from pytest_obligation.profiles.durable_retention import Retention
from pytest_obligation.profiles.job_retry_limits import BoundedRetry

from exactly_once.management.commands import exactly_once_purge
from exactly_once.process.clock import utcnow
from exactly_once.process.loop import StopRequest
from exactly_once.testing.database import travel
from inbox.conf import inbox_options
from inbox.consumer.runner import Runner
from inbox.contrib.tasks.compat import TaskResultDoesNotExist, task_backends, task_finished, task_started
from inbox.contrib.tasks.models import Result
from inbox.contrib.tasks.queues import topic_of
from inbox.handlers.registry import registry
from inbox.leases.stores import lease_store
from inbox.models import InboxMessage
from inbox.operators.decisions import decide, skipping
from inbox.receiving.reading import stored_arrival
from inbox.store import claims, due, lease_rows
from inbox.store.message_rows import Failure
from tests.support.apps.effects.models import Effect
from tests.support.apps.tasked.provider import provider
from tests.support.relaying import drained
from tests.support.tasks import tasks

configure(
    django_host({"exactly_once", "inbox", "outbox"}, receiver_breaker=django_receiver_breaker(task_started, task_finished))
)

DONE, FAILED = TaskOutcome(status="SUCCESSFUL", effect=1), TaskOutcome(status="FAILED", effect=0)
NAMES = itertools.count()
PAYMENTS = topic_of("payments", lease=True)
LEASES = {}
"""Of `claim`, by row and fence."""


@pytest.fixture
def heard(tasked):
    """Both signals have a receiver."""

    def receive(**given):
        pass

    for signal in (task_started, task_finished):
        signal.connect(receive)
    yield
    for signal in (task_started, task_finished):
        signal.disconnect(receive)
    provider.is_down = False


def result_of(task_id):
    return task_backends["default"].get_result(task_id)


def enqueue(name="note"):
    return getattr(tasks(), name).enqueue(f"task {next(NAMES)}").id


def received(name):
    """Enqueue a task and hand it over to the inbox, where it is due: its row."""
    task_id = enqueue(name)
    drained("local://")
    return InboxMessage.objects.get(message_id=task_id).pk


def effects(task_id):
    return Effect.objects.filter(name=result_of(task_id).args[0]).count()


def work(*_):
    """What a relay process does, in one thread and without what it does by the clock: a relay's passes, and the runner."""
    drained("local://")
    Runner(inbox_options()).drain(StopRequest())


def recover():
    """The same after the time in which the claims and leases of a dead process end."""
    travel(timedelta(minutes=5))
    drained("local://")
    Runner(inbox_options()).drain(StopRequest())


def history(name, expected=DONE, **given):
    return task_queues.worker_history(
        name=f"the worker runs {name}",
        enqueue=lambda: enqueue(name),
        effect=effects,
        expected=expected,
        status_of=lambda task_id: str(result_of(task_id).status),
        run_worker=work,
        **given,
    )


def retention():
    def owed():
        task_id = enqueue()
        travel(timedelta(days=60))
        return task_id

    def finished():
        task_id = enqueue()
        work()
        Result.objects.update(expires_at=utcnow() - timedelta(days=1))
        return task_id

    def exists(task_id):
        try:
            return bool(result_of(task_id))
        except TaskResultDoesNotExist:
            return False

    return Retention(
        name="exactly_once_purge",
        make_non_terminal=owed,  # ARRANGE
        make_prunable=finished,
        run_retention=lambda: call_command(exactly_once_purge.Command(), verbosity=0),  # REAL PRODUCTION
        # EXTERNAL SEAM: none
        still_exists=exists,  # OBSERVE
    )


def retry():
    def failing():
        row = received("charge_in_a_transaction")
        provider.is_down = True  # EXTERNAL SEAM
        return row

    def message_of(row):
        return InboxMessage.objects.get(pk=row).message_id

    return BoundedRetry(
        name="a queue with max_attempts=3",
        max_executions=3,
        make_failing=failing,  # ARRANGE
        due_work=lambda: due.longest_due("default"),  # REAL PRODUCTION
        run_once=work,  # REAL PRODUCTION
        advance_to_due=lambda row: travel(timedelta(hours=3)),
        is_terminal=lambda row: result_of(message_of(row)).is_finished,
        failure_attempt_count=lambda row: provider.asked[message_of(row)],
        observe=lambda row: (str(result_of(message_of(row)).status), result_of(message_of(row)).attempts),  # OBSERVE
    )


def stranded():
    """A task that a worker has claimed before it died."""
    row = received("note")
    claims.claim_due("default", ["tasks.default"], timedelta(seconds=10))
    travel(timedelta(minutes=1))
    return InboxMessage.objects.get(pk=row).message_id


def started_by_recovery():
    started = []

    def record(task_result, **given):
        started.append(task_result.id)

    task_started.connect(record)
    recover()
    task_started.disconnect(record)
    return started


def claim():
    """What a worker does first; the row and the fence of its lease."""
    stored = claims.claim_due("default", [PAYMENTS], timedelta(hours=1))
    if stored is None:
        return None
    lease = lease_store(inbox_options()).acquire(stored_arrival(registry.get(PAYMENTS), stored))
    LEASES[stored.pk, lease.fence] = lease
    return stored.pk, lease.fence


def claim_a_new_one():
    received("charge_once")
    return claim()


def consume(row, fence):
    return lease_store(inbox_options()).consume(LEASES[row, fence])


def free(row, fence):
    failure = Failure(error="ValueError: no", traceback="", retry_after=timedelta(hours=1), attempts=1)
    return lease_store(inbox_options()).free(LEASES[row, fence], failure)


def begin_step(row, fence):
    return lease_store(inbox_options()).remember(LEASES[row, fence], "charge", None)


def extend(row, fence):
    return lease_store(inbox_options()).extend(LEASES[row, fence], timedelta(minutes=1))


def end_lease(row):
    InboxMessage.objects.filter(pk=row).update(next_attempt_at=utcnow() - timedelta(seconds=1))


def state_of(row):
    return str(InboxMessage.objects.get(pk=row).state)


def ownership():
    def observe(row):
        seen = InboxMessage.objects.values_list("state", "next_attempt_at", "settled_at", "failed_at").get(pk=row)
        return seen, lease_rows.steps_of("default", row)

    return FencedOwnership(
        name="a task under a lease",
        make_claimable=lambda: received("charge"),  # ARRANGE
        claim=claim,  # REAL PRODUCTION
        fenced_write=consume,
        other_fenced_writes={"free": free, "remember": begin_step},
        renew_lease=extend,
        expire_lease=end_lease,  # EXTERNAL SEAM
        # What the claim of the next worker finds: there is no sweep.
        reclaim_stalled=lambda row: due.due_handlers("default", [PAYMENTS]),
        no_disposition=[],
        observe=observe,  # OBSERVE
    )


def ambiguity():
    def recovered(row):
        work()
        return state_of(row)

    def looked_up(row):
        decide("default", row, skipping("the provider has charged it"))
        return state_of(row)

    return AmbiguityAware(
        name="a step that must not be repeated",
        claim=claim_a_new_one,  # ARRANGE
        start_attempt=begin_step,  # REAL PRODUCTION
        open_attempt=lambda row: None in lease_rows.steps_of("default", row).values() or None,  # OBSERVE
        expire_lease=end_lease,  # EXTERNAL SEAM
        resolve_stalled=recovered,  # REAL PRODUCTION
        ambiguous_disposition="dead",
        retryable_disposition="done",
        state_of=state_of,  # OBSERVE
        ambiguous_state="dead",
        terminal_states=("done", "skipped"),
        apply_late_evidence=looked_up,  # REAL PRODUCTION
        due_work_ids=lambda: due.longest_due("default"),
    )


NOTE = history("note")
CHARGE = history("charge", external_calls=[ExternalCall(provider, "charge")])
FAIL = history("fail", expected=FAILED)

CONTRACT = ObligationContract(
    name="inbox.tasks.ExactlyOnceBackend",
    transactional=True,
    fixtures=("heard",),
    profiles={
        Profile.A: NotApplicable(
            "There is no sweep beside the worker: the claim that finds due work finds that of a dead worker, too, and nothing "
            "is dispatched by a message that could be lost. The histories below prove it, and the extra proof."
        ),
        Profile.B: Claim(),
        Profile.C: Claim(),
        Profile.D: Claim(),
        Profile.E: task_queues.settled_by_one_worker("task"),
        Profile.F: task_queues.the_obligation_is_the("message"),
        Profile.G: task_queues.application_gate("django-exactly-once"),
        Profile.H: NotApplicable("A task that is done is never run again: its receipt commits with its effect."),
        Profile.I: task_queues.application_admission("django-exactly-once"),
        Profile.J: Claim(),
    },
    ownership=ownership,
    ambiguity=ambiguity,
    retention=retention,
    retry=retry,
    handoffs=(NOTE, CHARGE, FAIL),
    handoff_delivery=CallableDelivery(name="outbox_relay", recover=recover),
    extras=(
        ExtraProof(
            name="a task whose worker died is run again",
            run=MissingReclaim(make_stranded=stranded, dispatched_by_one_tick=started_by_recovery),
            transactional=True,
            fixtures=("heard",),
        ),
    ),
)


@due_work_contract_suite(CONTRACT)
class TestContract:
    pass
