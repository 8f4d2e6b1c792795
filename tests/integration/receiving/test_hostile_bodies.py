"""Bodies that would take more memory than there is, or end the process that reads them. Anybody who may publish can send one.

Each becomes a dead letter, or runs out of attempts, and delays no other message.
"""

import json
import zlib
from datetime import timedelta

import pytest

from inbox.models import InboxMessage
from inbox.operators import accounting
from inbox.operators.editing import editable, replace_message
from inbox.states import Outcome, State
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.decisions import retry
from tests.support.deliveries import (
    TOPIC,
    an_envelope,
    deliver,
    drain,
    effects,
    handed_over,
    make_due,
    options,
    the_effect,
    the_row,
)
from tests.support.waiting import wait_until
from tests.support.workers import (
    NAMED_OF_THE_WORKERS,
    OF_THE_WORKERS,
    broker_options,
    consuming,
    declare,
    mark_redelivered,
    send,
)

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

MEGABYTE = 1024 * 1024
SHORT = timedelta(milliseconds=200)
STRUCTURED = "application/cloudevents+json"


def zeros(megabytes):
    """So many megabytes of zeros, compressed piece by piece."""
    piece, compressor = bytes(MEGABYTE), zlib.compressobj(1)
    return b"".join([*(compressor.compress(piece) for _ in range(megabytes)), compressor.flush()])


@pytest.fixture
def worker(a_process, rabbitmq_url):
    """`inbox_consume` in a process of its own, whose memory can be measured."""

    def start(**options):
        for handler in (OF_THE_WORKERS, *NAMED_OF_THE_WORKERS):
            declare(handler, broker_options(rabbitmq_url))
        return a_process("inbox_consume", app="named", BACKOFF=(SHORT, SHORT), REDELIVERY_AFTER=SHORT, **options)

    return start


def empty_arrays():
    return b"[" + b"[]," * (5 * MEGABYTE) + b"[]]"


