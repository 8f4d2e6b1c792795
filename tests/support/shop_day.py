"""A busy day of a shop, as rows of both apps: something for every page of the admin.

    a_busy_day()          # believable data, for screenshots and for layout
    hostile_rows(NASTY)   # the same text in every column that holds a text

The rows are written directly. Other tests cover what relays and consumers write.
"""

from __future__ import annotations

import json
import math
import uuid
from copy import copy
from datetime import timedelta
from typing import Any

from django.db.models import CharField, TextField

import inbox.models
import outbox.models
from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.failures import DEFERRED
from exactly_once.models import Alert, AuditEntry, FailureNote, Lease, Minute, Operation, Process
from exactly_once.process.clock import utcnow
from exactly_once.telemetry.statistics import ALL, bucket_of
from exactly_once.wire.identity import new_message_id
from inbox.contrib.joins.models import Part, Run
from inbox.contrib.outgoing_webhooks import Endpoint
from inbox.contrib.tasks.models import Result
from inbox.models import InboxMessage
from inbox.states import State as InboxState
from outbox.contrib.recurring import recurring
from outbox.contrib.recurring.models import Schedule
from outbox.models import OutboxMessage, PendingCallback
from outbox.states import State
from tests.support.admin_pages import a_message
from tests.support.heartbeats import a_consumer, a_relay
from tests.support.inbox_rows import store_message

PLACED, PAID, SHIPPED, SMS = "shop.order.placed", "shop.order.paid", "shop.order.shipped", "shop.sms.due"
COUPON = "shop.coupon.granted"
RESERVE, CHARGE, PARCEL, TEXT = "stock.reserve_stock", "payments.request_payment", "shipments.send_parcel", "notices.send_sms"
TOPIC_OF = {RESERVE: PLACED, CHARGE: PLACED, PARCEL: PAID, TEXT: SMS}
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)

PAUSE = "The mail provider asks us to wait until 18:00."
TIMEOUT = ("payments.gateway.GatewayTimeout", "shop/payments/gateway.py:charge:88", "no answer within 10 s")
AMOUNT = ("ValueError", "shop/payments/handlers.py:request_payment:23", "the amount '12,50' is not a number")
ADDRESS = ("shipments.errors.UnknownPostcode", "shop/shipments/labels.py:label_for:41", "no carrier serves the postcode 99999")
_CALLERS = {
    TIMEOUT[0]: ("shop/payments/handlers.py", "request_payment", 26, "charge(order.customer, amount)"),
    AMOUNT[0]: ("shop/payments/handlers.py", "request_payment", 23, 'amount = Decimal(message.payload["amount"])'),
    ADDRESS[0]: ("shop/shipments/handlers.py", "send_parcel", 17, "label = label_for(order.address)"),
}


def a_busy_day(*, hours: int = 24, history: int = 0) -> None:
    """Write all rows.

    Args:
        hours: for how long there are statistics.
        history: how many more messages were published and handled.
    """
    _statistics(hours)
    _processes()
    _history(history)
    _outbox()
    _inbox()
    _decisions()


# ------------------------------------------------------------------------------------------------------------- statistics


def _statistics(hours: int) -> None:
    now = utcnow().replace(second=0, microsecond=0)
    rows = []
    for number in range(60 * hours - 1):
        minute = now - (number + 1) * MINUTE
        sent = int(320 + 140 * math.sin(number / 9) + 60 * math.sin(number / 2.3))
        trouble = max(0.0, 40 * math.sin((number - 8) / 7)) if number < 30 else 0.0
        published = {"published": sent, "retried": int(trouble / 4)}
        rows.append(_minute("outbox", minute, published, to_broker=_histogram(sent, 0.012 + 0.008 * abs(math.sin(number / 6)))))
        counts = {"handled": sent - int(trouble), "failed": int(trouble), "deferred": int(trouble / 3)}
        copies = {"redeliveries": int(2 + math.sin(number / 3)), "resends": number % 2, "repeats": int(number % 7 == 0)}
        times = {"to_inbox": _histogram(sent, 0.03), "to_effect": _histogram(sent, 0.045 + trouble / 150)}
        rows.append(_minute("inbox", minute, counts | copies, **times))
        if trouble:
            rows.append(_minute("inbox", minute, {"failed": int(trouble * 0.8)}, subject=CHARGE))
            rows.append(_minute("inbox", minute, {"failed": int(trouble * 0.2)}, subject=PARCEL))
            rows.append(_minute("outbox", minute, {"retried": int(trouble / 4)}, subject=SMS))
    Minute.objects.bulk_create(rows)


