"""Pages of the admin that show no rows of a table: flow, what runs now, topics and handlers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, URLPattern, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from exactly_once.console.admin.read_only import ReadOnlyAdmin
from exactly_once.console.display import identifier
from exactly_once.half import halves
from exactly_once.sql.labels import label_of


class PageAdmin(ReadOnlyAdmin):
    """A page in the place of a list. Its model is a proxy for its permission and its name: its rows have no pages."""

    template: str
    actions = None

    def content(self, request: HttpRequest) -> dict[str, Any]:
        """The context of the template."""
        raise NotImplementedError

    class Media:
        css: ClassVar[Any] = {"all": ["exactly_once/overview.css", "exactly_once/pages.css"]}

    def get_urls(self) -> list[URLPattern]:
        return [pattern for pattern in super().get_urls() if str(pattern.name).endswith("_changelist")]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        self.require_permission(request)
        return self.respond(request, self.template, {**self.content(request), **(extra_context or {})})

    def require_permission(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    def respond(self, request: HttpRequest, template: str, content: Mapping[str, Any]) -> HttpResponse:
        hidden = not all(half.is_visible(request.user) for half in halves())
        return super().respond(request, template, {"hidden": hidden, **content})


def message_link(site: AdminSite, app: str, row: int, name: object) -> SafeString:
    """A name, with a link to the page of its message if the site has it."""
    url, text = message_url(site, app, row), identifier(str(name))
    return format_html('<a href="{}">{}</a>', url, text) if url else text


def message_url(site: AdminSite, app: str, row: int) -> str:
    """The page of a row of messages of the default database; "" if the site does not have it."""
    try:
        return reverse(f"{site.name}:{label_of(app)}_{app}message_change", args=[row])
    except NoReverseMatch:
        return ""
