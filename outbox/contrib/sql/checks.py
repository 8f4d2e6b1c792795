"""`manage.py check --database` for the function in the database."""

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Tags, Warning, register

from outbox.contrib.sql.function import NAME, why_outdated


@register(Tags.database)
def check_function(app_configs: object, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """outbox_sql.W001: a function that does not do what `publish()` does. Not an error, because `migrate` mends it."""
    return [
        Warning(
            f"The function {NAME}() in the database {alias!r} {reason}.",
            hint=f"Run `python manage.py migrate outbox_sql --database {alias}`.",
            id="outbox_sql.W001",
        )
        for alias in databases or ()
        if (reason := why_outdated(alias))
    ]
