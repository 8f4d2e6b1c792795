"""A management command with a translated help text. Django formats the help text itself, and needs a plain one."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser


class TranslatedCommand(BaseCommand):
    """`help` may be a lazy translation."""

    help: Any = ""

    def create_parser(self, *args: Any, **options: Any) -> CommandParser:
        self.help = str(self.help)
        return super().create_parser(*args, **options)
