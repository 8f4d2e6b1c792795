"""An app with tasks of `django.tasks`, for tests in one process and in processes that tests start and kill."""

from inbox.contrib.tasks.compat import PACKAGE

TASKS = {
    "default": {
        "BACKEND": "inbox.tasks.ExactlyOnceBackend",
        "QUEUES": ["default", "mail", "payments"],
        "OPTIONS": {
            "lease": {"duration": "1m"},
            "queues": {
                "mail": {"retry": {"max_attempts": 1}, "lease": {"duration": "2s"}},
                "payments": {"retry": {"max_attempts": 3}},
            },
        },
    },
    "immediate": {"BACKEND": f"{PACKAGE}.backends.immediate.ImmediateBackend"},
}
