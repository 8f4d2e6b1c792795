"""The demo is a project of its own, with its own settings, so it runs in processes of its own."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.servers.private import watch


@pytest.fixture
def run_in_the_shop(tmp_path):
    """Run Python in the demo project, on an empty SQLite file and without a broker unless `environment` names one.

    It and all that it starts are ended with the test, also when that fails.
    """
    groups = []

    def start(*arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "demo_shop.settings",
                "DATABASE_URL": f"sqlite:///{tmp_path / 'shop.sqlite3'}",
                "SAVINGS_DATABASE_URL": f"sqlite:///{tmp_path / 'savings.sqlite3'}",
                "BROKER_URL": "local://",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        watch(process)
        groups.append(process)
        return process

    def run(*arguments, timeout, **environment):
        process = start(*arguments, **environment)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    run.start = start
    yield run
    for process in groups:
        with process:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
