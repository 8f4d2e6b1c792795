"""Filters of the console's templates: how a page shows a value. An unknown figure, `None`, is shown as unknown."""

from django.template import Library

from exactly_once.console import display
from exactly_once.console.admin import html

register = Library()
for function in (
    *(display.duration, display.exact, display.figure, display.seconds_text, display.state_in_words, display.until),
    *(display.visible, html.age, html.app_name, html.as_html, html.headline, html.id_link, html.identifier, html.moment),
    *(html.state_badge, html.text),
):
    register.filter(function.__name__, function)
