"""What the drivers share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit


def run(prepare: Callable[[int], list[list[Any]]], drain: Callable[..., dict[str, Any]]) -> None:
    """Do what the command line says, and answer in JSON."""
    count, options = int(sys.argv[1]), json.loads(sys.argv[2])
    committed = prepare(count)
    print(json.dumps({"committed": committed, **drain(count, **options)}))


def configure_django(*apps: str, **settings: Any) -> None:
    """Django for one peer's app on DATABASE_URL, and nothing else."""
    import django  # noqa: PLC0415 - one of the peers does without
    from django.conf import settings as django_settings  # noqa: PLC0415

    django_settings.configure(
        SECRET_KEY="benchmarks",
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        INSTALLED_APPS=apps,
        DATABASES={"default": database()},
        **settings,
    )
    django.setup()


def database() -> dict[str, Any]:
    where = urlsplit(os.environ["DATABASE_URL"])
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": where.path[1:],
        "USER": where.username,
        "HOST": where.hostname,
        "PORT": where.port,
    }


def migrate() -> None:
    from django.core.management import call_command  # noqa: PLC0415

    call_command("migrate", verbosity=0)
