"""The functions of `inbox.testing` as pytest fixtures, each with the prefix `inbox_`. See `outbox.pytest_plugin`."""

from exactly_once.testing import fixtures

globals().update(
    fixtures(
        "inbox",
        *("assert_duplicate", "assert_effect_once", "assert_handled", "dead", "deliver", "drain", "handled", "make_message"),
        *("redeliver", "run_handler", "travel"),
    )
)
