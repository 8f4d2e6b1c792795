"""The functions of `outbox.testing` as pytest fixtures, each with the prefix `outbox_`.

It is used where the project's root `conftest.py` says so, and not by an entry point, because pytest rewrites the assertions of
every package of a distribution that has one, in all projects it is installed in:

    pytest_plugins = ["outbox.pytest_plugin"]

A fixture returns the function. The test requests the database: `@pytest.mark.django_db`, or a fixture that does so.
"""

from exactly_once.testing import fixtures

globals().update(
    fixtures("outbox", "assert_nothing_published", "assert_published", "published", "run_relay", "travel"),
)
