"""The other side of `processes.Forked`: a process that has imported Django, and forks the requested programs.

    python -m tests.support.template

With DJANGO_SETTINGS_MODULE it has also set up Django and imported the apps. It reads requests from the socket that is its standard
input until the test process has ended. For each of them it forks a keeper, and the keeper forks the child. The child writes its
process id to the test, the keeper its exit status. When the test process ends first, however that happens, the keeper kills the
child's process group.

Linux only: it waits with process file descriptors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import types
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

import django
from django.apps import apps
from django.conf import settings
from django.core.checks import run_checks
from django.db import connections
from django.utils.functional import empty

from tests.support.processes import NUMBER, SETTINGS

WITHOUT_SETTINGS = (
    "django.contrib.admin.templatetags.admin_list",
    "django.contrib.staticfiles.finders",
    "django.core.management.commands.migrate",
    "django.db.backends.postgresql.base",
    "django.db.backends.sqlite3.base",
    "django.template.backends.django",
    "django.test",
    "django.views.i18n",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
)
COMMANDS = {"outbox": "outbox_relay", "inbox": "inbox_consume"}
CELERY = (
    "celery.bin.celery",
    "celery.app.control",
    "celery.apps.worker",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.concurrency.thread",
    "celery.fixups.django",
    "celery.worker.components",
    "celery.worker.consumer",
)


def main() -> None:
    if SETTINGS in os.environ:
        django.setup()
        _do_what_every_command_does()
    else:
        _import_for_all(WITHOUT_SETTINGS)
    kind, program, *sys.argv[1:] = _serve(socket.socket(fileno=0))
    # This is the child, and it ends as any Python program ends.
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = kind
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))


def _do_what_every_command_does() -> None:
    run_checks()
    _import_for_all(f"{app}.management.commands.{command}" for app, command in COMMANDS.items() if apps.is_installed(app))


def _import_for_all(modules: Iterable[str]) -> None:
    """Here, so that no child has to; nor does its garbage collector visit them, which would copy their memory."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _serve(requests: socket.socket) -> list[str]:
    """Fork a child for every request. Returns in the child, which has become what was asked for, with its arguments."""
    while True:
        request, (answers, stdin, output) = _next_request(requests)
        _reap_keepers()
        if SETTINGS in os.environ and request["arguments"][1] == "celery":
            _import_for_all(CELERY)
        if os.fork():
            for descriptor in (answers, stdin, output):
                os.close(descriptor)
            continue
        requests.close()
        if child := os.fork():
            os.close(stdin)
            os.close(output)
            _keep(child, answers)
        return _become(request, answers, stdin, output)


def _next_request(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    message, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 3)
    while message and not message.endswith(b"\n"):
        message += requests.recv(1 << 16)
    if not message:
        os._exit(0)
    return json.loads(message), descriptors


def _reap_keepers() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _keep(child: int, answers: int) -> NoReturn:
    both = select.poll()
    both.register(ended := os.pidfd_open(child), select.POLLIN)
    both.register(answers, select.POLLHUP)
    while ended not in dict(both.poll()):
        # Only the test's end of the socket can hang up. Before the child leads its group there is no such group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    # The child stays in the process table until its status is written: a signal that is late must not hit another process.
    how = os.waitid(os.P_PIDFD, ended, os.WEXITED | os.WNOWAIT)
    assert how is not None
    with contextlib.suppress(OSError):
        os.write(answers, NUMBER.pack(how.si_status if how.si_code == os.CLD_EXITED else -how.si_status))
    os._exit(0)


def _become(request: dict[str, Any], answers: int, stdin: int, output: int) -> list[str]:
    """Take on the process group, the environment, the output and the settings of a freshly started process."""
    os.setsid()
    os.write(answers, NUMBER.pack(os.getpid()))
    os.close(answers)
    for descriptor, place in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    os.close(stdin)
    os.close(output)
    ours = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    theirs = [request["directory"], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*filter(None, theirs), *(place for place in sys.path if place not in ours)]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    if "PYTHONWARNINGS" in os.environ:
        warnings.simplefilter("error")  # `processes` asks for no other
    tempfile.tempdir = None  # to be read from TMPDIR again
    if apps.ready:
        _read_settings_again()
    arguments: list[str] = request["arguments"]
    return arguments


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