def _minute(app, minute, counts, *, subject=ALL, **times):
    process = "shop-web-1:811" if app == "outbox" else "shop-worker-1:902"
    return Minute(app=app, minute=minute, process=process, subject=subject, counts=counts, times=times)


def _histogram(count: int, median: float) -> dict[int, int]:
    shares = {0.4: 0.2, 0.8: 0.3, 1.2: 0.3, 2: 0.15, 5: 0.04, 12: 0.01}
    return {bucket_of(median * factor): max(1, int(count * share)) for factor, share in shares.items()}


# -------------------------------------------------------------------------------------------------------------- processes


def _processes() -> None:
    measured = {"memory_bytes": 61_000_000, "database_ms": 0.8, "broker_ms": 1.4}
    a_relay(host="shop-web-1", pid=811, published=1_482_210, rate=214.6, shards=32, last_pass_at=SECOND, **measured)
    a_relay(host="shop-web-2", pid=1204, published=1_391_007, rate=198.2, shards=32, last_pass_at=SECOND, **measured)
    a_relay(host="shop-web-0", pid=77, published=902_114, shards=21, silent_for=23 * MINUTE, **measured)
    measured["memory_bytes"] = 88_000_000
    for number, mode in ((1, "running"), (2, "running"), (3, "paused")):
        names = sorted(TOPIC_OF) if number < 3 else [TEXT]
        a_consumer(
            **{"host": f"shop-worker-{number}", "pid": 900 + 2 * number, "handlers": names, "mode": mode, **measured},
            received=730_114 // number,
            ran=2_310 // number,
            running=[a_run(name, f"worker-{thread}") for thread, name in enumerate(names)] if mode == "running" else [],
            rate=0.0 if mode == "paused" else 131.4 / number,
        )
    Process.objects.filter(app="inbox", mode="paused").update(
        requested="pause", requested_by="ada in the admin", requested_at=utcnow() - 9 * MINUTE, acknowledged_at=utcnow()
    )


def a_run(what: str, thread: str, *, message: str = "") -> dict[str, Any]:
    """What a thread runs, as a heartbeat has it."""
    given = {"what": what, "message": message or str(uuid.uuid4()), "messages": 1, "thread": thread}
    return {**given, "began": 5 * HOUR.total_seconds() - 3}


# ----------------------------------------------------------------------------------------------------------------- outbox


