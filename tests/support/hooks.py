"""Functions for `OUTBOX["PUBLISH_HOOKS"]`."""

import contextvars

from django.db import connections

TENANT = contextvars.ContextVar("tenant", default="acme")
in_transaction: list[bool] = []


def tenant(draft):
    in_transaction.append(connections["default"].in_atomic_block)
    return {"tenant": TENANT.get(), "about": draft.topic}


def seen(draft):
    return {"tenant": "other", "seen": ",".join(sorted(draft.headers or {}))}


def nothing(draft):
    return None


def failing(draft):
    raise LookupError("no such tenant")


def reserved(draft):
    return {"x-tenant": "acme"}


def nested(draft):
    return {"tenant": ["acme"]}


def no_headers(draft):
    return "acme"


async def async_tenant(draft):
    return {}
