"""Fixtures of the contracts."""

from tests.integration.conftest import tasked  # noqa: F401 - a fixture
