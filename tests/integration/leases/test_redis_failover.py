"""Leases in a Redis whose server changes: a replica that had not heard of everything takes over, or the server restarts."""

from datetime import timedelta

import pytest
import redis

from inbox import Lease
from inbox.states import Outcome, State
from tests.support.deliveries import A_WHILE, Slow, an_envelope, deliver, effects, options, run_to_the_end, the_effect, the_row
from tests.support.servers import FaultProxy, RedisServer
from tests.support.servers.private import LOOPBACK
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True)]

MORE = 10
"""Messages, each with more than one write: after them a server that took over has seen more writes than the one before."""


@pytest.fixture(scope="module")
def replica_server():
    with RedisServer() as server:
        yield server


@pytest.fixture
def proxy(redis_server, redis_url):
    """The address by which all processes know Redis."""
    with FaultProxy(LOOPBACK, redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def processes(proxy, redis_url):
    """The options of two processes of one service. A store belongs to a process, and here to a retention."""
    url = proxy.through(redis_url)
    return [options(LEASE_STORE=url), options(LEASE_STORE=url, RETENTION=timedelta(days=29))]


@pytest.fixture
def lagging(redis_server, redis_url, replica_server):
    """Make a replica that has everything until now and hears of nothing from now on."""
    replica = redis.Redis.from_url(replica_server.start().url)
    primary = redis.Redis.from_url(redis_url)

    def make():
        replica.replicaof(LOOPBACK, redis_server.port)
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up")
        primary.set("replicated", 1)  # WAIT is for what this client has written
        assert primary.wait(1, int(A_WHILE * 1000)) == 1
        replica.replicaof("NO", "ONE")

    yield make
    replica.replicaof("NO", "ONE")
    replica.flushall()


@pytest.fixture
def fail_over(proxy, replica_server):
    """All processes reach the replica from now on, as by the name of the primary."""

    def lead():
        proxy.target = (LOOPBACK, replica_server.port)
        proxy.cut()

    return lead


def test_message_whose_record_a_failover_has_lost_does_not_run_again(handles, processes, lagging, fail_over, caplog):
    this, other = processes
    handler, old, envelope = handles(the_effect, lease=Lease()), an_envelope(), an_envelope()
    deliver(handler, old, given=this)
    deliver(handler, given=other)
    lagging()
    assert deliver(handler, envelope, given=this) is Outcome.HANDLED
    fail_over()
    # Another process goes on with the new primary, until that has seen more writes than the old one.
    for _ in range(MORE):
        assert deliver(handler, given=other) is Outcome.HANDLED

    assert deliver(handler, old, given=this) is Outcome.DUPLICATE, "its record was not lost"
    assert deliver(handler, envelope, given=this) is Outcome.DEAD

    assert "has lost data" in the_row().last_error
    assert effects(envelope.biz_id) == 1
    assert "Redis has lost data. Messages" in caplog.text


def test_lease_that_a_failover_has_lost_settles_nothing_and_its_message_does_not_run_again(
    handles, processes, lagging, fail_over
):
    this, other = processes
    at_work, envelope = Slow(), an_envelope()
    slow, quick = handles(at_work, lease=Lease()), handles(the_effect, lease=Lease(), topic="quick")
    deliver(quick, an_envelope(topic="quick"), given=this)
    deliver(quick, an_envelope(topic="quick"), given=other)
    lagging()
    with at_work.inside(lambda: deliver(slow, envelope, given=this)) as run:
        fail_over()
        for _ in range(MORE):
            deliver(quick, an_envelope(topic="quick"), given=other)

    assert run.answer is Outcome.STORED
    run_to_the_end(this)
    assert deliver(slow, envelope, given=other) is Outcome.DUPLICATE
    assert (the_row(handler=slow.name).state, effects(envelope.biz_id)) == (State.DEAD, 1)


def test_restart_that_loses_nothing_is_not_taken_for_a_loss(handles, processes, redis_server, caplog):
    this, other = processes
    handler, before = handles(the_effect, lease=Lease()), an_envelope()
    for given in processes:
        deliver(handler, given=given)
    deliver(handler, before, given=this)
    redis_server.kill()
    redis_server.start()

    assert deliver(handler, before, given=other) is Outcome.DUPLICATE
    assert deliver(handler, an_envelope(), given=this) is Outcome.HANDLED
    assert "has lost data" not in caplog.text
    assert caplog.text.count("another Redis process answers") == len(processes)


def test_leases_work_for_a_user_who_may_not_ask_which_server_it_is(handles, redis_url):
    admin = redis.Redis.from_url(redis_url)
    admin.acl_setuser("shop", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-info"], reset=True)
    handler, envelope = handles(the_effect, lease=Lease()), an_envelope()
    try:
        given = options(LEASE_STORE=redis_url.replace("redis://", "redis://shop:secret@"))
        assert deliver(handler, envelope, given=given) is Outcome.HANDLED
        assert deliver(handler, envelope, given=given) is Outcome.DUPLICATE
    finally:
        admin.acl_deluser("shop")
