"""Crashes, freezes and outages of the relay: nothing is lost, the order of keys is kept, no outage counts as an attempt.

A takeover does not wait for a deadline: tests that show this set deadlines longer than the test's own time limit. How long the
takeover took is written to the log and to the report, and not asserted.

Most of them wait for deadlines and watchdogs to end.
"""

import logging
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from django.db import connection

from exactly_once.models import Process as ProcessRow
from exactly_once.process.loop import EXIT_SILENT
from outbox.models import OutboxMessage
from outbox.store.dialect import LOCK_SPACE
from tests.support.apps.effects.models import Effect
from tests.support.crash import witness as load
from tests.support.crash.oracle import verdict
from tests.support.crash.points import AWAIT, SEND, SETTLE, WRITE
from tests.support.crash.witness import everything_is_published
from tests.support.crash.world import RELAY
from tests.support.servers import FaultProxy
from tests.support.sql import executed
from tests.support.threads import in_threads
from tests.support.waiting import wait_until

logger = logging.getLogger(__name__)


NEVER = {"BATCH_DEADLINE": 60, "WATCHDOG": 300}
"""No deadline ends within the time limit of a test."""
SOON = {"BATCH_DEADLINE": 1, "WATCHDOG": 300}
MANY = 120
PADDING = 3_000
FEW, BACKLOG = 5, 600


STEPS = {
    "looked": ("after outbox.store.looking.look", False),
    "locked": ("before outbox.store.claiming.read_ready", True),
    "read": ("after outbox.store.claiming.claim_ready", True),
    "sending": (f"after {WRITE}", True),
    "sent, not confirmed": (f"before {AWAIT}", True),
    "confirmed, not settled": (f"before {SETTLE} 1 once {SEND}", True),
    "settled, not committed": (f"after {SETTLE} 1 once {SEND}", True),
    "committed": (f"after outbox.relay.passes.Pass.run 1 once {SEND}", False),
}
LANES = ["main-loop", "lane_0"]


def locked_shards():
    """The shards that a relay holds now.

    A stopped process has sent statements that the server still executes: they may lock more.
    """
    wait_until(lambda: not sessions("active"))
    found = executed(
        "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid = %s "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        [LOCK_SPACE % 2**32],
    )
    return {shard for (shard,) in found}


def sessions(state):
    """The relays' sessions in this state."""
    return executed("SELECT pid FROM pg_stat_activity WHERE application_name = %s AND state = %s", [RELAY, state])


def working_relay(world, **how):
    """A relay that has published something."""
    relay = world.relay(**how)
    load.write(1)
    world.wait_until(everything_is_published, "the relay is at work")
    return relay


def freeze_while_idle(world, relay):
    def frozen():
        relay.freeze()
        world.wait_until(lambda: relay.is_stopped, "it stands still")
        if not locked_shards() and not sessions("idle in transaction"):
            return True
        relay.thaw()
        return False

    world.wait_until(frozen, "the relay stands still with nothing in hand")


def seconds_until(world, condition, what):
    begun_at = time.monotonic()
    while not condition():
        if time.monotonic() - begun_at > 5:
            world.wait_until(condition, what)
        time.sleep(0.01)
    return round(time.monotonic() - begun_at, 3)


@pytest.mark.parametrize("lane", LANES)
def test_a_relay_is_killed_at_every_step_and_another_takes_over_at_once(world, witness, lane):
    """Each victim is frozen with a claimed batch: the shards that it holds wait, the others do not. Then it is killed."""
    survivor = working_relay(world, outbox=NEVER)
    took = {}
    for step, (point, holds) in STEPS.items():
        nth = "" if " once " in point else " 1"
        freeze_while_idle(world, survivor)
        load.write(MANY, padding=PADDING)
        victim = world.relay(failpoint=f"stop {point}{nth} in {lane}", outbox=NEVER)
        # The other lane may have taken all there was before this one began.
        world.wait_until(lambda victim=victim: victim.is_stopped or load.write(5), f"the victim stands still: {step}")
        held = locked_shards()
        assert bool(held) >= holds, step
        survivor.thaw()
        load.write(MANY)
        free = load.open_messages().exclude(shard__in=held)
        world.wait_until(lambda free=free: not free.exists(), "the survivor carries all that is free")
        assert not held or load.open_messages().exists(), "what the victim holds is left to it"
        victim.kill()
        took[step] = seconds_until(world, everything_is_published, "the survivor took over")
    world.end(survivor)

    twice = witness.assert_nothing_went_wrong()

    logger.info("takeover seconds, %s: %s; %d duplicates", lane, took, twice)
    assert twice > 0, "no kill came after the broker had the messages"