def _outbox() -> None:
    for number in range(12):
        made = (4 + 9 * number) * SECOND
        topic = (PLACED, PAID, SHIPPED)[number % 3]
        a_message(State.PUBLISHED, topic=topic, biz_id=_order(number), ago=made, settled_at=utcnow() - made, **_of(number))
    for number in range(3):
        a_message(State.READY, topic=PLACED, biz_id=_order(60 + number), **_of(number))
    for number in range(9):
        later = -(1 + number * number) * 7 * MINUTE
        a_message(State.SCHEDULED, topic=SMS, biz_id=_order(number), ago=13 * MINUTE, due_ago=later, **_of(number))
    unroutable = ("returned", f"NO_ROUTE: no queue is bound for the topic {COUPON}")
    for failure, topic, count in ((unroutable, COUPON, 5), (("nacked", "the broker answered basic.nack"), SMS, 3)):
        for number in range(count):
            failed = _refused(*failure, 2 + number, ago=(9 + number) * MINUTE)
            a_message(State.RETRYING, topic=topic, biz_id=_order(number), due_ago=-MINUTE, **failed)
    too_large = "PRECONDITION_FAILED: the body has 21,004,812 bytes, the broker takes 16,777,216"
    failed = _refused("too large", too_large, 5, ago=2 * HOUR)
    a_message(State.DEAD, topic="shop.invoice.made", biz_id=_order(41), key="customer-17", **failed)
    a_message(State.WAITING, topic="shop.invoice.made", biz_id=_order(42), key="customer-17", ago=4 * MINUTE)
    for number in range(4):
        a_message(State.PAUSED, topic="shop.review.due", biz_id=_order(number), ago=20 * MINUTE)
    settled = {"ago": 3 * HOUR, "settled_at": utcnow() - HOUR}
    a_message(State.CANCELLED, topic=SMS, biz_id=_order(50), **settled)
    a_message(State.EXPIRED, topic="shop.offer.made", biz_id=_order(51), **settled)
    transfer = "bank.transfer.made"
    a_message(State.PREPARED, topic=transfer, biz_id="transfer-7731", ago=40 * SECOND, due_ago=-20 * SECOND)
    a_message(State.STUCK, topic=transfer, biz_id="transfer-7702", ago=5 * HOUR, attempts=15, last_error="unknown: no row")
    for topic, columns in {
        "shop.review.due": {"paused_by": "ada in the admin", "reason": PAUSE, "paused_at": utcnow() - 20 * MINUTE},
        COUPON: {
            "mode": "refused",
            "reason": "20 refusals in a row: NO_ROUTE",
            "paused_at": utcnow() - MINUTE,
            "probe_at": utcnow() + 30 * SECOND,
            "pause_seconds": 60,
        },
    }.items():
        outbox.models.PausedTopic.objects.create(topic=topic, **columns)
    for number, error in enumerate(("", "ConnectionError: the ledger is unavailable")):
        now = utcnow()
        due = {"settled_at": now, "available_at": now + number * MINUTE, "attempts": 3 * number, "last_error": error}
        message = a_message(State.PUBLISHED, topic=PAID, biz_id=_order(70 + number), settled_at=now)
        PendingCallback.objects.create(message=message, event="published", callback="payments.book_in_the_ledger", **due)


def _history(count: int) -> None:
    """Messages that were published and handled without a failure."""
    sent = a_message(State.PUBLISHED, topic=PLACED, biz_id="order-first", ago=HOUR, settled_at=utcnow() - HOUR)
    done = a_handled(RESERVE, "order-first", ago=HOUR)
    published = []
    for number in range(1, count):
        published.append(copy(sent))
        published[-1].pk, published[-1].message_id, published[-1].biz_id = None, new_message_id(), _order(-number)
        columns = {field.attname: getattr(done, field.attname) for field in done._meta.concrete_fields if not field.primary_key}
        store_message(**{**columns, "message_id": str(published[-1].message_id), "biz_id": _order(-number)})
    OutboxMessage.objects.bulk_create(published)


def _of(number: int) -> dict[str, Any]:
    given = {"order": 10_240 + number, "customer": "Ada Byron", "total": "42.00", "currency": "EUR"}
    return {"payload": given, "headers": {"tenant": "eu-1"}, "correlation_id": f"cart-{7_300 + number}"}


def _order(number: int) -> str:
    return f"order-{10_240 + number}"


def _refused(kind: str, error: str, attempts: int, *, ago: timedelta) -> dict[str, Any]:
    """The columns of a message that the broker has not taken since it was published."""
    since = {"failing_since": utcnow() - ago + SECOND, "failed_at": utcnow() - 20 * SECOND}
    return {"ago": ago, "error_class": kind, "last_error": error, "attempts": attempts, **since}


# ------------------------------------------------------------------------------------------------------------------ inbox


