"""Where these helpers may be used."""

from __future__ import annotations

from django.core import mail


def require_tests(function: str) -> None:
    """Refuse to change rows outside of tests.

    Raises:
        RuntimeError: Django's test environment is not set up, so the databases are not those of a test.
    """
    # `setup_test_environment` sets it. Django has no public question for it.
    if not hasattr(mail, "outbox"):
        raise RuntimeError(
            f"{function}() changes rows and is for tests only. Django's test environment is not set up here: run the "
            "tests with manage.py test or pytest-django. A test runner of your own calls "
            "django.test.utils.setup_test_environment()."
        )
