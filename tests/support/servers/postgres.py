"""A private PostgreSQL with fsync on, unless a setting says otherwise.

The server of the suite's own database runs with fsync off (`tests.plugin`), for speed: no test kills it. The one that tests
kill has it on (`mortal_postgres`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import signal
import subprocess
from collections.abc import Sequence
from typing import ClassVar, LiteralString

import psycopg
from psycopg import sql

from tests.support.servers import binaries
from tests.support.servers.private import LOOPBACK, OURSELVES, Account, PrivateServer, ServerFailed

DATABASE = "test"
USERS_TO_BE_WHEN_ROOT = ("postgres", "nobody")


class PostgresServer(PrivateServer):
    name: ClassVar[str] = "PostgreSQL"
    stop_signal: ClassVar[int] = signal.SIGINT  # "fast": ends the sessions, writes a checkpoint
    orphan_signal: ClassVar[int] = signal.SIGQUIT  # "immediate": gives its shared memory back, which SIGKILL does not

    def __init__(self, **settings: str) -> None:
        """`settings` are lines of postgresql.conf, over ours."""
        super().__init__()
        self.account = account()
        self._settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
            "fsync": "on",
            "synchronous_commit": "on",
            "timezone": "UTC",
            "log_line_prefix": "%m [%p] %q%a ",
            **settings,
        }

    @property
    def url(self) -> str:
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        return f"postgres://postgres@{LOOPBACK}:{self.port}/{database}"

    def create_database(self, name: str = "", *, icu_locale: str = "") -> str:
        """The URL of a new, empty database. With an ICU locale its collation has a version (PostgreSQL 15)."""
        name = name or f"test_{secrets.token_hex(6)}"
        collation = sql.SQL("TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE {}").format(sql.Literal(icu_locale))
        options = collation if icu_locale else sql.SQL("")
        self._execute(sql.SQL("CREATE DATABASE {} {}").format(sql.Identifier(name), options))
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def standby(self) -> StandbyServer:
        """Another server that follows this one, which must be running."""
        return StandbyServer(self)

    def written(self) -> str:
        """The position up to which its log is written."""
        return self._answer("SELECT pg_current_wal_lsn()")

    def close(self) -> None:
        if self._has_been_killed():
            with contextlib.suppress(ServerFailed):
                self.start()  # a killed server leaves shared memory behind, which its next start gives back
        super().close()

    def _has_been_killed(self) -> bool:
        return self._directory is not None and not self.is_running and (self._directory / "data" / "postmaster.pid").exists()

    def _prepare(self) -> None:
        self._tools = self._reachable(binaries.postgres())
        self._data = self.directory / "data"
        command = [self._binary("initdb"), "--pgdata", str(self._data), "--username=postgres", "--auth=trust"]
        self._run([*command, "--encoding=UTF8", "--no-locale", "--no-sync"])

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = [word for key, value in self._settings.items() for word in ("-c", f"{key}={value}")]
        return self._spawn([self._binary("postgres"), "-D", str(self._data), *settings])

    def _answers(self) -> bool:
        with psycopg.connect(self.url_of("postgres"), autocommit=True, connect_timeout=5) as connection:
            known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
            if known is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
        return True

    def _binary(self, name: str) -> str:
        return str(self._tools.directory / name)

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url_of("postgres"), autocommit=True, connect_timeout=5) as connection:
            connection.execute(statement)

    def _answer(self, question: LiteralString, parameters: Sequence[str] = ()) -> str:
        with psycopg.connect(self.url_of("postgres"), autocommit=True, connect_timeout=5) as connection:
            row = connection.execute(question, parameters).fetchone()
            assert row is not None
            return str(row[0])

    def _reachable(self, tools: binaries.PostgresTools) -> binaries.PostgresTools:
        """The user that PostgreSQL runs as cannot read an installation below root's home: give that user a copy."""
        if self.account.can_reach(tools.directory / "postgres"):
            return tools
        return tools.moved_to(self.directory / "postgresql")


class StandbyServer(PostgresServer):
    """A hot standby of another server: it can be read, and takes no writes until it is promoted."""

    name: ClassVar[str] = "PostgreSQL standby"

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__()
        self._primary = primary

    def has_caught_up(self) -> bool:
        """Whether it has applied what the primary had written before."""
        return self._answer("SELECT pg_last_wal_replay_lsn() >= %s", [self._primary.written()]) == "True"

    def promote(self) -> None:
        """Make it a primary, as a failover does; its sessions stay."""
        assert self._answer("SELECT pg_promote()") == "True"

    def _prepare(self) -> None:
        self._tools = self._reachable(binaries.postgres())
        self._data = self.directory / "data"
        source = ["--host", LOOPBACK, "--port", str(self._primary.port), "--username=postgres"]
        command = [self._binary("pg_basebackup"), "--pgdata", str(self._data), "--write-recovery-conf", *source]
        self._run([*command, "--checkpoint=fast", "--no-sync"])

    def _answers(self) -> bool:
        return self._answer("SELECT 1") == "1"


def account() -> Account:
    """PostgreSQL and its tools refuse to run as root."""
    if os.geteuid() != 0:
        return OURSELVES
    known = {entry.pw_name for entry in pwd.getpwall()}
    return Account(next(name for name in USERS_TO_BE_WHEN_ROOT if name in known))
