"""Run the core of the suite with other versions: `make matrix`, or `make matrix CELLS="trixie-6.1 sid-6.1"`.

A cell is a release of Debian, which brings Python and the servers, and a version of Django. In a cell of `wheels`, PostgreSQL
and Redis are those of the Python package index. mmdebstrap makes the release in a temporary directory, which is removed
afterwards: only root can do that, on Debian. A cell's versions and the last line of its suite are written to tools/matrix.json.
A test compares docs/reference/upgrade-policy.md, the classifiers in pyproject.toml and the workflow with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import ROOT

CELLS = ("bookworm-5.2", "bookworm-5.2-wheels", "trixie-5.2", "trixie-6.0", "trixie-6.1", "sid-6.1")
RESULTS = ROOT / "tools" / "matrix.json"
PACKAGES = ("ca-certificates", "faketime", "make", "pgbouncer", "procps", "prometheus", "python3-venv", "rabbitmq-server")
IN_WHEELS = ("postgresql", "redis-server")
_FOUND = '.venv/bin/python -c "from tests.support.servers import binaries; print(binaries.{})"'
VERSIONS = {
    "python": "python3 --version",
    "django": ".venv/bin/python -m django --version",
    "postgresql": f"$({_FOUND.format('postgres().directory')})/postgres --version",
    "rabbitmq": "dpkg-query --show rabbitmq-server",
    "redis": f"$({_FOUND.format('redis()')}) --version",
}
_NUMBER = re.compile(r"\d+\.\d+[\w.]*")
_LAST_LINE = re.compile(r"^=+ (.* in [\d.]+s.*?) =+$", re.MULTILINE)
_PASSED_ON = ("WORKERS", "PIP_", "SSL_CERT", "REQUESTS_CA", "CURL_CA", "http_", "https_", "no_", "HTTP_", "HTTPS_", "NO_")
"""Beginnings of the names of environment variables: the number of workers, and what the network of this machine needs."""
_NETWORK_FILES = ("etc/hosts", "etc/resolv.conf", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt")
_ENTER = """
mount -t proc proc "$0/proc"
mount --rbind /sys "$0/sys"
mount --rbind /dev "$0/dev"
exec chroot "$0" sh -ec "cd /suite; $1"
"""


class CellFailed(Exception):
    """A command of a cell failed; its output was shown."""


def make(release: str, packages: tuple[str, ...], directory: Path) -> None:
    """The release is read with the settings of this machine's apt for its network, and for the age of an archive."""
    settings = subprocess.run(["apt-config", "dump", "--no-empty"], check=True, stdout=subprocess.PIPE, text=True).stdout
    options = [f"--aptopt={line}" for line in settings.splitlines() if line.startswith(("Acquire::http", "Acquire::Check-"))]
    command = ["mmdebstrap", "--quiet", "--variant=apt", *options, f"--include={','.join(packages)}", release, str(directory)]
    subprocess.run(command, check=True)


def copy_files(directory: Path) -> None:
    """Copy the files of the project that git knows to /suite, and what the network of this machine needs."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    copies = {directory / "suite" / file: ROOT / file for file in listed.split("\0") if file}
    copies |= {directory / file: Path("/", file) for file in _NETWORK_FILES}
    for target, source in copies.items():
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def run(script: str, directory: Path, *, check: bool = True) -> str:
    """What a shell in /suite prints, which is shown as it comes. Its processes end with it."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    with subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", _ENTER, str(directory), script],
        env={**environment, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
    if process.returncode and check:
        raise CellFailed(f"exit status {process.returncode}: {script}")
    return "".join(said)


def result(cell: str, directory: Path) -> dict[str, str]:
    """The versions of a cell whose release is in this directory, and the last line of its suite."""
    django = cell.split("-")[1]
    run(f"make .venv/.test; .venv/bin/python -m pip install --quiet Django~={django}.0", directory)
    said = {name: run(script, directory) for name, script in VERSIONS.items()}
    last = _LAST_LINE.findall(run("make test", directory, check=False))
    found = {name: _NUMBER.findall(text) for name, text in said.items()}
    return {**{name: numbers[0] for name, numbers in found.items()}, "result": last[-1] if last else "did not end"}


def has_passed(row: dict[str, str]) -> bool:
    return " passed" in row["result"] and not re.search("failed|error", row["result"])


def main(cells: list[str]) -> None:
    if unknown := {*cells} - {*CELLS}:
        raise SystemExit(f"Unknown: {', '.join(sorted(unknown))}. Cells: {', '.join(CELLS)}.")
    if os.geteuid() or not shutil.which("mmdebstrap"):
        raise SystemExit("It runs as root, with mmdebstrap: apt-get install mmdebstrap.")
    failed = []
    for cell in cells or CELLS:
        with tempfile.TemporaryDirectory(prefix="exactly-once-matrix-") as name:
            directory = Path(name, "debian")
            make(cell.split("-")[0], PACKAGES if cell.endswith("-wheels") else PACKAGES + IN_WHEELS, directory)
            copy_files(directory)
            row = result(cell, directory)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(dict(sorted({**results, cell: row}.items())), indent=2) + "\n")
        print(cell, row)
        if not has_passed(row):
            failed.append(cell)
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
