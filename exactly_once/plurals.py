"""Counts in sentences: "1 message", "2,000 messages"."""

from __future__ import annotations

from django.utils.translation import ngettext as translated


def ngettext(singular: str, plural: str, count: int, **values: object) -> str:
    """The form of the sentence for `count`, with `%(count)s` and `values` filled in; makemessages finds it by its name."""
    return translated(singular, plural, count) % {"count": f"{count:,}", **values}
