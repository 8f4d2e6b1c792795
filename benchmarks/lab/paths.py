"""The ways that a delivery goes through the inbox, each traced. It needs Django.

A way begins with the load that a worker takes, or with the runner's or Celery's turn, and ends with the answer. Each runs a
few times before it is traced, because statements are prepared and modules imported then. The shortest of some traces counts,
because some work is not done for every message.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import kombu
from celery import Celery
from celery.app.trace import build_tracer

from benchmarks.lab.traces import Trace, traced
from exactly_once.process.clock import monotonic, utcnow
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.envelope import Envelope
from inbox import Lease, batch_handler, idempotent_handler, leased_handler
from inbox.celery import IdempotentTask
from inbox.conf import InboxOptions
from inbox.consumer import runner
from inbox.consumer.answers import Acks, Delivery
from inbox.consumer.reception import Answers, Reception, envelope_of
from inbox.consumer.runner import Runner
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.receiving.admit import admit
from inbox.receiving.reading import read
from inbox.states import Outcome

WARM_UP, TRACED = 3, 5
IN_TURN, GROUP, BATCH = 10, 50, 100
TOPIC = "benchmarks.traced"


def paths() -> dict[str, Trace]:
    """By its name, the trace of each way. Needs Django, and the tables of the default database outside any transaction."""
    runner._SUCCESSORS_SECONDS = 60.0  # noqa: SLF001 - however slow the machine is
    return {
        "fresh delivery": _traced(_Handled()),
        f"{IN_TURN} fresh deliveries in turn": _traced(_InTurn(), count=IN_TURN),
        f"group commit of {GROUP}": _traced(_Handled(group_commit=GROUP), count=GROUP),
        f"batch of {BATCH}": _traced(_Handled(size=BATCH), count=BATCH),
        "stored message": _traced(_Stored()),
        f"{IN_TURN} stored messages in turn": _traced(_Stored(), count=IN_TURN),
        "lease in the database": _traced(_Handled(lease=True)),
        f"{IN_TURN} leases in turn": _traced(_InTurn(lease=True), count=IN_TURN),
        "duplicate": _traced(_Repeated()),
        "ordered": _traced(_Ordered(ordered=True)),
        "idempotent Celery task": _traced(_Task()),
        "first failure": _traced(_Handled(_fails)),
        "failing retry": _traced(_Retried(_fails)),
    }


def _traced(way: Any, *, count: int = 1) -> Trace:
    found = []
    for turn in range(WARM_UP + TRACED):
        way.prepare(count)
        if turn < WARM_UP:
            way.go()
        else:
            found.append(traced(way.go))
    way.end()
    return min(found, key=lambda trace: (trace.round_trips, trace.calls))


def _succeeds(message: object) -> None:
    pass


def _fails(message: object) -> None:
    raise LookupError("no such order")


class _Handled:
    """Fresh deliveries, from the worker's load to the answers."""

    def __init__(self, function: Callable[[Any], None] = _succeeds, *, lease: bool = False, **options: Any) -> None:
        name = f"benchmarks.traced-{uuid.uuid4()}"
        if lease:
            leased_handler(TOPIC, name=name, lease=Lease(), **options)(function)
        elif "size" in options:
            batch_handler(TOPIC, name=name, **options)(function)
        else:
            idempotent_handler(TOPIC, name=name, **options)(function)
        found = registry.get(name)
        assert found is not None
        registry.remove(name)
        self.handler = found
        self.options = InboxOptions(BACKOFF=(timedelta(hours=1), timedelta(hours=2)))
        self.runner = Runner(self.options, handlers=lambda: [self.handler], reports_unknown=False)
        self.reception = Reception(self.options, self.runner, self._answer)
        self.load: list[Any] = []

    def prepare(self, count: int) -> None:
        # What the runner does once a second is done then; and every second turn begins with the handlers without a rate limit.
        self.runner.turn()
        self.runner.turn()
        self.load = [self._delivery() for _ in range(count)]

    def go(self) -> None:
        self.reception.receive(self.load)

    def end(self) -> None:
        """Leave no row behind, which a consumer of this database would count."""
        InboxMessage.objects.filter(handler=self.handler.name).delete()

    def _answer(self, answers: Answers) -> None:
        if outcomes := {outcome for _, outcome in answers} - {Outcome.HANDLED, Outcome.STORED, Outcome.DUPLICATE}:
            raise AssertionError(f"the outcomes of deliveries are {outcomes}")

    def _delivery(self) -> Any:
        envelope = Envelope(
            id=str(uuid.uuid4()),
            topic=TOPIC,
            source="/benchmarks",
            created_at=utcnow(),
            biz_id=f"order-{uuid.uuid4()}",
            key="customer-1",
            body=b'{"order": 1}',
        )
        message = kombu.Message(
            body=envelope.body,
            headers=envelope.to_headers(),
            properties={"message_id": envelope.id},
            content_type=envelope.content_type,
            content_encoding="utf-8",
            delivery_info={"routing_key": TOPIC, "redelivered": False},
        )
        return Delivery(Acks(None, multiple=False), self.handler, message, monotonic())


