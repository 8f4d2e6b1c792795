"""Failure groups in the admin: messages that are retrying or dead, by what failed and where; with notes and decisions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.actions import Action, ActionForm
from exactly_once.console.admin.html import NOTHING, identifier, moment, stacked
from exactly_once.console.admin.pages import ReadOnlyAdmin, message_url, page_url
from exactly_once.console.admin.planning import plan
from exactly_once.console.admin.sections import listed, named
from exactly_once.console.display import number
from exactly_once.console.operators.audit import Subject, actor_of, record
from exactly_once.console.operators.failure_groups import MOST_GROUPS, FailureGroup, write_note
from exactly_once.half import Half, half_of, required, visible_halves
from exactly_once.models import FailureNote
from exactly_once.packages import package_of
from exactly_once.process.clock import utcnow
from exactly_once.sql.connections import decision_transaction, without_atomic_requests
from exactly_once.wire.text import NAME_LENGTH

_SEPARATOR = "|"
"""Between class and place in a URL; no class contains it."""
_LATEST = 20
_SAMPLE, _MOST_CONCERNED = 500, 10
_PROTOCOL = "cloudEvents:"
"""In the names of our own headers."""
_OF_A_ROW = ("topic", "biz_id", "failed_at", "last_error")


def encoded(error_class: str, place: str) -> str:
    """A group as one value of a URL."""
    return f"{error_class}{_SEPARATOR}{place}"


def _column(text: str) -> str:
    """A part of a URL as the columns of class and place take it."""
    return text.replace("\0", "")[:NAME_LENGTH]


class NoteForm(ActionForm):
    note = forms.CharField(
        label=_("Note"),
        required=False,
        max_length=4_000,
        widget=forms.Textarea(attrs={"rows": 3, "class": "vLargeTextField"}),
        help_text=_("For other operators: the cause, who works on it, what to do. Empty: no note."),
    )


NOTE = Action(name="note", label=_("Write a note"), done=_("The note is saved."), form=NoteForm)


class FailureFilter(admin.SimpleListFilter):
    """The messages of one failure group; shown only if one is chosen."""

    title = _("failure group")
    parameter_name = "failure"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        chosen = request.GET.get(self.parameter_name)
        return [(chosen, " ".join(chosen.split(_SEPARATOR, 1)))] if chosen else []

    def has_output(self) -> bool:
        return bool(self.value())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if not value:
            return queryset
        error_class, _separator, place = value.partition(_SEPARATOR)
        error_class, place = _column(error_class), _column(place)
        return queryset.filter(required(package_of(queryset.model)).groups.condition(error_class, place))


@admin.register(FailureNote)
class FailureGroupAdmin(ReadOnlyAdmin):
    """The failure groups of the apps whose messages the user may view. Its model is that of the notes."""

    actions = None
    adds = NOTE

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(visible_halves(request.user))

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def may_note(self, request: HttpRequest) -> bool:
        return request.user.has_perm(NOTE.codename(self.model))

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.group_view)
        return [path("group/", view, name="exactly_once_failurenote_group"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        self.require_permission(request)
        seen = visible_halves(request.user)
        found = [(failing, group) for failing in seen for group in failing.groups.all(self.using)]
        notes: Any = FailureNote.objects.using(self.using).filter(app__in=[half.app for half in seen])[: 20 * MOST_GROUPS]
        noted = {(note.app, note.error_class, note.place): note for note in notes}
        found.sort(key=lambda each: -each[1].count)
        context = {
            "title": _("Failure groups"),
            "groups": [
                {
                    **self._shown(failing, group),
                    "url": group_url(self.admin_site, failing.app, group.error_class, group.place),
                    "app": failing.app,
                    "note": noted.get((failing.app, group.error_class, group.place)),
                }
                for failing, group in found
            ],
            "now": utcnow(),
            "is_cut": any(number >= MOST_GROUPS for number in Counter(failing.app for failing, _group in found).values()),
            "most": MOST_GROUPS,
        }
        return self.respond(request, "exactly_once/failure_groups.html", context)

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        """A note is shown on the page of its group."""
        note: Any = self.get_object(request, object_id)
        if note is None or not self.has_view_permission(request):
            raise PermissionDenied
        return HttpResponseRedirect(group_url(self.admin_site, note.app, note.error_class, note.place))

    @without_atomic_requests
    def group_view(self, request: HttpRequest) -> HttpResponse:
        """One group: its figures, its note, its latest messages, and what can be done with all of them."""
        failing = half_of(request.GET.get("app", ""))
        if failing is None:
            raise Http404
        if not failing.is_visible(request.user):
            raise PermissionDenied
        error_class, place = (_column(request.GET.get(name, "")) for name in ("class", "place"))
        rejected = self._act(request, failing, error_class, place) if request.method == "POST" else None
        if isinstance(rejected, HttpResponse):
            return rejected
        group = failing.groups.one(self.using, error_class, place)
        written = FailureNote.objects.using(self.using).filter(app=failing.app, error_class=error_class, place=place).first()
        context = {
            "title": _("Failure group"),
            "list_url": reverse(f"{self.admin_site.name}:exactly_once_failurenote_changelist"),
            "group": group and self._shown(failing, group),
            "error_class": error_class,
            "place": place,
            "written": written,
            "now": utcnow(),
            "note_form": self.may_note(request) and (rejected or NoteForm(initial={"note": written.note if written else ""})),
            "concerned": self._concerned(request, failing, error_class, place) if group else (),
            "offered": self._offered(request, failing) if group else (),
            "messages_url": listed(failing.messages, failure=encoded(error_class, place)).url(self.admin_site, request),
            "latest": [
                (row, message_url(self.admin_site, failing.app, row.pk))
                for row in failing.failing(self.using, error_class, place).order_by("-failing_since").only(*_OF_A_ROW)[:_LATEST]
            ],
        }
        return self.respond(request, "exactly_once/failure_group.html", context)

    def _concerned(self, request: HttpRequest, failing: Half, error_class: str, place: str) -> list[tuple[str, str, int, str]]:
        """The ordering keys and values of headers that several of the newest messages share, with the list of each."""
        if not self.admin_site.is_registered(failing.messages):
            return []
        page: Any = self.admin_site.get_model_admin(failing.messages)
        redaction, counted = page.redaction(), Counter[tuple[str, str]]()
        newest = failing.failing(self.using, error_class, place).order_by("-failing_since")
        for key, headers in newest.values_list("key", "headers")[:_SAMPLE]:
            values = {f"headers.{name}": value for name, value in dict(redaction.headers(headers)).items()}
            values = {name: value for name, value in values.items() if isinstance(value, str) and _PROTOCOL not in name}
            counted.update(values.items())
            counted.update([("key", key)] if key else [])
        group = encoded(error_class, place)
        return [
            (name, value, count, listed(failing.messages, failure=group, q=f"{name}:{value}").url(self.admin_site, request))
            for (name, value), count in counted.most_common(_MOST_CONCERNED)
            if value and count > 1
        ]

    def _act(self, request: HttpRequest, failing: Half, error_class: str, place: str) -> HttpResponse | NoteForm:
        """The response; the form of an invalid note, so that it comes back with what was typed."""
        url = group_url(self.admin_site, failing.app, error_class, place)
        chosen = request.POST.get("action", "")
        if chosen == NOTE.name:
            if not self.may_note(request):
                raise PermissionDenied
            form = NoteForm(request.POST)
            if not form.is_valid():
                return form
            user: Any = request.user
            note = form.cleaned_data["note"].strip()
            with decision_transaction(self.using):
                group = {"app": failing.app, "error_class": error_class, "place": place}
                write_note(self.using, group, note, by=user.get_username())
                subject = Subject(kind="failure group", name=f"{error_class} {place}")
                record(failing.app, self.using, actor_of(request), NOTE.name, [subject], {"note": note})
            messages.success(request, str(NOTE.done))
            return HttpResponseRedirect(url)
        action = self._offered(request, failing).get(chosen)
        if action is None:
            raise PermissionDenied
        rows = failing.failing(self.using, error_class, place)
        selection = _("failure group %(class)s %(place)s") % {"class": error_class, "place": place}
        return plan(self, request, rows, action, str(selection), url)

    def _offered(self, request: HttpRequest, failing: Half) -> Mapping[str, Action]:
        return {
            name: action
            for name, action in failing.actions.items()
            if failing.permits(request.user, name) and {"dead", "retrying"} & {*map(str, action.sources)}
        }

    def _shown(self, failing: Half, group: FailureGroup) -> dict[str, Any]:
        return {"of": group, "who_label": failing.groups_label, "who": named(group.who), "trend": _trend(group)}


def group_url(site: admin.AdminSite, app: str, error_class: str, place: str) -> str:
    """The page of a failure group; "" if the site does not have it."""
    return page_url(site, "exactly_once_failurenote_group", **{"app": app, "class": error_class, "place": place})


def _trend(group: FailureGroup) -> str:
    """How many messages began to fail so in the last hour, and whether these are more than in the hour before."""
    if not group.new and not group.new_before:
        return str(_("none new"))
    direction = _("rising") if group.new > group.new_before else _("falling") if group.new < group.new_before else _("steady")
    return str(
        _("%(direction)s: %(new)s new in the last hour, %(before)s in the hour before")
        % {"direction": direction, "new": number(group.new), "before": number(group.new_before)}
    )


def failure_text(model_admin: Any, row: Any, error_class: str, place: str) -> SafeString:
    """Class and place of a message's failure on its page, with a link to its group while it belongs to one."""
    name = identifier(f"{error_class} {place}".strip())
    if not error_class or row.failing_since is None or row.state not in {"retrying", "dead"}:
        return name if error_class else NOTHING
    url = group_url(model_admin.admin_site, model_admin.package, error_class, place)
    return stacked(
        format_html('<a href="{}">{}</a>', url, name) if url else name,
        format_html("{} {}", _("since"), moment(row.failing_since, row.database_now)),
    )
