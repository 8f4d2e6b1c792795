from typing import Any, ClassVar

from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _

from exactly_once.cli.export import ExportCommand
from inbox.dead_letters import letters
from inbox.store.dead_letters import dead


class Command(ExportCommand):
    """See `ExportCommand`."""

    letters = letters
    filters: ClassVar = {"handler": _("messages of this handler"), "topic": _("messages of this topic")}

    def rows(self, alias: str) -> QuerySet[Any]:
        return dead(alias)

    def named(self, message_ids: list[str]) -> list[Any]:
        return message_ids