def _inbox() -> None:
    for number in range(10):
        a_handled(RESERVE if number % 2 else TEXT, _order(number), ago=(5 + 11 * number) * SECOND)
    for number in range(14):
        failing(CHARGE, _order(20 + number), TIMEOUT, attempts=1 + number % 3, ago=(1 + 2 * number) * MINUTE)
    for number in range(6):
        failing(CHARGE, _order(40 + number), AMOUNT, attempts=5, dead=True, ago=(25 + 4 * number) * MINUTE)
    for number in range(3):
        failing(PARCEL, _order(50 + number), ADDRESS, attempts=5, dead=True, ago=(2 + number) * HOUR)
    for number in range(5):
        row = a_handled(RESERVE, _order(60 + number), ago=number * MINUTE, state=InboxState.RETRYING)
        InboxMessage.objects.filter(pk=row.pk).update(
            error_class=DEFERRED, last_error="out of stock", next_attempt_at=utcnow() + 5 * MINUTE, settled_at=None
        )
    head = failing(PARCEL, _order(80), ADDRESS, attempts=5, dead=True, ago=HOUR, key="customer-17", ordered=True)
    a_handled(PARCEL, _order(81), ago=HOUR, state=InboxState.WAITING, key=head.key, ordered=True)
    a_handled(TEXT, _order(82), ago=HOUR, state=InboxState.SKIPPED)
    a_handled(TEXT, _order(83), ago=HOUR, state=InboxState.SHED)
    a_handled(TEXT, _order(84), ago=HOUR, duplicates=3, redeliveries=2, resends=1)
    failing(TEXT, _order(85), ("refused", "", "it is older than the maximum message age"), dead=True, quarantined=True)
    inbox.models.PausedHandler.objects.create(
        handler=TEXT, paused_by="ada in the admin", reason="The SMS provider is down.", paused_at=utcnow() - 9 * MINUTE
    )
    _endpoints()
    _schedules()
    _a_life()
    _a_chain()


def _a_chain() -> None:
    """An order with its effects, of which one fails, and what their handlers published. Its correlation id is "cart-7299"."""
    cause = ""
    for number, (topic, handlers) in enumerate(((PLACED, (RESERVE, CHARGE)), (PAID, (PARCEL,)), (SHIPPED, ()))):
        ids = {"correlation_id": "cart-7299", "causation_id": cause}
        at = (40 - number) * SECOND
        row = a_message(State.PUBLISHED, topic=topic, biz_id=_order(99), ago=at, settled_at=utcnow() - at + SECOND / 50, **ids)
        cause = str(row.message_id)
        for handler in handlers:
            received = {"ago": at - SECOND / 10, "message_id": cause, "topic": topic, **ids}
            if handler == CHARGE:
                failing(handler, _order(99), TIMEOUT, attempts=2, **received)
            else:
                a_handled(handler, _order(99), **received)


def _schedules() -> None:
    now = utcnow()
    for name, columns in {
        "reports.nightly": {"recurrence": "0 3 * * * Europe/Berlin", "position": now - 9 * HOUR, "due_at": now + 15 * HOUR},
        "stock.recount": {"recurrence": "every 0:10:00", "position": now - 40 * MINUTE, "due_at": now + MINUTE,
                          "failures": 3, "error": "OperationalError: the warehouse is unavailable"},
        "newsletter.weekly": {"recurrence": "0 9 * * MON Europe/Berlin", "position": now - 2 * HOUR, "due_at": now,
                              "paused_at": now - 2 * HOUR},
    }.items():  # fmt: skip
        recurring(every=timedelta(days=1), name=name, using="other")(lambda tick: None)
        Schedule.objects.create(name=name, **columns)


def _endpoints() -> None:
    now = utcnow()
    answer = "POST https://{}.example/in was answered with {}".format
    unavailable = {"failures": 6, "probe_at": now + MINUTE, "reason": answer("accounting", "503: maintenance until 15:00")}
    for name, columns in {
        "warehouse": {"topics": [PLACED, PAID], "state_since": now - 9 * HOUR},
        "accounting": {"state": "paused", "state_since": now - MINUTE, **unavailable},
        "old-partner": {"state": "disabled", "state_since": now - 5 * HOUR, "reason": answer("old-partner", "410.")},
    }.items():
        Endpoint.objects.create(name=name, url=f"https://{name}.example/in", **columns)


