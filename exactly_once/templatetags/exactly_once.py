"""Filters of the console's templates: how a page shows a value. An unknown figure, `None`, is shown as unknown."""

from django.template import Library
from django.utils.safestring import SafeString

from exactly_once.console import display


def as_text(text: str) -> SafeString:
    """A text of several lines."""
    return display.as_text(text).as_html()


register = Library()
for function in (
    *(display.age, display.app_name, as_text, display.duration, display.exact),
    *(display.figure, display.headline, display.id_link, display.identifier, display.moment, display.seconds_text),
    *(display.state_badge, display.state_in_words, display.until, display.visible),
):
    register.filter(function.__name__, function)
