"""The worker pool: which work its threads take next, how much runs at once, and how the pool is closed."""

import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import kombu
import pytest

from exactly_once.process import work
from exactly_once.process.clock import monotonic
from inbox import Batch, Ordered
from inbox.consumer.answers import Acks, Delivery, Unanswered
from inbox.consumer.lanes import Lane
from inbox.consumer.pool import Pool
from inbox.handlers.handler import Handler
from inbox.limits.slots import slots_of
from tests.support.deliveries import A_WHILE
from tests.support.waiting import wait_until


class Store:
    """Stands in for the runner: `due` stored messages, each run by one call of `turn`."""

    def __init__(self, due=0, do=lambda: None):
        self.due = due
        self.ran = 0
        self.on_ring = None
        self.unavailable = set()
        self._do = do
        self._lock = threading.Lock()

    def seconds_left(self, now):
        return 0.0 if self.due else 60.0

    def is_paused(self, handler):
        return False

    def can_store(self, alias):
        return alias not in self.unavailable

    def turn(self):
        with self._lock:
            if not self.due:
                return 0
            self.due -= 1
            self.ran += 1
        self._do()
        return 1

    def add(self, count):
        self.due += count
        self.on_ring()


def a_lane(name="tests.pool", *, using="default", **options):
    return Lane(Handler(name=name, topics=("t",), function=print, biz_id=None, using=using, **options))


def a_delivery(lane, number=0):
    return Delivery(Acks(None, multiple=True), lane.handler, kombu.Message(body=b"", delivery_tag=number), monotonic())


def a_pool(lanes, store=None, *, size=1, receive=len, **options):
    """A pool whose loads are received by `receive`."""
    reception = SimpleNamespace(receive=lambda load, more: receive(load), check=list)
    return Pool(store or Store(), size=size, lanes=lanes, reception=reception, **options)


def end_channels(deliveries):
    for delivery in deliveries:
        delivery.acks.is_open = False


@contextmanager
def running(lanes, store=None, **options):
    pool = a_pool(lanes, store, **options)
    pool.start()
    try:
        yield pool
    finally:
        pool.close()
        wait_until(lambda: not pool.alive)


class Work:
    """Records the loads that the workers were given, in order; with a gate each worker waits for it."""

    def __init__(self, *, gate=None):
        self.done = []
        self.at_once = self.most = 0
        self._gate = gate
        self._lock = threading.Lock()

    def __call__(self, load):
        with self._lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        if self._gate is not None:
            assert self._gate.wait(A_WHILE)
        with self._lock:
            self.at_once -= 1
            self.done.append((load[0].handler.name, [delivery.message.delivery_tag for delivery in load]))


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def test_stored_and_delivered_messages_share_the_threads(gate):
    lane, work = a_lane(), Work(gate=gate)
    store = Store(5, do=lambda: work([a_delivery(lane, "stored")]))
    with running([lane], store, receive=work, size=2) as pool:
        for number in range(5):
            pool.put(lane, a_delivery(lane, number))
        wait_until(lambda: work.at_once == 2)
        gate.set()
        wait_until(lambda: len(work.done) == 10)

    assert work.most == 2


def test_stored_and_delivered_messages_take_turns():
    lane, order = a_lane(), []
    store = Store(10, do=lambda: order.append("stored"))
    pool = a_pool([lane], store, receive=lambda load: order.append("delivered"))
    for number in range(10):
        pool.put(lane, a_delivery(lane, number))
    pool.start()
    wait_until(lambda: len(order) == 20)
    pool.close()

    assert order == ["delivered", "stored"] * 10


def test_lanes_take_turns():
    lanes, work = [a_lane("a"), a_lane("b"), a_lane("c")], Work()
    pool = a_pool(lanes, receive=work)
    for number in range(3):
        for lane in lanes:
            pool.put(lane, a_delivery(lane, number))
    pool.start()
    wait_until(lambda: len(work.done) == 9)
    pool.close()

    assert work.done == [(name, [number]) for number in range(3) for name in "abc"]


def test_a_lane_that_waits_for_its_batch_does_not_hold_up_another_lane():
    batch, single, work = a_lane("batch", kind=Batch(size=10, wait=timedelta(hours=1))), a_lane("single"), Work()
    with running([batch, single], receive=work) as pool:
        pool.put(batch, a_delivery(batch))
        pool.put(single, a_delivery(single))
        wait_until(lambda: work.done == [("single", [0])])


def test_idle_worker_takes_a_batch_that_becomes_full():
    lane, work, idle = a_lane(kind=Batch(size=10, wait=timedelta(hours=1))), Work(), []
    with running([lane], receive=work, on_idle=lambda: idle.append(len(lane))) as pool:
        wait_until(lambda: idle)
        for number in range(10):
            pool.put(lane, a_delivery(lane, number))
        wait_until(lambda: work.done)

    assert work.done == [("tests.pool", list(range(10)))]


