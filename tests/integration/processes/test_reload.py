"""With `--reload`, and with DEBUG, a process starts again when the code of the project changes."""

import os
import signal
from pathlib import Path

import pytest

from exactly_once.console.cli import command
from tests.support.projects import SQLITE, environment_in, run_in, settings_of
from tests.support.waiting import wait_until
from tests.support.workers import Process

HANDLERS = """\
from pathlib import Path

from inbox import idempotent_handler


@idempotent_handler("shop.order.placed")
def handle(message):
    with Path({effects!r}).open("a") as file:
        file.write("{version}\\n")
"""
PUBLISH = """
import django
django.setup()
from django.db import transaction
from outbox import publish
with transaction.atomic():
    publish("shop.order.placed", {})
"""
WATCHING = "relay: sending"


class Project:
    def __init__(self, directory):
        self._directory = directory
        self._effects = directory / "effects"
        (directory / "shop").mkdir()
        (directory / "shop" / "__init__.py").touch()
        database = {**SQLITE, "NAME": str(directory / "shop.sqlite3")}
        settings = settings_of("outbox", "inbox", "shop", database=database, DEBUG=True)
        (directory / "shop" / "settings.py").write_text(settings)

    def run(self, *arguments):
        return run_in(self._directory, "shop.settings", *arguments)

    def write(self, version):
        self.write_handlers(HANDLERS.format(effects=str(self._effects), version=version))

    def write_handlers(self, text):
        (self._directory / "shop" / "handlers.py").write_text(text)

    def relay(self, *options):
        return Process(environment_in(self._directory, "shop.settings"), self._directory / "log", "outbox_relay", *options)

    def effects(self):
        return self._effects.read_text().split() if self._effects.exists() else []

    def has_effects_after_publishing(self, relay, effects):
        done = self.run("-c", PUBLISH)
        assert done.returncode == 0, done.stdout
        relay.until(lambda: self.effects() == effects)


@pytest.fixture
def project(tmp_path, process_environment):
    project = Project(tmp_path)
    project.write("first")
    assert project.run("-m", "django", "migrate", "-v0").returncode == 0
    return project


def test_process_starts_again_after_each_change_and_after_an_error_in_the_code(project):
    with project.relay() as relay:
        relay.until(lambda: WATCHING in relay.said())
        project.has_effects_after_publishing(relay, ["first"])

        project.write("the-second")
        relay.until(lambda: relay.said().count(WATCHING) == 2)
        project.has_effects_after_publishing(relay, ["first", "the-second"])

        project.write_handlers("def handle(:")
        relay.until(lambda: "It starts again after the next change of a file." in relay.said())
        project.write("the-very-third")
        relay.until(lambda: relay.said().count(WATCHING) == 3)
        project.has_effects_after_publishing(relay, ["first", "the-second", "the-very-third"])

        assert relay.end() == 0
    assert relay.said().count("relay: stopped") == 3


def test_process_that_is_killed_after_a_change_ends_the_command_with_its_status(project, tmp_path):
    with project.relay() as relay:
        relay.until(lambda: WATCHING in relay.said())
        project.write("the-second")
        relay.until(lambda: relay.said().count(WATCHING) == 2)

        (child,) = Path(f"/proc/{relay.pid}/task/{relay.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)

        assert relay.ends() == 128 + signal.SIGKILL

    (tmp_path / "shop.sqlite3").unlink()
    cannot_start = project.run("-m", "django", "outbox_relay")
    assert (cannot_start.returncode, "is not migrated" in cannot_start.stdout) == (1, True)


def test_ctrl_c_ends_the_process_in_an_orderly_way(project):
    with project.relay("--reload") as relay:
        relay.until(lambda: WATCHING in relay.said())
        os.killpg(relay.pid, signal.SIGINT)
        assert relay.ends() == 0
    assert "relay: stopped" in relay.said()


def test_killed_supervisor_leaves_no_process_behind(project):
    with project.relay() as relay:
        relay.until(lambda: WATCHING in relay.said())
        relay.kill()
        wait_until(lambda: "relay: stopped" in relay.said())


@pytest.mark.parametrize("debug", [True, False])
def test_reloading_is_the_default_with_debug_and_never_happens_while_draining(settings, debug):
    settings.DEBUG = debug

    for reload, wanted in ((None, debug), (True, True), (False, False)):
        assert command.is_reloading_wanted({"reload": reload, "drain": False}) is wanted
        assert command.is_reloading_wanted({"reload": reload, "drain": True}) is False