def a_handled(handler: str, biz_id: str, *, ago: timedelta = timedelta(), state: str = InboxState.DONE, **columns: Any) -> Any:
    """A stored message of a handler: done, or in another state."""
    at = utcnow() - ago
    is_settled = state in {InboxState.DONE, InboxState.SKIPPED, InboxState.SHED}
    values = {
        "topic": TOPIC_OF.get(handler, PLACED),
        "message_id": str(uuid.uuid4()),
        "content_type": "application/json",
        "body": json.dumps(_of(int(biz_id[-2:]) if biz_id[-2:].isdigit() else 0)["payload"]).encode(),
        "headers": {"tenant": "eu-1"},
        "source": "/shop",
        "attempts": 1,
        "created_at": at - 80 * timedelta(milliseconds=1),
        "received_at": at,
        "settled_at": at + 30 * timedelta(milliseconds=1) if is_settled else None,
    }
    return store_message(handler=handler, biz_id=biz_id, state=state, **{**values, **columns})


def failing(
    handler: str,
    biz_id: str,
    failure: tuple[str, str, str],
    *,
    attempts: int = 1,
    dead: bool = False,
    ago: timedelta = timedelta(minutes=5),
    **columns: Any,
) -> Any:
    """A message that is retrying or dead."""
    kind, place, error = failure
    failed_at = utcnow() - min(ago / 2, 2 * MINUTE)
    return a_handled(
        handler,
        biz_id,
        ago=ago,
        state=InboxState.DEAD if dead else InboxState.RETRYING,
        attempts=attempts,
        error_class=kind,
        error_place=place,
        last_error=f"{kind.rpartition('.')[2]}: {error}",
        failing_since=utcnow() - ago + SECOND,
        failed_at=failed_at,
        next_attempt_at=None if dead else utcnow() + 4 * MINUTE,
        failures=[_attempt(number, failure, utcnow() - ago * (attempts - number) / attempts) for number in range(attempts)],
        **{"body": b'{"order": 10263, "customer": "Ada Byron", "amount": "12,50", "currency": "EUR"}', **columns},
    )


def _attempt(number: int, failure: tuple[str, str, str], at: Any) -> dict[str, Any]:
    kind, place, error = failure
    short = kind.rpartition(".")[2]
    last, own = f"{short}: {error}\n", ""
    if kind in _CALLERS:
        frame = '  File "{}", line {}, in {}\n    {}\n'.format
        file, function, line, code = _CALLERS[kind]
        own = frame(file, line, function, code)
        if not place.startswith(f"{file}:{function}:"):
            file, function, number_of_line = place.split(":")
            own += frame(file, number_of_line, function, f'raise {short}("{error}")')
        own += last
    library = '  File "/usr/lib/python3.12/contextlib.py", line 81, in inner\n    return func(*args, **kwds)\n'
    return {
        "attempt": number + 1,
        "at": at.isoformat(),
        "class": kind,
        "place": place,
        "error": last.strip(),
        "own": own,
        "traceback": own and f"Traceback (most recent call last):\n{library}{own}",
    }


def _a_life() -> None:
    """One message from its transaction to its failures, in the trails of both apps."""
    told = {"biz_id": "order-10299", "ago": 12 * MINUTE}
    sent = a_message(State.PUBLISHED, topic=PLACED, settled_at=utcnow(), **told, **_of(59))
    failing(CHARGE, failure=AMOUNT, attempts=2, dead=True, message_id=str(sent.message_id), **told)
    a_handled(RESERVE, message_id=str(sent.message_id), **told)
    begin, process = sent.created_at, "shop-web-1:811:lane-1"
    for seconds, was, became, reason in (
        (0.4, "ready", "retrying", "the connection to the broker ended"),
        (2.4, "retrying", "ready", ""),
        (2.43, "ready", "published", ""),
    ):
        step = {"was": was, "became": became, "reason": reason, "at": begin + seconds * SECOND, "process": process}
        outbox.models.TrailEntry.objects.create(message_id=sent.message_id, **step)
    process = "shop-worker-1:902:worker-3"
    for handler, seconds, was, became, reason in (
        (RESERVE, 2.45, "", "done", ""),
        (CHARGE, 2.46, "received", "retrying", AMOUNT[2]),
        (CHARGE, 32.5, "retrying", "dead", AMOUNT[2]),
    ):
        step = {"was": was, "became": became, "reason": reason, "at": begin + seconds * SECOND, "process": process}
        inbox.models.TrailEntry.objects.create(message_id=str(sent.message_id), handler=handler, **step)


