from typing import Any

from django.contrib.auth.management import create_permissions
from django.contrib.auth.models import Group, Permission
from django.core.management.base import CommandParser
from django.db import router, transaction
from django.db.models import Q
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import TranslatedCommand
from exactly_once.sql.schema import our_apps

_BY_HAND = Q(codename__startswith="unredacted_") | Q(codename__startswith="secret_") | Q(codename__regex="^export_.*message$")
"""An export shows payloads as they are, as a correction without redaction does."""


class Command(TranslatedCommand):
    """It may be run again, and then sets the permissions that this version has.

    The permissions to see payloads unredacted, and secrets, are given by hand.
    """

    help = gettext_lazy(
        "Create or update the groups Exactly once viewer, who may only look, and Exactly once operator, who may do everything."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", default=router.db_for_write(Group), help=_("alias of the users (default: %(default)s)")
        )

    def handle(self, *args: Any, **options: Any) -> None:
        alias, ours = options["database"], our_apps()
        for app in ours:
            create_permissions(app, verbosity=0, using=alias)
        every = Permission.objects.using(alias).filter(content_type__app_label__in=[app.label for app in ours])
        roles = {"viewer": every.filter(codename__startswith="view_"), "operator": every.exclude(_BY_HAND)}
        with transaction.atomic(using=alias):
            for role, permissions in roles.items():
                group, created = Group.objects.using(alias).get_or_create(name=f"Exactly once {role}")
                group.permissions.set(permissions)
                words = _("Group %(group)s updated with %(count)s permissions.")
                if created:
                    words = _("Group %(group)s created with %(count)s permissions.")
                self.stdout.write(words % {"group": repr(group.name), "count": len(permissions)})
