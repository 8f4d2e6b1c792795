"""The backend of `django.tasks` under the contract of another project, `pytest-obligation`, without a declared gap.

In its histories a worker dies after each of its commits and after each call of a provider, and each receiver of a signal and
each hook after a commit fails. All of them must end as if nothing had happened.
"""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.http import JsonResponse
from django.test import RequestFactory
from pytest_obligation import configure, due_work_contract_suite
from pytest_obligation.contract import Claim, ExtraProof, NotApplicable, ObligationContract, Profile
from pytest_obligation.crash_histories import CallableDelivery, ExternalCall
from pytest_obligation.integrations import task_queues
from pytest_obligation.integrations.django import django_host
from pytest_obligation.integrations.django.admission import AdmissionInterrupted, interrupt_after_statement
from pytest_obligation.integrations.django.commits import django_worker_killer
from pytest_obligation.integrations.django.receivers import django_receiver_breaker
from pytest_obligation.integrations.task_queues import TaskOutcome
from pytest_obligation.profiles import automatic_recovery as recovery
from pytest_obligation.profiles.bounded_ownership import FencedOwnership
from pytest_obligation.profiles.crash_ambiguity import AmbiguityAware
from pytest_obligation.profiles.durable_retention import Retention
from pytest_obligation.profiles.gated_execution import ExecutionGate
from pytest_obligation.profiles.harmless_replay import ReplaySafeEffect
from pytest_obligation.profiles.indivisible_admission import AdmissionAtomicity, AdmissionPublication
from pytest_obligation.profiles.job_retry_limits import BoundedRetry
from pytest_obligation.worker_death import WorkerDied

from exactly_once.contrib.views import by_token, idempotent_view
from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.management.commands import exactly_once_purge
from exactly_once.process.clock import utcnow
from exactly_once.process.loop import StopRequest
from exactly_once.sql.connections import fetch
from exactly_once.testing.database import travel
from inbox.conf import inbox_options
from inbox.consumer.runner import Runner
from inbox.contrib.tasks.compat import TaskResultDoesNotExist, task_backends, task_enqueued, task_finished, task_started
from inbox.contrib.tasks.models import Result
from inbox.contrib.tasks.queues import topic_of
from inbox.handlers.registry import registry
from inbox.leases.stores import lease_store
from inbox.models import InboxMessage
from inbox.operators.accounting import open_states
from inbox.operators.decisions import decide, skipping
from inbox.operators.handler_pauses import pause, resume
from inbox.receiving.reading import stored_arrival
from inbox.store import claims, due, lease_rows
from inbox.store.dialect import TABLE
from inbox.store.message_rows import Failure
from inbox.testing.deliveries import run_due, runner_of
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.apps.tasked.provider import provider
from tests.support.relaying import drained
from tests.support.tasks import tasks
from tests.support.threads import SECONDS, in_threads

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

    provider.asked.clear()
    with hearing(task_started, lambda **given: None), hearing(task_finished, lambda **given: None):
        yield
    provider.is_down = False


@contextmanager
def hearing(signal, receive):
    signal.connect(receive)
    yield
    signal.disconnect(receive)


@contextmanager
def after_each_answer(act):
    """Call `act` when the provider has answered, before its caller goes on."""
    ask = provider.charge

    def charge(key):
        answer = ask(key)
        act()
        return answer

    with mock.patch.object(provider, "charge", charge):
        yield


def result_of(task_id):
    return task_backends["default"].get_result(task_id)


def enqueue(name="note", **using):
    return getattr(tasks(), name).using(**using).enqueue(f"task {next(NAMES)}").id


def received(name, **using):
    """Enqueue a task and hand it over to the inbox, where it is due: its row."""
    task_id = enqueue(name, **using)
    drained("local://")
    return InboxMessage.objects.get(message_id=task_id).pk


def message_of(row):
    return InboxMessage.objects.get(pk=row).message_id


def effects(task_id):
    return Effect.objects.filter(name=result_of(task_id).args[0]).count()


