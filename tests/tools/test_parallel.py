"""The workers that run the tests."""

import ast
import os
import sys

from tests.support import ROOT
from tests.support.commands import ran
from tests.support.lower_bounds import at_least

OF_THIS_RUN = ("PYTEST_", "DATABASE_", "OTHER_")


def run_in_workers(directory, text, *arguments):
    (directory / "test_it.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_RUN)}
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", directory, "--workers", "2", *arguments)
    return ran(sys.executable, "-m", "pytest", *options, directory, environment={**environment, "COLUMNS": "200"})


def test_worker_that_dies_fails_its_test_and_the_others_run(tmp_path):
    text = "import os\ndef test_before(): pass\ndef test_dies(): os._exit(3)\ndef test_after(): pass\n"

    done = run_in_workers(tmp_path, text)

    assert done.returncode == 1
    assert "The worker ended with status 3 while it ran this test." in done.stdout
    assert "1 failed, 2 passed" in done.stdout


def test_worker_in_which_a_test_has_timed_out_runs_no_other(tmp_path):
    text = (
        "import time\nimport pytest\nleft = []\n"
        "@pytest.mark.timeout(1)\ndef test_hangs():\n    left.append(1)\n    time.sleep(60)\n"
        "def test_after(): assert not left\ndef test_last(): assert not left\n"
    )

    done = run_in_workers(tmp_path, text)

    assert "Timeout" in done.stdout
    assert "1 failed, 2 passed" in done.stdout


def test_marked_test_runs_on_both_databases_and_another_on_postgresql_only(tmp_path):
    text = (
        "import pytest\nfrom django.conf import settings\n"
        "def engine(): return settings.DATABASES['default']['ENGINE'].rpartition('.')[2]\n"
        "@pytest.mark.every_database\ndef test_both(): assert not engine()\n"
        "def test_one(): assert not engine()\n"
    )

    done = run_in_workers(tmp_path, text, "--db", "both")

    failed = sorted(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert [line.partition("::")[2].split(" - ")[0] for line in failed] == ["test_both (sqlite)", "test_both", "test_one"]
    assert ["'postgresql'" in line for line in failed] == [False, True, True]


def test_no_module_reads_a_connection_when_it_is_imported():
    """Workers are forked after the collection, and choose their database then: in a module it would be another one."""
    paths = at_least(300, (ROOT / "tests").rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in connections_read_in(ast.parse(path.read_text()))]

    assert found == []


def connections_read_in(node):
    """Lines outside of functions with an attribute of `connection`, or an item of `connections`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        owner = child.value if isinstance(child, ast.Attribute | ast.Subscript) else None
        if isinstance(owner, ast.Name) and owner.id in {"connection", "connections"}:
            yield child.lineno
        yield from connections_read_in(child)
