"""The cycle in each project of `tests.projects.settings`: it works, or a check refuses the project with the remedy.

    .venv/bin/python -m pytest tests/projects -k pool

The list of docs/reference/projects.md has a line for each of them.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.servers import PgBouncer, binaries

SETTINGS = Path(__file__).parent / "settings"
FIRST = ("debug_toolbar", "conn_pool")
"""The cases of the core."""
NAMES = [*FIRST, *sorted({path.stem for path in SETTINGS.glob("[a-z]*.py")} - {*FIRST})]
PROJECTS = {name: ast.parse((SETTINGS / f"{name}.py").read_text()) for name in NAMES}
PAGE = ROOT / "docs" / "reference" / "projects.md"
CYCLE = [sys.executable, "-m", "tests.projects.cycle"]
OWN = ROOT / "tests" / "projects" / "own"
READ_ONLY = """
for directory in / /tmp /var/tmp .; do
    mount --bind $directory $directory && mount -o remount,bind,ro $directory || exit 1
done
unset TMPDIR
cd . && exec "$@"
"""
"""To be run in a mount namespace of its own."""


def commands(name):
    """What is run in this project: the cycle, or its own tests."""
    if tests := assigned(PROJECTS[name], "tests"):
        return [[sys.executable, "-m", "pytest", "-c", OWN / "pytest.ini", *options.split(), OWN] for options in tests]
    if name != "read_only":
        return [CYCLE]
    alone = ["unshare", "--mount", "sh", "-c"]
    tried = [*alone, f"set -- true {READ_ONLY}"]
    if not shutil.which("unshare") or subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("directories cannot be mounted here")
    return [[*alone, READ_ONLY, "sh", *CYCLE]]


def assigned(module, name):
    """What the module assigns to this name, or None: `refused = "app.E001"` names the check that refuses the project."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def line(module):
    """What the page says about this project."""
    check = assigned(module, "refused")
    result = f": [`{check}`](checks.md#{check.lower().replace('.', '')}) refuses it" if check else ""
    return f"{ast.get_docstring(module)}{result}"


@pytest.fixture
def pgbouncer(postgres_server, request):
    """The URL of a database, by its URL, through a PgBouncer."""
    settings = {}
    if request.node.callspec.params["name"] == "pgbouncer_prepared":
        settings["max_prepared_statements"] = "100"
        said = subprocess.run([binaries.pgbouncer(), "--version"], capture_output=True, text=True, check=True).stdout
        if [int(number) for number in re.findall(r"\d+", said)[:2]] < [1, 21]:
            pytest.skip(f"{said.splitlines()[0]} has no max_prepared_statements")
    with PgBouncer(postgres_server.port, **settings) as pooler:
        yield lambda url: pooler.url_of(url.rpartition("/")[2])


@pytest.fixture
def environment(postgres_server, tmp_path, request):
    """Of a process with two empty databases."""
    database = postgres_server.create_database()
    name, wanted = request.node.callspec.params["name"], {}
    if name.startswith("pgbouncer"):
        wanted["POOLED_DATABASE_URL"] = request.getfixturevalue("pgbouncer")(database)
    if assigned(PROJECTS[name], "broker"):
        wanted["BROKER_URL"] = request.getfixturevalue("rabbitmq_url")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        **wanted,
        "DATABASE_URL": database,
        "SECOND_DATABASE_URL": postgres_server.create_database(),
        "CYCLE_DIRECTORY": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROJECTS)
def test_project_works_or_is_refused_by_a_check(name, environment):
    module = PROJECTS[name]
    for command in commands(name):
        done = subprocess.run(
            command,
            env={**environment, "DJANGO_SETTINGS_MODULE": f"tests.projects.settings.{name}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
        if check := assigned(module, "refused"):
            assert done.returncode
            assert f"({check})" in done.stdout, done.stdout
            assert "HINT" in done.stdout
        else:
            assert not done.returncode, done.stdout


def test_page_has_a_line_for_each_project():
    lines = re.findall(r"^- (.+)$", PAGE.read_text(), re.MULTILINE)

    assert lines == sorted(map(line, PROJECTS.values()))
