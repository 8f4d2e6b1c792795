"""When a new worker is given what a killed one had in hand.

RabbitMQ requeues it as soon as that worker's connection ends. On Redis the workers do it: kombu's transport looks for messages
whose visibility timeout has passed when a worker starts (`MultiChannelPoller.on_poll_init`), and after that only every 100
seconds (`unacked_restore_interval` times `unacked_restore_throttle`, which are options since kombu 5.7). A worker that starts
before the timeout has passed therefore redelivers the message 100 seconds after its start.
"""

import time

import redis

from tests.support.waiting import wait_until

VISIBILITY_SECONDS = 1
UNACKNOWLEDGED = "unacked_index"
"""kombu's sorted set: the delivery tags that workers have in hand, by the time they took them."""


def takeover_settings(broker):
    """Celery's settings for a worker that starts now and takes over every message that is unacknowledged now.

    On Redis there must be such a message, and this waits until its visibility timeout has passed.
    """
    if not broker.startswith("redis"):
        return {}
    with redis.Redis.from_url(broker) as client:
        assert client.zcard(UNACKNOWLEDGED), "no message is unacknowledged"
        wait_until(lambda: not client.zcount(UNACKNOWLEDGED, time.time() - VISIBILITY_SECONDS, "+inf"))
    return {"broker_transport_options": {"visibility_timeout": VISIBILITY_SECONDS}}