def test_incomplete_batch_is_run_at_once_while_draining():
    lane, work = a_lane(kind=Batch(size=10, wait=timedelta(hours=1))), Work()
    with running([lane], receive=work) as pool:
        pool.put(lane, a_delivery(lane))
        pool.hurry()
        wait_until(lambda: work.done)

    assert work.done == [("tests.pool", [0])]


def test_an_ordered_lane_is_run_by_one_thread_at_a_time(gate):
    lane, work = a_lane(ordered=Ordered()), Work(gate=gate)
    with running([lane], receive=work, size=3) as pool:
        pool.put(lane, a_delivery(lane, 0))
        wait_until(lambda: work.at_once == 1)
        for number in range(1, 4):
            pool.put(lane, a_delivery(lane, number))
        gate.set()
        wait_until(lambda: len(work.done) == 2)

    assert work.most == 1
    assert [numbers for _, numbers in work.done] == [[0], [1, 2, 3]]


def test_deliveries_of_a_database_that_cannot_store_wait_and_occupy_no_thread():
    store, work = Store(), Work()
    store.unavailable.add("unavailable")
    far, near = a_lane("far", using="unavailable"), a_lane("near")
    with running([far, near], store, receive=work) as pool:
        pool.put(far, a_delivery(far))
        pool.put(near, a_delivery(near))
        wait_until(lambda: work.done == [("near", [0])])
        assert pool.stale(monotonic() + 1) == []
        assert pool.unstorable(monotonic() + 1) == [far]
        store.unavailable.clear()
        store.on_ring()
        wait_until(lambda: pool.idle)

    assert work.done[1:] == [("far", [0])]


def test_undecided_deliveries_of_an_ended_channel_are_dropped():
    lane, received = a_lane(), []

    def receive(load):
        received.extend(delivery.message.delivery_tag for delivery in load)
        end_channels(load)
        raise Unanswered(load, 0.0)

    with running([lane], receive=receive) as pool:
        pool.put(lane, a_delivery(lane, 7))
        wait_until(lambda: pool.idle)

    assert received == [7]


def test_a_ring_runs_stored_messages_at_once():
    store = Store()
    with running([], store, size=2):
        store.add(3)
        wait_until(lambda: store.ran == 3)


def test_idle_callback_is_called_whenever_a_worker_has_no_work():
    lane, work, done_when_idle = a_lane(), Work(), []
    with running([lane], receive=work, on_idle=lambda: done_when_idle.append(len(work.done))) as pool:
        for number in range(3):
            pool.put(lane, a_delivery(lane, number))
            wait_until(lambda number=number: number + 1 in done_when_idle)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_unexpectedly_is_reported():
    lane = a_lane()
    with running([lane], receive=lambda load: 1 / 0, size=2) as pool:
        pool.refuse_if_ended()
        pool.put(lane, a_delivery(lane))
        wait_until(lambda: pool.alive < 2)
        with pytest.raises(RuntimeError, match="a worker thread has ended unexpectedly"):
            pool.refuse_if_ended()


def test_a_load_that_cannot_be_stored_leaves_the_slot_of_its_handler():
    lane, tried = a_lane("tests.pool with one slot", concurrency=1), []

    def receive(load):
        tried.append(load[0].message.delivery_tag)
        if len(tried) == 1:
            raise Unanswered(load, 0.01)

    with running([lane], size=2, receive=receive) as pool:
        for number in (1, 2):
            pool.put(lane, a_delivery(lane, number))
        wait_until(lambda: sorted(tried) == [1, 1, 2])

    assert slots_of(lane.handler).is_free


def test_load_is_not_taken_for_a_run_as_long_as_all_of_its_messages(monkeypatch):
    now = 0.0
    monkeypatch.setattr(work, "monotonic", lambda: now)
    before = work.begin("inbox", "default", "tests.pool", "m1", 2)
    try:
        run = work.begin("inbox", "default", "tests.pool", "m1")
        now = 100.0
        assert [one.message for one in work.lasting("inbox", 90)] == ["m1"]
        work.end(run)
        now = 110.0
        assert not work.lasting("inbox", 90)
        now = 190.0
        assert work.lasting("inbox", 90)
    finally:
        work.end(before)


def test_message_that_runs_for_long_is_reported_once_with_the_stack_of_its_thread(caplog):
    pool, before = a_pool([]), work.begin("inbox", "default", "tests.pool", "m1")
    try:
        for _ in range(2):
            pool.report_overdue(timedelta())
    finally:
        work.end(before)

    (report,) = [record.getMessage() for record in caplog.records if "message m1 has been running" in record.getMessage()]
    assert "test_pool.py" in report
