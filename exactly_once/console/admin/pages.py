"""Admin pages whose rows cannot be edited: a list that reads little of a large table, and the pages of its rows.

Columns of a list and fields of a page are declared as data: a label, an attribute of the row, and how its value is shown.

topic_name = shown(_("topic"), "topic", identifier)
created = instant(_("created"), "created_at")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from asgiref.sync import sync_to_async
from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import flatten_fieldsets, lookup_field
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.handlers.asgi import ASGIRequest
from django.core.paginator import Paginator
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, URLPattern, reverse
from django.utils.functional import cached_property
from django.utils.html import format_html, strip_tags
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from exactly_once.console.admin.html import NOTHING, identifier, moment
from exactly_once.console.display import number
from exactly_once.half import Half, halves, required, visible_halves
from exactly_once.packages import label_of, package_of
from exactly_once.sql.connections import without_atomic_requests

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise as Text

_AT_ONCE = 100
_EMPTY = {"", NOTHING, "None"}
"""What a field without a value shows."""


class RowCount(int):
    """A number of rows as lists show it: "10,000+" where it was cut."""

    is_cut = False

    def __str__(self) -> str:
        return f"{number(int(self))}+" if self.is_cut else number(int(self))


class BoundedPaginator(Paginator):  # type: ignore[type-arg] # no generic at runtime
    """Counts up to a limit, because counting millions of rows takes too long."""

    LIMIT = 10_000

    @cached_property
    def count(self) -> RowCount:
        rows: Any = self.object_list
        counted = rows.order_by().values("pk")[: self.LIMIT + 1].count()
        found = RowCount(min(counted, self.LIMIT))
        found.is_cut = counted > self.LIMIT
        return found

    def page(self, number: int | str) -> Any:
        """The page. If not all rows match, those that do are found as they were counted, and then sorted.

        With ORDER BY and LIMIT, PostgreSQL expects the first matching rows near the end of the index that has the order. A few
        of the oldest of a million rows are at its other end.
        """
        name = self._sorted_by()
        if self.count.is_cut or name is None:
            return super().page(number)
        column, valid = name.removeprefix("-"), self.validate_number(number)
        rows: Any = self.object_list
        keys = sorted(rows.order_by().values_list(column, flat=True)[: self.LIMIT + 1], reverse=name.startswith("-"))
        first = (valid - 1) * self.per_page
        shown = rows.filter(**{f"{column}__in": keys[first : first + self.per_page]})
        return self._get_page(shown, valid, self)  # type: ignore[attr-defined] # documented as a hook, missing in the stubs

    def _sorted_by(self) -> str | None:
        """The first name in the order of filtered rows, if it is a unique column."""
        rows: Any = self.object_list
        name = next(iter(rows.query.order_by), None)
        if not rows.query.where or not isinstance(name, str):
            return None
        column = name.removeprefix("-")
        is_unique = column == "pk" or any(field.name == column and field.unique for field in rows.model._meta.concrete_fields)
        return name if is_unique else None


def counted(rows: QuerySet[Any]) -> str:
    """How many rows there are, up to the paginator's limit: "10,000+"."""
    return str(BoundedPaginator(rows.order_by("pk"), 1).count)