def test_relays_lose_nothing_while_the_database_terminates_their_sessions(world, witness):
    """pg_terminate_backend for every connection of two relays, five times a second, under load."""
    relays = [working_relay(world), working_relay(world)]
    ended = Counter()

    def end_sessions():
        ends = "SELECT pg_terminate_backend(pid), state LIKE 'idle in%%' FROM pg_stat_activity WHERE application_name = %s"
        ended.update("in a transaction" if within else "outside" for _, within in executed(ends, [RELAY]))
        time.sleep(0.2)
        return ended.total() >= 25 and ended["in a transaction"] > 0

    with load.writing(world.seed):
        world.wait_until(end_sessions, "many sessions were ended")
    world.wait_until(everything_is_published, "everything got through in spite of it")
    assert all(relay.is_alive for relay in relays), world.tails()
    world.end(*relays)

    logger.info("sessions ended: %s", dict(ended))
    witness.assert_nothing_went_wrong()


def test_a_memory_alarm_of_the_broker_costs_no_attempt_and_no_message(mortal_rabbitmq, world, witness):
    """The broker blocks publishers. No message is tried, so no attempt is counted; when the alarm ends all are published."""
    relays = [working_relay(world, outbox=SOON), working_relay(world, outbox=SOON)]
    mortal_rabbitmq.ctl("set_vm_memory_high_watermark", "0")
    try:
        load.write(MANY)
        world.wait_until(lambda: all(relay.has_said("it blocks publishers") for relay in relays) or load.write(20), "both know")
        load.write(MANY)
        waiting = load.open_messages()
        assert waiting.count() >= MANY
        assert not waiting.exclude(state="ready", attempts=0, last_error="").exists(), "an alarm was counted as an attempt"
    finally:
        mortal_rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")
    world.wait_until(everything_is_published, "everything went out")
    assert all(relay.is_alive for relay in relays), world.tails()
    world.end(*relays)

    witness.assert_nothing_went_wrong()


@pytest.mark.parametrize("fault", ["cut", "half-open", "no replies"])
def test_a_broken_connection_to_the_database_loses_nothing_and_stops_no_other_relay(world, witness, fault):
    """A relay whose database never answers looks like a slow relay: its watchdog ends it, and the others continue."""
    outbox = SOON if fault == "cut" else {**SOON, "WATCHDOG": 5}
    with FaultProxy("127.0.0.1", connection.settings_dict["PORT"]) as proxy:
        other = working_relay(world, outbox=SOON)
        victim = world.relay(database_url=proxy.through(world.environment["DATABASE_URL"]), outbox=outbox)
        world.wait_until(lambda: proxy.connections >= 2, "both lanes are connected")
        with load.writing(world.seed):
            before = load.published()
            if fault == "cut":
                for _ in range(5):
                    proxy.cut_after(20_000, "to_client")
                    world.wait_until(lambda: not proxy._cut_after, "it was cut in the middle of something")
                world.wait_until(lambda: victim.has_said("The database is unavailable"), "the victim noticed")
            else:
                proxy.freeze() if fault == "half-open" else proxy.drop_server_to_client()
                assert victim.ends() == EXIT_SILENT, victim.tail()
            world.wait_until(lambda: load.published() > before + MANY, "the other relay goes on")
            proxy.thaw()
            proxy.cut()
        world.wait_until(everything_is_published, "everything got through in spite of it")
        world.end(*(relay for relay in (other, victim) if relay.is_alive))

    witness.assert_nothing_went_wrong()


def published_by(relays):
    """Messages published, by process id, as the heartbeats report."""
    pids = [relay.pid for relay in relays]
    return dict(ProcessRow.objects.filter(app="outbox", pid__in=pids).values_list("pid", "facts__published"))


@contextmanager
def backlog(least=3_000):
    """Publish during the block whenever few messages are left, so that relays are never idle."""
    enough = threading.Event()

    def publish():
        while not enough.wait(0.02):
            if OutboxMessage.objects.filter(state="ready").count() < least:
                load.write(least)

    with in_threads(publish, stop=enough):
        yield