def status_of(task_id):
    return str(result_of(task_id).status)


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
        status_of=status_of,
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

    return BoundedRetry(
        name="a queue with max_attempts=3",
        max_executions=3,
        make_failing=failing,  # ARRANGE
        due_work=lambda: due.longest_due("default"),  # REAL PRODUCTION
        run_once=work,  # REAL PRODUCTION
        advance_to_due=lambda row: travel(timedelta(hours=3)),
        is_terminal=lambda row: result_of(message_of(row)).is_finished,
        failure_attempt_count=lambda row: provider.asked[message_of(row)],
        observe=lambda row: (status_of(message_of(row)), result_of(message_of(row)).attempts),  # OBSERVE
    )


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


def sweep():
    """A worker that looks for due work once: it runs the task that its claim finds, if any."""
    claim_next = partial(claims.claim_due, "default", [handler.name for handler in registry.all()], timedelta(hours=1))
    started = []

    def claimed():
        """The due rows, in the order in which workers claim them."""
        with transaction.atomic():
            rows = [*iter(claim_next, None)]
            transaction.set_rollback(True)
        return rows

    def make_owed(name="note", age=timedelta()):
        rows = InboxMessage.objects.filter(pk=received(name))
        rows.update(next_attempt_at=utcnow() - age)
        return rows.get()

    def stranded(age):
        row = make_owed()
        claim_next()
        travel(timedelta(hours=1) + age)
        return row

    def make_terminal(age):
        rows = [received(name, queue_name="mail") for name in ("note", "fail", "fail")]
        run_due(registry.selected(topic_of("mail", lease=False)))
        decide("default", rows[-1], skipping("it is not needed"))
        return [*InboxMessage.objects.filter(pk__in=rows)]

    def tick():
        with hearing(task_started, lambda task_result, **given: started.append(task_result.id)):
            return runner_of(registry.all).turn()

    return recovery.DueWorkSweep(
        name="a worker",
        due_work=claimed,  # REAL PRODUCTION
        run_tick=tick,
        make_owed=make_owed,  # ARRANGE
        additional_owed_variants=(recovery.OwedWorkVariant(name="of a worker that died", make=stranded),),
        make_terminal=make_terminal,
        recovery_delay=timedelta(),
        page_size=1,
        identity_of=lambda row: row.message_id,
        dispatched_ids=lambda: started,  # OBSERVE
        observe_outstanding=lambda: open_states("default")["received"],
        in_flight=recovery.InFlightExecution(
            make_owed=partial(make_owed, "charge_in_a_transaction"),
            start=held_open,
            execution_count_for=lambda row: provider.asked[row.message_id],
        ),
    )


@contextmanager
def held_open(row, tick):
    asked, go_on = threading.Event(), threading.Event()

    def hold():
        asked.set()
        assert go_on.wait(SECONDS)

    with after_each_answer(hold), in_threads(tick, stop=go_on):
        assert asked.wait(SECONDS)
        yield


FAILS = "a failed task does not end a worker, which stores the error and runs the next one"
NOT_OF_A_WORKER = {
    recovery.assert_the_tick_is_actually_scheduled: "nothing schedules a process that does not end",
    recovery.assert_one_poisoned_identity_does_not_stall_the_tick: FAILS,
    recovery.assert_a_poisoned_page_does_not_starve_or_abandon_work: FAILS,
    recovery.assert_a_soft_time_limit_ends_the_tick: "a worker is stopped by a signal, not by an exception of the task",
    recovery.assert_selection_is_index_served: "the claim is a statement, not a QuerySet; see test_query_plans.py",
    recovery.assert_selection_does_not_read_the_replica: "the claim is an UPDATE",
}


def proof_of_recovery(proof):
    def run():  # ARRANGE, # REAL PRODUCTION, # EXTERNAL SEAM and # OBSERVE are in the sweep
        proof(sweep())

    return ExtraProof(name=proof.__name__, run=run, transactional=True, fixtures=("heard",))


def gate():
    """An operator has paused the queue."""
    row = received("charge")
    task_id = message_of(row)
    pause(PAYMENTS)

    def reserved_state():
        return InboxMessage.objects.values_list("state", "attempts", "fence", "next_attempt_at").get(pk=row)

    def row_version():
        return fetch(connection, f"SELECT xmin::text::bigint FROM {TABLE} WHERE id = %s", [row])[0][0]

    return ExecutionGate(
        name="a paused queue",
        identity=PAYMENTS,  # ARRANGE: it has this task only
        due_work=lambda: due.due_handlers("default", [PAYMENTS]),  # REAL PRODUCTION
        owed_work=lambda: due.stored_handlers("default"),
        reserved_state=reserved_state,
        routes={"the worker": work},
        make_eligible=lambda: resume(PAYMENTS),
        recover=work,
        advance=travel,
        executions=lambda: result_of(task_id).attempts,
        mutation_count=row_version,
        observe=lambda: TaskOutcome(status=status_of(task_id), effect=effects(task_id)),  # OBSERVE
        expected=DONE,
        effect_calls=lambda: provider.asked[task_id],  # EXTERNAL SEAM
        recovery_interval=timedelta(seconds=30),
        recovery_timeout=timedelta(hours=1),
    )


