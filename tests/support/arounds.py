"""Context managers of `INBOX["AROUND"]`, which write down what they are called with."""

from __future__ import annotations

import contextvars
from contextlib import contextmanager, suppress

from django.db import connections

TENANT = contextvars.ContextVar("tenant", default="")
called: list[tuple] = []


@contextmanager
def tenant_of(message):
    token = TENANT.set(message.headers.get("tenant", ""))
    called.append(("enter", message.topic, connections["default"].in_atomic_block))
    try:
        yield
    except BaseException as error:
        called.append(("failed", type(error)))
        raise
    finally:
        called.append(("leave", message.topic))
        TENANT.reset(token)


@contextmanager
def required_tenant_of(message):
    called.append(("tenant", message.headers["tenant"]))
    yield


@contextmanager
def inner(message):
    called.append(("inner", TENANT.get()))
    yield


@contextmanager
def suppressing(message):
    with suppress(Exception):
        yield


@contextmanager
def failing(message):
    raise LookupError("no such tenant")
    yield


@contextmanager
def failing_at_its_end(message):
    yield
    raise LookupError("the tenant is locked")


def no_manager(message):
    return message


async def async_tenant_of(message):
    pass
