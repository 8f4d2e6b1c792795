"""The other side of `processes.Forked`: a process that has imported and set up Django, and forks what it is asked for.

    python -m tests.support.template FD

It reads requests from the socket FD until the test process is gone. For each of them it forks a keeper, and the keeper forks
the child and waits for it: so the template has nothing to wait for, and the keeper tells the child's process id and its wait
status to the test.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import runpy
import socket
import sys
from typing import Any, NoReturn

import django
import django.db.backends.postgresql.base
import django.db.backends.sqlite3.base
import kombu.transport.pyamqp
import kombu.transport.redis  # noqa: F401 - so that no child has to
from django.apps import apps
from django.conf import settings
from django.db import connections
from django.utils.functional import empty

from tests.support.processes import NUMBER


def main() -> None:
    django.setup()
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    # This is the child, and it ends as any Python program ends.
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _serve(requests: socket.socket) -> list[str]:
    """Fork a child for every request. Returns in the child, which has become what was asked for, with its command."""
    while True:
        request, (answers, output) = _next_request(requests)
        if request["command"][0] == "celery":
            importlib.import_module("celery.bin.worker")  # here, so that the next one need not
        if intermediate := os.fork():
            os.close(answers)
            os.close(output)
            os.waitpid(intermediate, 0)
            continue
        requests.close()
        if os.fork():
            os._exit(0)
        if child := os.fork():
            os.close(output)
            _keep(child, answers)
        os.close(answers)
        return _become(request, output)


def _next_request(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    message, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 2)
    while message and not message.endswith(b"\n"):
        message += requests.recv(1 << 16)
    if not message:
        os._exit(0)
    return json.loads(message), descriptors


def _keep(child: int, answers: int) -> NoReturn:
    os.write(answers, NUMBER.pack(child))
    _, status = os.waitpid(child, 0)
    try:
        os.write(answers, NUMBER.pack(status))
    finally:
        os._exit(0)


def _become(request: dict[str, Any], output: int) -> list[str]:
    """Take on the process group, the environment, the output and the settings of a freshly started process."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    os.close(null)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    _read_settings_again()
    command: list[str] = request["command"]
    return command


def _read_settings_again() -> None:
    for name in [name for name in sys.modules if name.startswith("tests.") and name.endswith("settings")]:
        del sys.modules[name]
    settings._wrapped = empty
    for connection in connections.all(initialized_only=True):
        del connections[connection.alias]  # made by an import, with the settings of the template
    connections._settings = None  # type: ignore[attr-defined]
    vars(connections).pop("settings", None)
    # The failpoints and seeded bugs that the environment asks for are installed when an app is ready.
    for app in apps.get_app_configs():
        if app.name.startswith("tests."):
            app.ready()


if __name__ == "__main__":
    main()
