from typing import Any

from django.db import migrations

from exactly_once.packages import label_of
from outbox.contrib.sql import function


def install(apps: Any, schema_editor: Any) -> None:
    function.install(schema_editor.connection.alias)


def remove(apps: Any, schema_editor: Any) -> None:
    function.remove(schema_editor.connection.alias)


class Migration(migrations.Migration):
    """The function of the version of this code, also when this migration is old: later versions are installed after `migrate`."""

    dependencies = [
        (label_of('outbox'), '__first__'),
    ]

    operations = [
        migrations.RunPython(install, remove),
    ]
