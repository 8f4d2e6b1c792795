"""Real private servers for the tests: PostgreSQL, PgBouncer, RabbitMQ, Redis, and a proxy that breaks connections to them.

Every server belongs to the process that started it: a free loopback port, a temporary directory, and a watcher that
ends it when its owner dies, however that happens. A server somebody else runs on this machine is never touched.

    with RabbitServer() as rabbit:
        url = rabbit.new_vhost()
        rabbit.kill()
        rabbit.start()
"""

from tests.servers.binaries import ServerUnavailable
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer
from tests.servers.private import PrivateServer, ServerFailed
from tests.servers.proxy import FaultProxy
from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer

__all__ = [
    "FaultProxy",
    "PgBouncer",
    "PostgresServer",
    "PrivateServer",
    "RabbitServer",
    "RedisServer",
    "ServerFailed",
    "ServerUnavailable",
]
