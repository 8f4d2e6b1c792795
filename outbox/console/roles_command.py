"""The commands `outbox_roles` and `inbox_roles`: groups of the site's users, for each app a viewer and an operator."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib.auth.management import create_permissions
from django.contrib.auth.models import Group, Permission
from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction


class RolesCommand(BaseCommand):
    """See the module's docstring. It may be run again, and then sets the permissions that this version has.

    The permission to see payloads unredacted is given by hand.

    Attributes:
        app: whose permissions.
    """

    app: str

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias of the users (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        config = apps.get_app_config(self.app)
        create_permissions(config, verbosity=0, using=alias)
        every = Permission.objects.using(alias).filter(content_type__app_label=self.app)
        operating = every.exclude(codename__startswith="unredacted_")
        roles = {"viewer": every.filter(codename__startswith="view_"), "operator": operating}
        with transaction.atomic(using=alias):
            for role, permissions in roles.items():
                group, created = Group.objects.using(alias).get_or_create(name=f"{config.verbose_name} {role}")
                group.permissions.set(permissions)
                self.stdout.write(
                    f"Group {group.name!r} {'created' if created else 'updated'} with {len(permissions)} permissions."
                )