class _InTurn(_Handled):
    """Fresh deliveries that one worker takes one by one, from the first to the last answer."""

    def go(self) -> None:
        waiting = iter(self.load)
        self.reception.receive([next(waiting)], more=lambda: next(waiting, None))


class _Repeated(_Handled):
    """Duplicates of messages that have been handled."""

    def prepare(self, count: int) -> None:
        super().prepare(count)
        self.go()
        self.load = [Delivery(one.acks, one.handler, one.message, monotonic()) for one in self.load]


class _Ordered(_Handled):
    """An ordered delivery, from the worker's load to its answer, and then as the runner runs it."""

    def go(self) -> None:
        super().go()
        self.runner.turn()


class _Stored(_Handled):
    """A message that was stored before, as the runner runs it."""

    def prepare(self, count: int) -> None:
        super().prepare(count)
        arrivals = [read(self.handler, envelope_of(delivery.message), self.options) for delivery in self.load]
        admit(self.handler, arrivals, self.options)

    def go(self) -> None:
        self.runner.turn()


class _Retried(_Handled):
    """A message that has failed before, as the runner runs it and it fails again."""

    def prepare(self, count: int) -> None:
        self.end()
        super().prepare(count)
        self.reception.receive(self.load)
        InboxMessage.objects.filter(handler=self.handler.name).update(next_attempt_at=DatabaseTime())

    def go(self) -> None:
        self.runner.turn()


class _Task:
    """A delivery of an idempotent task, as Celery's worker traces it."""

    def __init__(self) -> None:

        app = Celery("traced", broker="memory://", set_as_current=False)

        @app.task(name="benchmarks.traced", base=IdempotentTask, biz_id="order", ignore_result=True)  # type: ignore[untyped-decorator]
        def task(order: str) -> None:
            pass

        self._trace = build_tracer(task.name, task, app=app)
        self._given: tuple[dict[str, Any], dict[str, Any]] = {}, {}

    def prepare(self, count: int) -> None:
        headers = {"inbox_sent_at": utcnow().isoformat()}
        request = {"id": str(uuid.uuid4()), "retries": 0, "headers": headers, "delivery_info": {"redelivered": False}}
        self._given = {"order": str(uuid.uuid4())}, request

    def go(self) -> None:
        kwargs, request = self._given
        self._trace(request["id"], (), kwargs, request)

    def end(self) -> None:
        InboxMessage.objects.filter(handler__endswith="benchmarks.traced").delete()


def figures(trace: Trace) -> dict[str, int]:
    return {"calls": trace.calls, "modules": trace.modules, "moves": trace.moves, "round trips": trace.round_trips}
