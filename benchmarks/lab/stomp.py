"""A private RabbitMQ with STOMP, which one peer requires."""

from __future__ import annotations

from tests.support.servers import RabbitServer
from tests.support.servers.private import LOOPBACK, free_port


class StompRabbitServer(RabbitServer):
    def __init__(self) -> None:
        self.stomp_port = free_port()
        super().__init__(stomp__listeners__tcp__1=f"{LOOPBACK}:{self.stomp_port}")

    def _prepare(self) -> None:
        super()._prepare()
        (self.directory / "enabled_plugins").write_text("[rabbitmq_stomp].\n")
