"""Numbers, and counts in sentences: "1 message", "2,000 messages"."""

from django.utils.formats import number_format
from django.utils.translation import ngettext as translated


def number(value: float, digits: int = 0) -> str:
    """A number as the language of the page writes it: "1,234.5", "1.234,5"."""
    return str(number_format(round(value, digits), decimal_pos=digits, force_grouping=True))


def ngettext(singular: str, plural: str, count: int, **values: object) -> str:
    """The form of the sentence for `count`, with `%(count)s` and `values` filled in; makemessages finds it by its name."""
    return translated(singular, plural, count) % {"count": number(count), **values}