BOMBS = {
    "gzip": lambda: (zeros(256), {"headers": {"compression": "application/x-gzip"}}, "inflates to more than"),
    "empty arrays": lambda: (empty_arrays(), {}, "values"),
    "empty arrays in an event": lambda: (
        b'{"specversion":"1.0","data":' + empty_arrays() + b"}",
        {"content_type": STRUCTURED},
        "values",
    ),
    "60 MB": lambda: (b'"' + b"x" * (60 * MEGABYTE) + b'"', {}, "bytes, more than"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_body_over_the_limit_is_a_dead_letter_with_its_body_and_takes_no_memory(worker, rabbitmq_url, length, bomb):
    body, properties, reason = BOMBS[bomb]()
    with worker() as process:
        send(rabbitmq_url, JOB, {}, message_id="first")
        process.until(lambda: Effect.objects.count() == 1)
        before = process.peak_megabytes()
        send(rabbitmq_url, JOB, None, body=body, **{"message_id": "bomb", "content_encoding": "binary", **properties})
        send(rabbitmq_url, JOB, {}, message_id="last")
        process.until(lambda: Effect.objects.count() == 2 and length(OF_THE_WORKERS) == 0)
        taken = process.peak_megabytes() - before

    row = the_row(message_id="bomb")
    assert (row.state, row.attempts, bytes(row.body)) == (State.DEAD, 0, body)
    assert reason in row.last_error
    assert "INBOX['BODY_LIMIT_BYTES']" in row.last_error
    # A body comes in frames, which are joined; it is sent to the database, and libpq copies it for that.
    assert taken < 64 + 5 * len(body) // MEGABYTE


EVENT = {"specversion": "1.0", "id": "large", "source": "/shop", "type": TOPIC, "data": "x" * 2_000}


def a_structured_one(event):
    return an_envelope(event, content_type=STRUCTURED, id="", biz_id="")


LARGE = {
    "by its biz-id": lambda: an_envelope("x" * 2_000, biz_id="order-1"),
    "by its id": lambda: an_envelope("x" * 2_000, biz_id=""),
    "in structured mode": lambda: an_envelope(EVENT, content_type=STRUCTURED, id="", biz_id=""),
    "in structured mode by its biz-id": lambda: an_envelope(
        {**EVENT, "bizid": "order-1"}, content_type=STRUCTURED, id="", biz_id=""
    ),
}
TOO_SMALL = options(BODY_LIMIT_BYTES=1_024)


class TestLimitThatWasRaised:
    """A message that was refused for its size, which an operator retries, and copies of it."""

    @pytest.fixture(params=LARGE)
    def refused(self, request, handles):
        """The handler, which fails at first, what it got, and the envelope of the refused message."""
        given = []

        def handle(message):
            given.append((message.payload, message.headers))
            the_effect(message)
            if len(given) == 1:
                raise ValueError("not yet")

        handler, envelope = handles(handle), LARGE[request.param]()
        assert deliver(handler, envelope, given=TOO_SMALL) is Outcome.DEAD
        return handler, given, envelope

    def test_it_is_handled_with_its_payload_in_each_attempt_and_a_copy_of_it_is_a_duplicate(self, refused):
        handler, given, envelope = refused
        retry("default", the_row().pk)
        drain()
        make_due()
        drain()

        assert deliver(handler, envelope) is Outcome.DUPLICATE
        assert given == [("x" * 2_000, {})] * 2
        assert (effects(), the_row().state) == (1, State.DONE)

    def test_retry_of_a_message_of_which_a_copy_was_handled_counts_it_as_a_duplicate(self, refused):
        handler, given, envelope = refused
        deliver(handler, envelope)
        make_due()
        drain()
        dead = InboxMessage.objects.get(state=State.DEAD)

        retry("default", dead.pk)
        drain()

        assert (the_row().state, the_row().duplicates) == (State.DONE, 1)
        assert (len(given), effects()) == (2, 1)

    def test_correction_of_it_has_its_biz_id(self, refused):
        handler, given, envelope = refused
        [dead] = InboxMessage.objects.all()

        replace_message("default", dead.pk, editable(dead).replace("xx", "yy"), by="by ada")
        drain()
        make_due()
        drain()

        assert deliver(handler, envelope) is Outcome.DUPLICATE
        assert (given[-1], effects()) == (("y" * 2_000, {}), 1)


def test_many_stored_messages_with_large_bodies_are_run_in_bounded_memory(worker, rabbitmq_url):
    """Each thread of a consumer claims one message at a time."""
    with worker() as process:
        send(rabbitmq_url, JOB, {}, message_id="first")
        process.until(lambda: Effect.objects.count() == 1)
        before = process.peak_megabytes()
        for number in range(100):
            handed_over(OF_THE_WORKERS, an_envelope({"large": "x" * MEGABYTE}, topic=JOB, biz_id=f"large {number}"))
        process.until(lambda: Effect.objects.count() == 101)
        taken = process.peak_megabytes() - before

    assert taken < 64


@pytest.mark.parametrize("handler", NAMED_OF_THE_WORKERS, ids=["transaction", "ordered", "lease"])
def test_message_that_ends_the_process_reading_it_runs_out_of_attempts_and_delays_no_other(
    worker, rabbitmq_url, length, handler
):
    with worker(MAX_ATTEMPTS=3) as process:
        send(rabbitmq_url, handler.topics[0], {"kills": True}, message_id="killer")
        for number in range(5):
            send(rabbitmq_url, handler.topics[0], {"name": f"other-{number}"}, message_id=f"m-{number}")
        process.restarted_until(lambda: InboxMessage.objects.filter(state=State.DEAD).exists())
        undecided = InboxMessage.objects.filter(biz_id__startswith="parked:").exclude(state=State.DEAD)
        process.restarted_until(lambda: Effect.objects.count() == 5 and length(handler) == 0 and not undecided.exists())
        ended = len(process.exits)

    row = the_row(message_id="killer")
    # After an attempt that never ended one more is granted, but not under a lease.
    attempts = 3 if handler.lease else 4
    assert (row.state, row.attempts) == (State.DEAD, attempts)
    assert "process" in row.last_error
    # The first delivery, and each attempt.
    assert ended == attempts + 1
    assert set(Effect.objects.values_list("name", flat=True)) == {f"other-{number}" for number in range(5)}


@pytest.mark.parametrize("compression", ["gzip", "bzip2"])
def test_compressed_message_is_decoded_in_each_attempt_and_handled_once(handles, rabbitmq_url, length, compression):
    def fails_once(message):
        got.append(message.payload)
        if message.attempt == 1:
            raise ValueError("not yet")

    got = []
    handler, options = handles(fails_once), broker_options(rabbitmq_url)
    declare(handler, options)
    for _ in range(2):
        send(rabbitmq_url, TOPIC, {"a": "ä"}, message_id="m", compression=compression)

    with consuming([handler], options):
        wait_until(lambda: InboxMessage.objects.filter(duplicates=1).exists() and length(handler) == 0)
        make_due()
        wait_until(InboxMessage.objects.filter(state=State.DONE).exists)

    assert got == [{"a": "ä"}] * 2
    assert the_row().conflicts == 0


def an_event(name, data):
    return json.dumps(
        {"specversion": "1.0", "id": name, "source": "/till", "type": TOPIC, "bizid": name, "data": data}
    ).encode()


@pytest.mark.parametrize(
    ("properties", "body"),
    [
        pytest.param({"message_id": "m"}, b'{"name": "n"}', id="named by its headers"),
        pytest.param({"content_type": STRUCTURED}, an_event("m", {"name": "n"}), id="named in its body"),
        pytest.param(
            {"content_type": STRUCTURED, "headers": {"compression": "gzip"}},
            zlib.compress(an_event("m", {"name": "n"})),
            id="named in its compressed body",
        ),
    ],
)
@pytest.mark.parametrize("by_payload", [False, True], ids=["biz-id of the message", "biz-id in the payload"])
def test_redelivered_message_is_handled_once_and_its_copies_are_duplicates(
    handles, rabbitmq_url, length, properties, body, by_payload
):
    handler = handles(the_effect, **({"biz_id": lambda message: message.payload["name"]} if by_payload else {}))
    options, name = broker_options(rabbitmq_url), "n" if by_payload else "m"
    declare(handler, options)
    for _ in range(2):
        send(rabbitmq_url, TOPIC, None, body=body, **properties)
    mark_redelivered(handler, options)
    send(rabbitmq_url, TOPIC, None, body=body, **properties)

    with consuming([handler], options):
        wait_until(lambda: length(handler) == 0)
        wait_until(lambda: make_due() == 0 and InboxMessage.objects.filter(state=State.DONE).exists())

    row = the_row()
    assert (row.biz_id, row.message_id, row.attempts, row.duplicates) == (name, "m", 1, 2)
    assert (effects(name), row.conflicts) == (1, 0)
    assert accounting.balance("default").delivered == 3


def test_redelivered_message_that_cannot_be_read_is_a_dead_letter_with_its_reason(handles, rabbitmq_url, length):
    handler, options = handles(the_effect, biz_id=lambda message: message.payload["name"]), broker_options(rabbitmq_url)
    declare(handler, options)
    for name, body in (("not JSON", b"{"), ("no name", b"{}"), ("bomb", zlib.compress(bytes(MEGABYTE * 17)))):
        headers = {"compression": "gzip"} if name == "bomb" else {}
        send(rabbitmq_url, TOPIC, None, body=body, message_id=name, headers=headers)
    mark_redelivered(handler, options)

    with consuming([handler], options):
        wait_until(lambda: length(handler) == 0)
        wait_until(lambda: InboxMessage.objects.filter(state=State.DEAD).count() == 3)

    reasons = dict(InboxMessage.objects.values_list("message_id", "last_error"))
    assert "is not JSON" in reasons["not JSON"]
    assert "biz_id of" in reasons["no name"]
    assert "inflates to more than" in reasons["bomb"]
