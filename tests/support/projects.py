"""Django projects that a test writes into a directory, and runs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import ROOT


def run_in(directory, settings, *arguments, **environment):
    """Run Python with these arguments in `directory`, with its modules and ours; what it prints is `stdout`."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment_in(directory, settings, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=100,
    )


def environment_in(directory, settings, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(directory), str(ROOT)])
    return {**inherited, "PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": settings, **environment}