def test_relays_that_join_and_leave_every_second_lose_nothing_and_share_fairly_afterwards(world, witness):
    """Relays are alternately terminated and killed for 8 seconds; then three stay, and each gets its share."""
    relays = [world.relay(), world.relay()]
    ends = Counter()
    with load.writing(world.seed, pause_seconds=0.1):
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline or min(ends[signal.SIGTERM], ends[signal.SIGKILL]) < 3:
            victim = relays.pop(0)
            world.wait_until(lambda victim=victim: victim.is_ready, "it is at work")
            relays.append(world.relay())
            time.sleep(1)  # what is tested is a rhythm
            if ends[signal.SIGTERM] > ends[signal.SIGKILL]:
                victim.kill()
                ends[signal.SIGKILL] += 1
            else:
                victim.ask_to_end()
                assert victim.ends() == 0, victim.tail()
                ends[signal.SIGTERM] += 1
    with backlog():
        before = published_by(relays)
        world.wait_until(lambda: published_by(relays) != before, "the two have a backlog")
        # Although they are never idle, they release shards for it.
        relays.append(world.relay())
        world.wait_until(lambda: len(published_by(relays)) == 3, "three relays report what they do")
        before = published_by(relays)

        def fair():
            """The parts, once they are large enough to compare; what a relay reports is some seconds old."""
            done = {pid: number - before[pid] for pid, number in published_by(relays).items()}
            return done if sum(done.values()) > 5_000 and min(done.values()) > 0.1 * sum(done.values()) else None

        done = world.wait_until(fair, "they share fairly what they have done together")
    world.wait_until(everything_is_published, "everything got through", 80)
    world.end(*relays)

    logger.info("ends %s; parts %s", dict(ends), done)
    witness.assert_nothing_went_wrong()


def handled_by(consumers):
    """The number of effects of each consumer, by the process id in the effects."""
    by_pid = Counter(int(detail.partition(":")[0]) for detail in Effect.objects.values_list("detail", flat=True))
    return {consumer.pid: by_pid[consumer.pid] for consumer in consumers}


def declared(world):
    """The exchanges, queues and bindings of this test's virtual host."""
    vhost = f'<<"{world.broker_url.rpartition("/")[2]}">>'
    lists = ("rabbit_exchange:list", "rabbit_amqqueue:list_names", "rabbit_binding:list")
    return {each: world.rabbit.evaluate(f"lists:sort({each}({vhost})).") for each in lists}


def test_consumers_that_join_take_their_part_of_a_backlog(world):
    """Two consumers start beside a running one while the queue is long. They declare nothing new."""
    few_in_hand = {"PREFETCH": 10, "CONCURRENCY": 2}
    first = world.listening(inbox=few_in_hand)
    relay = world.relay()
    world.operate(FEW)
    world.wait_until(lambda: sum(handled_by([first]).values()) == FEW, "the first is at work")
    with world.held():
        # The handlers of the first wait for the end of this block, so the queue stays long.
        world.operate_together(BACKLOG, how="held")
        world.wait_until(everything_is_published, "the backlog is in the broker")
        before = declared(world)
        newcomers = [world.listening(inbox=few_in_hand) for _ in range(2)]
        assert world.in_broker() == BACKLOG, "nothing of the backlog is handled yet"
    consumers = [first, *newcomers]
    world.wait_until(lambda: world.in_broker() == 0, "the backlog is drained")
    parts = handled_by(consumers)
    after = declared(world)
    world.end(relay, *consumers)

    logger.info("parts: %s", parts)
    assert min(parts.values()) > BACKLOG / 10, parts
    assert sum(parts.values()) == FEW + BACKLOG
    assert "crash.apply@crash.done" in str(before)
    assert after == before
    world.assert_nothing_went_wrong(verdict())


@pytest.mark.parametrize(
    ("bug", "complaint"), [("settles_before_the_confirm", "lost"), ("sends_later_messages_of_a_key_first", "came after")]
)
def test_order_witness_reports_a_lost_or_overtaking_message_of_a_seeded_bug(world, witness, bug, complaint):
    """Proof that the witness can fail: a relay with a seeded bug, and a connection cut at the wrong moment."""
    with FaultProxy("127.0.0.1", world.rabbit.port) as proxy:
        relay = working_relay(world, bug=bug, broker_url=proxy.through(world.broker_url))
        if complaint == "lost":
            proxy.freeze()
        load.write(MANY)
        world.wait_until(lambda: load.published() > MANY // 4, "the relay believes that all is well")
        relay.kill()
        proxy.cut()
    world.end(working_relay(world))

    with pytest.raises(AssertionError, match=complaint):
        witness.assert_nothing_went_wrong()
