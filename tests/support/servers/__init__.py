"""Real private servers for the tests: PostgreSQL, PgBouncer, RabbitMQ, Redis, Prometheus, and a proxy that breaks connections.

Every server belongs to the process that started it: a free loopback port, a temporary directory, and a watcher that
ends it when its owner dies, however that happens. It never touches a server of another owner on this machine.

    with RabbitServer() as rabbit:
        url = rabbit.new_vhost()
        rabbit.kill()
        rabbit.start()
"""

from tests.support.servers.binaries import ServerUnavailable
from tests.support.servers.pgbouncer import PgBouncer
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.private import PrivateServer, ServerFailed
from tests.support.servers.prometheus import PrometheusServer
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.servers.redis import RedisServer

__all__ = [
    "FaultProxy",
    "PgBouncer",
    "PostgresServer",
    "PrivateServer",
    "PrometheusServer",
    "RabbitServer",
    "RedisServer",
    "ServerFailed",
    "ServerUnavailable",
]