# ------------------------------------------------------------------------------------------------- what operators have done


def _decisions() -> None:
    now = utcnow()
    for number, status in ((1, 201), (2, 402), (3, None)):
        key, at = (
            f"8e03978e-40d5-43e8-bc93-6894a57f9f{number:02}",
            {"at": now - number * MINUTE, "expires_at": now + 24 * 60 * MINUTE},
        )
        IdempotentRequest.objects.create(scope=f"user:{number}", key=key, view="payments:pay", status=status, **at)
    timeouts, amounts = (f"failure group {kind} {place}" for kind, place, _ in (TIMEOUT, AMOUNT))
    again = "wave 1: 1 of 1 messages failed again as before (ValueError)"
    canary = {"is_canary": True, "wave": 1, "failed_again": 1, "stopped_because": again}
    for number, (action, selection, state, total, done, columns) in enumerate(
        [
            ("retry", timeouts, "finished", 412, 409, {"refused": 2, "failed": 1}),
            ("retry", amounts, "stopped", 31, 1, canary),
            ("skip", f"all messages with handler {TEXT}, state dead", "cancelled", 5_000, 1_200, {"cancelled_by": "ada"}),
            ("retry", timeouts, "running", 1_180, 640, {"refused": 3, "rate": 50}),
        ]
    ):
        began = now - (4 - number) * 13 * MINUTE
        at = {"planned_at": began, "started_at": began + SECOND, "ended_at": began + MINUTE}
        if state == "running":
            at = {"planned_at": now - 15 * SECOND, "started_at": now - 13 * SECOND}
        asked = {"requested_by": "ada", "reason": "The gateway works again.", "holder": "shop-worker-1:902"}
        counted = {"state": state, "total": total, "done": done, **columns}
        if "refused" in columns:
            counted["reasons"] = {"it is done now": columns["refused"]}
            counted["unchanged"] = [[1, f"{PLACED} {_order(0)}", "it is done now"]]
        Operation.objects.create(app="inbox", action=action, selection=selection, **counted, **at, **asked)
    planned = {"state": "planned", "total": 5, "requested_by": "ada", "planned_at": now - 3 * SECOND}
    Operation.objects.create(app="outbox", action="restore", selection=f"failure group returned {COUPON}", **planned)
    slow = "The payment gateway is slow since 14:20. Their status page says: until 16:00. Retry as a canary then."
    deployed = "The coupon service is deployed at 15:00 and declares its queue."
    for app, (kind, place), note, writer, ago in (
        ("inbox", TIMEOUT[:2], slow, "ada", 14 * MINUTE),
        ("outbox", ("returned", COUPON), deployed, "grace", 8 * MINUTE),
    ):
        written = {"note": note, "written_by": writer, "written_at": now - ago}
        FailureNote.objects.create(app=app, error_class=kind, place=place, **written)
    seen = {"first_seen_at": now - 20 * MINUTE, "raised_at": now - 18 * MINUTE, "seen_at": now - 5 * SECOND}
    raised, cleared = {"state": "raised"}, {"state": "cleared", "cleared_at": now - 4 * MINUTE}
    for app, condition, on, summary, columns in (
        ("outbox", "unroutable", COUPON, "Its messages cannot be delivered, and wait. NO_ROUTE.", raised),
        ("inbox", "dead", "", "New dead letters within 15 min: 6. Retry, correct or skip them.", raised),
        ("inbox", "no_consumer", PARCEL, f"No consumer ran for the handler {PARCEL}.", cleared),
    ):
        Alert.objects.create(app=app, condition=condition, object=on, summary=summary, **seen, **columns)
    for app in ("outbox", "inbox"):
        at = {"valid_from": now - MINUTE, "expires_at": now + MINUTE, "done_at": now}
        Lease.objects.create(name=f"{app}: alerts", token=uuid.uuid4(), holder="shop-web-1:811", **at)
        # "place" of an entry is the admin or the name of a command.
        by = {"app": app, "at": now - 9 * MINUTE, "actor": "ada", "place": "admin", "address": "203.0.113.7"}
        for action, kind, name, parameters in (
            ("pause", "topic", "shop.review.due", {"reason": PAUSE}),
            ("retry", "operation", f"failure group {TIMEOUT[0]}", {"messages": 1_180, "rate": 50}),
            ("skip", "message", "shop.sms.due order-10322", {"reason": "The customer was called."}),
        ):
            AuditEntry.objects.create(action=action, kind=kind, name=name, parameters=parameters, **by)


