"""The helpers of `inbox.testing` as pytest fixtures.

Load it in the project's root `conftest.py`; see `outbox.pytest_plugin` for the reason:

    pytest_plugins = ["outbox.pytest_plugin", "inbox.pytest_plugin"]

A fixture returns the function. The test requests the database: `@pytest.mark.django_db`, or a fixture that does so.
"""

# pytest imports plugins before Django is set up, so each fixture imports its function.
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
    """Deliver messages as redelivered by the broker: `inbox.testing.redeliver`."""
    from inbox import testing

    return testing.redeliver


@pytest.fixture
def drain() -> Callable[..., int]:
    """Run stored messages that are due: `inbox.testing.drain`."""
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
