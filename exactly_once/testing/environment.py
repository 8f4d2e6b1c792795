"""Restrict the helpers to tests."""

from __future__ import annotations

from django.core import mail


def require_tests(function: str) -> None:
    """Refuse to change rows outside of tests.

    Raises:
        RuntimeError: Django's test environment is not set up, so the databases may not be test databases.
    """
    # `setup_test_environment` sets it. Django has no public function to check it.
    if not hasattr(mail, "outbox"):
        raise RuntimeError(
            f"{function}() changes rows and is for tests only. Django's test environment is not set up here: run the "
            "tests with manage.py test or pytest-django. A test runner of your own calls "
            "django.test.utils.setup_test_environment()."
        )
