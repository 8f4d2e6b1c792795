"""The helpers of `inbox.testing` as pytest fixtures.

The project's root `conftest.py` asks for it, as for `outbox.pytest_plugin`, where the reason is given:

    pytest_plugins = ["outbox.pytest_plugin", "inbox.pytest_plugin"]

A fixture gives the function itself. The database is the test's business: `@pytest.mark.django_db`, or a fixture that needs it.
"""

# pytest imports plugins before Django is set up, so each fixture imports what it gives.
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from inbox import Message
    from inbox.testing import ReceivedMessage


@pytest.fixture
def make_message() -> Callable[..., Message]:
    """A message as a handler gets it: `inbox.testing.make_message`."""
    from inbox import testing

    return testing.make_message


@pytest.fixture
def run_handler() -> Callable[..., Any]:
    """Call a handler in a transaction as the inbox does: `inbox.testing.run_handler`."""
    from inbox import testing

    return testing.run_handler


@pytest.fixture
def deliver() -> Callable[..., None]:
    """Deliver messages to the handlers of their topics: `inbox.testing.deliver`."""
    from inbox import testing

    return testing.deliver


@pytest.fixture
def redeliver() -> Callable[..., None]:
    """Deliver messages that the broker has delivered before: `inbox.testing.redeliver`."""
    from inbox import testing

    return testing.redeliver


@pytest.fixture
def drain() -> Callable[..., int]:
    """Run what is stored and due: `inbox.testing.drain`."""
    from inbox import testing

    return testing.drain


@pytest.fixture
def handled() -> Callable[..., list[ReceivedMessage]]:
    """The messages whose effect is committed: `inbox.testing.handled`."""
    from inbox import testing

    return testing.handled


@pytest.fixture
def dead() -> Callable[..., list[ReceivedMessage]]:
    """The dead letters: `inbox.testing.dead`."""
    from inbox import testing

    return testing.dead


@pytest.fixture
def assert_handled() -> Callable[..., ReceivedMessage]:
    """Assert that a message was handled: `inbox.testing.assert_handled`."""
    from inbox import testing

    return testing.assert_handled


@pytest.fixture
def assert_duplicate() -> Callable[..., ReceivedMessage]:
    """Assert that a duplicate was suppressed: `inbox.testing.assert_duplicate`."""
    from inbox import testing

    return testing.assert_duplicate


@pytest.fixture
def assert_effect_once() -> Callable[..., None]:
    """Assert that an effect happens once although processes are killed: `inbox.testing.assert_effect_once`."""
    from inbox import testing

    return testing.assert_effect_once


@pytest.fixture
def travel() -> Callable[..., None]:
    """Let time pass for the messages of both apps: `inbox.testing.travel`."""
    from inbox import testing

    return testing.travel
