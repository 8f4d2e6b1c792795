"""The fixtures of a real browser."""

from tests.support.browser import browser, operator  # noqa: F401 - fixtures
