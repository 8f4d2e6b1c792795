from __future__ import annotations

import pytest

from tests.support.servers import FaultProxy


@pytest.fixture
def proxy(rabbitmq_server):
    """A network to RabbitMQ that can fail."""
    with FaultProxy("127.0.0.1", rabbitmq_server.port) as proxy:
        yield proxy