class LeanChangeList(ChangeList):
    """A list that does not load the large columns."""

    def get_results(self, request: HttpRequest) -> None:
        if request.method == "POST":
            self.queryset = self.queryset.none()  # an action finds its rows by itself
        super().get_results(request)

    @property
    def filter_bar(self) -> list[tuple[Any, list[Any], Any]]:
        """For the template: each filter's title, its choices, and the chosen one; None if that is the first, which is all."""
        bar = []
        for spec in self.filter_specs:
            choices: list[Any] = list(spec.choices(self))
            bar.append((spec.title, choices, next((each["display"] for each in choices[1:] if each["selected"]), None)))
        return bar

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        model_admin: Any = self.model_admin
        rows = super().get_queryset(request, exclude_parameters)
        self.has_filters = False  # otherwise a theme would show its own filters, too
        return rows.defer(*model_admin.large_columns)

    def url_for_result(self, result: Any) -> str:
        model_admin: Any = self.model_admin
        url: str = model_admin.own_url(result.pk)
        return url


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg] # no generic at runtime
    """Rows that cannot be added, changed or deleted.

    Set `using` in a subclass to show another database than the one that the database routers choose.
    """

    view_on_site = False

    class Media:
        """Our style sheet. A strict Content-Security-Policy blocks inline styles."""

        css: ClassVar[Any] = {"all": ["exactly_once/admin.css"]}

    always: ClassVar[Collection[str]] = ("state_explained", "payload")
    """Fields that always have a value. To ask for it takes time."""

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return flatten_fieldsets(self.fieldsets or ()) or self.fields or ()

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Those that have a value for this row."""
        parts = super().get_fieldsets(request, obj)
        shown = [(title, [name for name in part["fields"] if self._has_value(name, obj)]) for title, part in parts]
        return [(title, {"fields": fields}) for title, fields in shown if fields]

    def _has_value(self, name: Any, row: Any) -> bool:
        return row is None or name in self.always or strip_tags(str(lookup_field(name, row, self)[2])) not in _EMPTY

    def get_urls(self) -> list[URLPattern]:
        patterns: list[URLPattern] = super().get_urls()
        for pattern in patterns:
            pattern.callback = without_atomic_requests(pattern.callback)
        return patterns

    @property
    def using(self) -> str:
        return router.db_for_write(self.model)

    @property
    def package(self) -> str:
        """The half that the rows are about, "outbox" or "inbox", also for the models of its optional packages."""
        return package_of(self.model)

    @property
    def half(self) -> Half:
        return required(self.package)

    def respond(self, request: HttpRequest, template: str, content: Mapping[str, Any]) -> HttpResponse:
        """A page of this site with this content."""
        request.current_app = self.admin_site.name
        title = capfirst(self.opts.verbose_name_plural)
        context = {**self.admin_site.each_context(request), "title": title, "opts": self.opts, "media": self.media}
        return TemplateResponse(request, template, {**context, **content})

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """The row for its page, with the address of the page that shows the flow of a message, see `display.flow_link`."""
        row: Any = super().get_object(request, object_id, from_field)
        if row is not None:
            row.flow_url = self.flow_url(request)
        return row

    def flow_url(self, request: HttpRequest) -> str:
        """The page of flows; "" if the site does not have it, or the user may not view it."""
        may_view = request.user.has_perm("exactly_once.view_flow")
        return page_url(self.admin_site, "exactly_once_flow_changelist") if may_view else ""

    def require_permission(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


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

    def respond(self, request: HttpRequest, template: str, content: Mapping[str, Any]) -> HttpResponse:
        hidden = len(visible_halves(request.user)) < len(halves())
        return super().respond(request, template, {"hidden": hidden, **content})


def message_link(site: AdminSite, app: str, row: int, name: object) -> SafeString:
    """A name, with a link to the page of its message if the site has it."""
    url, text = message_url(site, app, row), identifier(str(name))
    return format_html('<a href="{}">{}</a>', url, text) if url else text


def message_url(site: AdminSite, app: str, row: int) -> str:
    """The page of a row of messages of the default database; "" if the site does not have it."""
    return page_url(site, f"{label_of(app)}_{app}message_change", [row])


def page_url(site: AdminSite, page: str, arguments: Sequence[Any] = (), **query: str) -> str:
    """A page by the name of its URL, without the site's namespace; "" if a site of the project does not have it."""
    try:
        return reverse(f"{site.name}:{page}", args=arguments, query=query)
    except NoReverseMatch:
        return ""


# ------------------------------------------------------------------------------------------------------------ columns


def computed(label: Text, render: Callable[[Any], SafeString | str]) -> Any:
    """A column that is computed from the row: a method of a page."""

    def column(model_admin: Any, row: Any) -> SafeString | str:
        return render(row)

    return admin.display(description=label)(column)


def shown(label: Text, name: str, render: Callable[[Any], SafeString | str]) -> Any:
    """A column with the value of an attribute; a dot leads to that of a related row."""
    value = attrgetter(name)
    return computed(label, lambda row: render(value(row)))


def instant(label: Text, name: str, render: Callable[[datetime | None, datetime], SafeString] = moment) -> Any:
    """A column with an instant, as it is seen from the database's clock."""
    value = attrgetter(name)
    return computed(label, lambda row: render(value(row), row.database_now))


# ---------------------------------------------------------------------------------------------------------- downloads


def download(request: HttpRequest, name: str, content_type: str, lines: Iterator[str]) -> StreamingHttpResponse:
    """A file. Its lines are read from the database while they are sent."""
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    content = _asynchronous(lines) if isinstance(request, ASGIRequest) else lines
    return StreamingHttpResponse(content, content_type=f"{content_type}; charset=utf-8", headers=headers)


async def _asynchronous(lines: Iterator[str]) -> AsyncIterator[str]:
    """Under ASGI Django would read all of an iterator that is not asynchronous before it sends anything."""
    while part := await sync_to_async("".join)(islice(lines, _AT_ONCE)):
        yield part
