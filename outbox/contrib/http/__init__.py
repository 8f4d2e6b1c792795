"""The HTTP API of the outbox: publish, cancel, reschedule and restore messages, and ask for their state.

    path("api/outbox/", include("outbox.contrib.http.urls"))

It needs the extra `http` (Django Ninja), and tokens in `OUTBOX["HTTP"]`. Nothing else in the outbox imports this package. Each
endpoint calls the function of the same name in `outbox`, so it has the same effect and the same errors.
"""
