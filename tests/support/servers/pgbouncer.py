"""A private PgBouncer in front of a private PostgreSQL: many clients share few server connections."""

from __future__ import annotations

import subprocess
from typing import Any, ClassVar

import psycopg
from psycopg.rows import dict_row

from tests.support.servers import binaries
from tests.support.servers.postgres import DATABASE, account
from tests.support.servers.private import LOOPBACK, PrivateServer

CONSOLE = "pgbouncer"


class PgBouncer(PrivateServer):
    """In front of the PostgreSQL on `server_port`. Every client is `user` there; `pool_size` connections for each database."""

    name: ClassVar[str] = "PgBouncer"

    def __init__(self, server_port: int, pool_size: int = 3, *, user: str = "postgres", **settings: str) -> None:
        """`settings` are lines of the [pgbouncer] section, over ours."""
        super().__init__()
        self.account = account()
        self.pool_size = pool_size
        self._behind = f"host={LOOPBACK} port={server_port} user={user}"
        self._settings = {
            "listen_addr": LOOPBACK,
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": str(pool_size),
            "max_client_conn": "200",
            **settings,
        }

    @property
    def url(self) -> str:
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        return f"postgres://postgres@{LOOPBACK}:{self.port}/{database}"

    def show(self, what: str) -> list[dict[str, Any]]:
        """What its console answers to SHOW, for example `show("servers")`."""
        with psycopg.connect(
            self.url_of(CONSOLE), autocommit=True, connect_timeout=5, row_factory=dict_row, cursor_factory=psycopg.ClientCursor
        ) as console:
            return console.execute(f"SHOW {what}".encode()).fetchall()

    def _prepare(self) -> None:
        self._binary = binaries.pgbouncer()
        self._configuration = self.directory / "pgbouncer.ini"
        lines = [
            "[databases]",
            f"* = {self._behind}",
            "[pgbouncer]",
            *(f"{key} = {value}" for key, value in self._settings.items()),
        ]
        self._configuration.write_text("\n".join(lines) + "\n")
        self._configuration.chmod(0o644)

    def _launch(self) -> subprocess.Popen[bytes]:
        return self._spawn([str(self._binary), str(self._configuration)])

    def _answers(self) -> bool:
        return bool(self.show("version"))
