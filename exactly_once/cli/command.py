"""A management command of either app: its help text is translated, and what it prints is escaped."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser, OutputWrapper

from exactly_once.wire.text import visible


class _Escaping(OutputWrapper):
    def write(self, msg: str = "", *args: Any, **kwargs: Any) -> Any:
        super().write(visible(msg), *args, **kwargs)


class TranslatedCommand(BaseCommand):
    """`help` may be a lazy translation; Django formats the help text itself, and needs a plain one."""

    help: Any = ""

    def create_parser(self, *args: Any, **options: Any) -> CommandParser:
        self.help = str(self.help)
        return super().create_parser(*args, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, OutputWrapper):  # Django sets stdout and stderr in two places
            value.__class__ = _Escaping
        super().__setattr__(name, value)
