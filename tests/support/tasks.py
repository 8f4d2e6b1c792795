"""Tasks for tests in one process: their queues are handlers as long as the fixture `tasked` has them."""

from importlib import import_module

from outbox.testing import run_relay


def run_all():
    """Relay and run until nothing is due; failures are stored, not raised."""
    return run_relay(raise_errors=False)


def tasks():
    return import_module("tests.support.apps.tasked.tasks")
