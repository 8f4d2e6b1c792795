from contextlib import contextmanager

from django.db import connection
from django_tenants.utils import schema_context


def tenant_header(draft):
    return {"tenant": connection.schema_name}


@contextmanager
def tenant_of(message):
    with schema_context(message.headers["tenant"]):
        yield
