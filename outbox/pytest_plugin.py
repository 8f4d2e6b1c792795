"""The helpers of `outbox.testing` as pytest fixtures.

It is used where the project's root `conftest.py` says so, and not by an entry point, because pytest rewrites the assertions of
every package of a distribution that has one, in all projects it is installed in:

    pytest_plugins = ["outbox.pytest_plugin"]

A fixture gives the function itself. The database is the test's business: `@pytest.mark.django_db`, or a fixture that needs it.
"""

# pytest imports plugins before Django is set up, so each fixture imports what it gives.
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.testing import CapturedMessage, SentMessage


@pytest.fixture
def published() -> Callable[..., list[CapturedMessage]]:
    """The messages in the outbox: `outbox.testing.published`."""
    from outbox import testing

    return testing.published


@pytest.fixture
def assert_published() -> Callable[..., CapturedMessage]:
    """Assert that a message was published: `outbox.testing.assert_published`."""
    from outbox import testing

    return testing.assert_published


@pytest.fixture
def assert_nothing_published() -> Callable[..., None]:
    """Assert that no message was published: `outbox.testing.assert_nothing_published`."""
    from outbox import testing

    return testing.assert_nothing_published


@pytest.fixture
def run_relay() -> Callable[..., list[SentMessage]]:
    """Relay until nothing is due, without a broker: `outbox.testing.run_relay`."""
    from outbox import testing

    return testing.run_relay


@pytest.fixture
def travel() -> Callable[..., None]:
    """Let time pass for the messages: `outbox.testing.travel`."""
    from outbox import testing

    return testing.travel
