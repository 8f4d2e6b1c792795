"""The commands `outbox_roles` and `inbox_roles`: groups of the site's users, for each app a viewer and an operator."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib.auth.management import create_permissions
from django.contrib.auth.models import Group, Permission
from django.core.management.base import CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction
from django.db.models import Q
from django.utils.translation import gettext as _

from outbox.console.command import TranslatedCommand
from outbox.database.labels import label_of
from outbox.database.schema import parts_of


class RolesCommand(TranslatedCommand):
    """See the module's docstring. It may be run again, and then sets the permissions that this version has.

    The permissions to see payloads unredacted, and secrets, are given by hand.

    Attributes:
        app: whose permissions.
    """

    app: str

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias of the users (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        config = apps.get_app_config(label_of(self.app))
        parts = parts_of(self.app)
        for part in parts:
            create_permissions(part, verbosity=0, using=alias)
        every = Permission.objects.using(alias).filter(content_type__app_label__in=[part.label for part in parts])
        # An export shows payloads as they are, as a correction without redaction does.
        by_hand = (
            Q(codename__startswith="unredacted_") | Q(codename=f"export_{self.app}message") | Q(codename__startswith="secret_")
        )
        operating = every.exclude(by_hand)
        roles = {"viewer": every.filter(codename__startswith="view_"), "operator": operating}
        with transaction.atomic(using=alias):
            for role, permissions in roles.items():
                group, created = Group.objects.using(alias).get_or_create(name=f"{config.verbose_name} {role}")
                group.permissions.set(permissions)
                words = _("Group %(group)s updated with %(count)s permissions.")
                if created:
                    words = _("Group %(group)s created with %(count)s permissions.")
                self.stdout.write(words % {"group": repr(group.name), "count": len(permissions)})
