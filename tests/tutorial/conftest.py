"""A reader of the tutorial: an empty directory, an empty environment, and a wheel that was just built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.browser import browser  # noqa: F401 - a fixture
from tests.support.servers import binaries
from tests.support.servers.private import LOOPBACK, free_port
from tests.tutorial.reader import Reader

INHERITED = ("PIP_", "SSL_", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Where pip finds packages on this machine; nothing else of the environment is given to the reader."""
SUDO = """\
#!/bin/sh
# The private server does not run as the system's user postgres, so `sudo -u postgres` has nothing to do.
[ "$1 $2" = "-u postgres" ] && shift 2
exec "$@"
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The directory of the built wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    assert len(list(directory.glob("django_exactly_once-*.whl"))) == 1
    return directory


@pytest.fixture
def environment(tmp_path, wheel):
    """That of a login: PATH, HOME, a terminal of 80 columns, and pip's own settings."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "python3").symlink_to(_python())
    inherited = {name: value for name, value in os.environ.items() if name.upper().startswith(INHERITED)}
    return {
        **inherited,
        "PATH": os.pathsep.join([str(commands), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": os.environ.get("HOME", str(tmp_path)),
        "LANG": "C.UTF-8",
        "COLUMNS": "80",
        "PIP_NO_COMPILE": "1",  # Python compiles what is imported
        "PIP_FIND_LINKS": f"{wheel} {os.environ.get('PIP_FIND_LINKS', '')}".strip(),
    }


def _python() -> Path:
    """The interpreter that this virtual environment was made from."""
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def postgres_environment(environment, tmp_path, postgres_server):
    """With `sudo -u postgres psql` for the private server."""
    sudo = tmp_path / "bin" / "sudo"
    sudo.write_text(SUDO)
    sudo.chmod(0o755)
    path = os.pathsep.join([environment["PATH"], str(binaries.postgres().directory)])
    return {**environment, "PATH": path, "PGHOST": LOOPBACK, "PGPORT": str(postgres_server.port), "PGUSER": "postgres"}


@pytest.fixture
def web_port():
    return free_port()


@pytest.fixture
def reader_of(tmp_path):
    """A reader with this environment and these ports: `reader_of(environment, ports)`."""
    readers = []

    def begin(environment, ports, directory="empty"):
        place = tmp_path / directory
        place.mkdir(exist_ok=True)
        readers.append(Reader(place, environment, ports))
        return readers[-1]

    yield begin
    for reader in readers:
        reader.leave()


@pytest.fixture
def rabbitmq_port(mortal_rabbitmq):
    """That of a server whose virtual host `/` no other test uses at the same time."""
    return mortal_rabbitmq.port
