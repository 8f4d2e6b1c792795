"""A private Redis that writes every command to disk before it answers, so that a kill loses nothing that it confirmed."""

from __future__ import annotations

import socket
import subprocess
from typing import ClassVar

from tests.support.servers import binaries
from tests.support.servers.private import LOOPBACK, PrivateServer


class RedisServer(PrivateServer):
    name: ClassVar[str] = "Redis"

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def flush(self) -> None:
        """Empty every database."""
        if self._ask("FLUSHALL") != "+OK":
            raise AssertionError("Redis refused FLUSHALL")

    def _prepare(self) -> None:
        self._binary = binaries.redis()

    def _launch(self) -> subprocess.Popen[bytes]:
        options = {
            "bind": LOOPBACK,
            "port": str(self.port),
            "dir": str(self.directory),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            # What is confirmed survives a kill of the process. With "everysec" Redis confirms without having written while the
            # operating system is busy with the fsync before.
            "appendfsync": "no",
            "databases": "16",
        }
        return self._spawn([str(self._binary), *(word for key, value in options.items() for word in (f"--{key}", value))])

    def _answers(self) -> bool:
        return self._ask("PING") == "+PONG"

    def _ask(self, command: str) -> str:
        with socket.create_connection((LOOPBACK, self.port), timeout=5.0) as connection:
            connection.sendall(command.encode() + b"\r\n")
            return connection.makefile("rb").readline().decode().strip()
