"""Run the core of the suite with other versions: `make matrix`, or `make matrix CELLS="trixie-6.1 sid-6.0"`.

A cell is a release of Debian, which brings Python and the servers, and a version of Django. The release is made in a directory,
by mmdebstrap, and removed afterwards. Only root can do that, on Debian. What was run is written to `tools/matrix.json`, and a
test compares the table of docs/reference/upgrade-policy.md with it.
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

CELLS = ("bookworm-5.2", "trixie-5.2", "trixie-6.1", "sid-6.0", "sid-6.1")
RESULTS = ROOT / "tools" / "matrix.json"
PACKAGES = (
    *("ca-certificates", "gcc", "git", "libfaketime", "make", "pgbouncer", "postgresql", "procps"),
    *("python3-dev", "python3-venv", "rabbitmq-server", "redis-server"),
)
VERSIONS = {
    "python": "python3 -c 'import platform; print(platform.python_version())'",
    "django": ".venv/bin/python -c 'import django; print(django.__version__)'",
    "postgresql": "ls /usr/lib/postgresql",
    "rabbitmq": "dpkg-query -f '${Version}' -W rabbitmq-server",
    "redis": "dpkg-query -f '${Version}' -W redis-server",
}
_NUMBER = re.compile(r"\d+(\.\d+)*")
_PASSED_ON = ("PIP_", "SSL_CERT", "REQUESTS_CA", "CURL_CA", "http", "HTTP", "no_proxy", "NO_PROXY")
"""Beginnings of the names of environment variables for the network."""


class Release:
    """A release of Debian in `directory`, with the files of the project that git knows in /suite."""

    def __init__(self, name: str, directory: Path) -> None:
        self._root = directory / name
        include = f"--include={','.join(PACKAGES)}"
        subprocess.run(["mmdebstrap", "--quiet", "--variant=apt", include, name, str(self._root)], check=True)
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        for file in filter(None, files.split("\0")):
            place = self._root / "suite" / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, place)
        certificates = Path("etc/ssl/certs/ca-certificates.crt")
        shutil.copy2(Path("/") / certificates, self._root / certificates)

    def run(self, script: str, *, check: bool = True) -> str:
        """What a shell in /suite prints, which is shown as it comes."""
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        inside = f'mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"; exec chroot "$0" sh -c "cd /suite; {script}"'
        process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", inside, str(self._root)],
            env={**environment, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
        if process.wait() and check:
            raise SystemExit(f"exit status {process.returncode}: {script}")
        return "".join(said)


def run(cell: str) -> dict[str, str]:
    """The versions of a cell, and the last line of its suite."""
    release, _, django = cell.partition("-")
    with tempfile.TemporaryDirectory(prefix="exactly-once-matrix-") as directory:
        debian = Release(release, Path(directory))
        debian.run(f"make .venv/.test && .venv/bin/python -m pip install --quiet Django~={django}.0")
        versions = {name: _NUMBER.search(debian.run(script)) for name, script in VERSIONS.items()}
        last = debian.run("make test", check=False).rpartition("\n=")[2].strip("= \n")
    return {**{name: found.group() if found else "" for name, found in versions.items()}, "result": last}


def main(cells: list[str]) -> None:
    if unknown := {*cells} - {*CELLS}:
        raise SystemExit(f"Unknown: {', '.join(sorted(unknown))}. Cells: {', '.join(CELLS)}.")
    if os.geteuid() or not shutil.which("mmdebstrap"):
        raise SystemExit("It runs as root, with mmdebstrap: apt-get install mmdebstrap.")
    for cell in cells or CELLS:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[cell] = run(cell)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