# ---------------------------------------------------------------------------------------------------------- hostile texts


def hostile_rows(text: str) -> None:
    """One row more of each kind, with this text wherever a text is stored."""
    now, body = utcnow(), json.dumps({text: text}).encode()
    names = {"topic": text, "biz_id": text, "key": text, "headers": {text: text}}
    ids = {"correlation_id": text, "causation_id": text, "traceparent": text}
    for state in (State.DEAD, State.SCHEDULED, State.STUCK, State.PUBLISHED):
        failed = {"last_error": text, "attempts": 3}
        if state == State.DEAD:
            failed |= {"error_class": text, "failing_since": now, "failed_at": now}
        if state == State.PUBLISHED:
            failed |= {"settled_at": now}
        sent = a_message(state, payload={text: text}, **names, **ids, **failed)
    received = failing(
        text, text, (text, text, text), dead=True, topic=text, key=text, source=text, body=body, headers={text: text},
        message_id=str(sent.message_id), duplicates=2, conflicts=1, conflicting_id=text, conflicting_body=body,
        conflicting_at=now, result=text, **ids,
    )  # fmt: skip
    a_handled(text, f"2{text}", state=InboxState.RUNNING, message_id=f"2{text}", next_attempt_at=now)
    a_relay(host=text, waits_for=text)
    a_consumer(host=text, waits_for=text, handlers=[text], running=[a_run(text, text, message=text)])
    Process.objects.filter(host=text).update(requested="pause", requested_by=text, requested_at=now)

    trail = {"was": "ready", "became": "published", "at": now}
    _filled(outbox.models.TrailEntry, text, message_id=sent.message_id, **trail)
    _filled(inbox.models.TrailEntry, text, message_id=str(sent.message_id), **trail)
    _filled(PendingCallback, text, message=sent, event="dead", settled_at=now, available_at=now)
    _filled(outbox.models.PausedTopic, text, paused_at=now)
    _filled(inbox.models.PausedHandler, text, paused_at=now)
    _filled(inbox.models.Step, text, message=received, result=text, taken_at=now)
    _filled(Schedule, text, position=now)
    _filled(Endpoint, text, topics=[text], state="disabled", state_since=now)
    _filled(IdempotentRequest, text, at=now, expires_at=now, status=201)
    run = _filled(Run, text, row=received, opened_at=now, deadline_at=now)
    _filled(Part, text, run=run, body=body, stored_at=now, headers={text: text})
    task = json.dumps({"task": text, "args": [text], "kwargs": {text: text}, "backend": text}).encode()
    error = {"exception_class_path": text, "traceback": text}
    ended = {"status": "FAILED", "finished_at": now, "expires_at": now}
    _filled(Result, text, body=task, return_value=text, errors=[error], worker_ids=[text], **ended)
    for app in ("outbox", "inbox"):
        _filled(Minute, text, app=app, minute=now, counts={"dead": 900})
        _filled(FailureNote, text, app=app, written_at=now)
        _filled(AuditEntry, text, app=app, at=now, parameters={text: text})
        seen = {"first_seen_at": now, "seen_at": now, "unsent": [["raised", text]]}
        _filled(Alert, text, app=app, state="raised", **seen)
        refused = {"total": 3, "refused": 3, "reasons": {text: 3}, "unchanged": [[1, text, text]]}
        _filled(Operation, text, app=app, given={text: text}, state="stopped", planned_at=now, **refused)


def _filled(model: Any, text: str, **columns: Any) -> Any:
    """Store a row with these columns, and with this text in every other one that holds a text."""
    fields = [field for field in model._meta.concrete_fields if isinstance(field, (CharField, TextField)) and not field.choices]
    return model.objects.create(**{**{field.name: text[: field.max_length] for field in fields}, **columns})