def replay():
    """The first worker dies between the answer of the provider and the record of the step."""

    def run(task_id):
        def die():
            if provider.asked[task_id] == 1:
                worker.kill_now("with the answer")

        with suppress(WorkerDied), django_worker_killer(None) as worker, after_each_answer(die):
            recover()

    return ReplaySafeEffect(
        name="a step with an idempotency key",
        prepare=lambda: enqueue("charge"),  # ARRANGE
        execute=run,  # REAL PRODUCTION
        observe=lambda task_id: [*provider.asked],  # OBSERVE: what was charged
        expected=lambda task_id: [task_id],
        execution_count_for=lambda task_id: provider.asked[task_id],  # EXTERNAL SEAM
    )


def admission():
    """A view stores its answer and enqueues a task, in one transaction."""

    def accept(request):
        return JsonResponse({"task": enqueue("charge")}, status=202)

    def admit():
        request = RequestFactory().post("/", headers={"Idempotency-Key": "order 17", "Authorization": "a token"})
        response = idempotent_view(scope=by_token)(accept)(request)
        return [json.loads(response.content)["task"]]

    def enqueued():
        return [*map(str, OutboxMessage.objects.values_list("message_id", flat=True))]

    @contextmanager
    def announced():
        seen = []

        def record(**given):
            seen.append(AdmissionPublication(in_transaction=connection.in_atomic_block))

        with hearing(task_enqueued, record):
            yield seen

    return AdmissionAtomicity(
        name="an idempotent view that enqueues a task",
        admit=admit,  # REAL PRODUCTION
        observe=lambda: [*IdempotentRequest.objects.values_list("key", "status")],  # OBSERVE
        expected=[("order 17", 202)],  # ARRANGE
        obligations=enqueued,
        outstanding=lambda: [task_id for task_id in enqueued() if not result_of(task_id).is_finished],
        effects=provider.asked.total,  # EXTERNAL SEAM
        publications=announced,
        during=lambda checkpoint: interrupt_after_statement(stores_the_answer, checkpoint),
        expected_error=AdmissionInterrupted,
    )


def stores_the_answer(sql):
    return sql.startswith(f'UPDATE "{IdempotentRequest._meta.db_table}"')


NOTE = history("note")
CHARGE = history("charge", external_calls=[ExternalCall(provider, "charge")])
FAIL = history("fail", expected=FAILED)

CONTRACT = ObligationContract(
    name="inbox.tasks.ExactlyOnceBackend",
    transactional=True,
    fixtures=("heard",),
    profiles={
        Profile.A: NotApplicable(
            "The worker is the sweep, and it does not end. All proofs are among the extras, except "
            + "; ".join(f"{proof.__name__}: {reason}" for proof, reason in NOT_OF_A_WORKER.items())
        ),
        Profile.B: Claim(),
        Profile.C: Claim(),
        Profile.D: Claim(),
        Profile.E: task_queues.settled_by_one_worker("task"),
        Profile.F: task_queues.the_obligation_is_the("message"),
        Profile.G: Claim(),
        Profile.H: Claim(),
        Profile.I: Claim(),
        Profile.J: Claim(),
    },
    ownership=ownership,
    ambiguity=ambiguity,
    retention=retention,
    retry=retry,
    eligibility=gate,
    replay=replay,
    admission={"a view": admission},
    handoffs=(NOTE, CHARGE, FAIL),
    handoff_delivery=CallableDelivery(name="outbox_relay", recover=recover),
    extras=tuple(
        proof_of_recovery(proof)
        for proof in (recovery.assert_sweep_bindings_are_production_bound, *recovery.DUE_WORK_PROOFS)
        if proof not in NOT_OF_A_WORKER
    ),
)


@due_work_contract_suite(CONTRACT)
class TestContract:
    pass
