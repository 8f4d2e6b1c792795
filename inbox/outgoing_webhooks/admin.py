"""The endpoints of webhooks in the admin: how they fare, what waits for them, and the operators' decisions."""

from __future__ import annotations

from functools import partial
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Count, OuterRef, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, Concat
from django.forms import Media
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.acting import ActingAdmin, ReadOnlyAdmin
from exactly_once.display import (
    NOTHING,
    Tone,
    age,
    as_text,
    badge,
    folded,
    headline,
    identifier,
    moment,
    stacked,
    visible,
)
from exactly_once.operators.audit import Subject, actor_of, posted, record
from exactly_once.wire.formats import WEBHOOK_HANDLERS
from inbox.models import DUE, InboxMessage
from inbox.outgoing_webhooks import endpoints
from inbox.outgoing_webhooks.fanning_out import fan_outs, send_test
from inbox.outgoing_webhooks.models import Endpoint, State
from inbox.outgoing_webhooks.urls import shown

_TONES = {State.ACTIVE: Tone.DONE, State.PAUSED: Tone.LATER, State.DISABLED: Tone.STOPPED}
_APP = "inbox"
"""Its style sheet and its audit log are those of the endpoints."""


class AddForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Endpoint
        fields = ("name", "url", "topics", "concurrency")


class ReasonForm(forms.Form):
    reason = forms.CharField(
        max_length=500,
        widget=forms.TextInput(attrs={"class": "vTextField"}),
        help_text=_("The reason is stored in the admin log."),
    )


class EditForm(ReasonForm):
    """What is left empty stays as it is."""

    url = forms.CharField(label="URL", required=False, widget=forms.TextInput(attrs={"class": "vTextField"}))
    topics = forms.JSONField(label=_("Topics"), required=False, help_text=_('A list, ["shop.order.placed"]. [] means all.'))
    concurrency = forms.IntegerField(label=_("Concurrency"), required=False)
    field_order = ("url", "topics", "concurrency", "reason")

    def changes(self) -> dict[str, Any]:
        given = {name: self.cleaned_data.get(name) for name in ("url", "topics", "concurrency")}
        return {name: value for name, value in given.items() if value is not None and value != ""}

    def clean(self) -> None:
        for name, value in self.changes().items():
            column: Any = Endpoint._meta.get_field(name)
            try:
                column.clean(value, None)
            except forms.ValidationError as error:
                self.add_error(name, error)


@admin.register(Endpoint)
class EndpointAdmin(ActingAdmin):
    """By name. An endpoint is not deleted but disabled, because its messages refer to it."""

    kind = "endpoint"
    noun = _("endpoint")
    nouns = _("endpoints")
    nothing = _("There is no endpoint.")
    hint = _(
        "The process inbox_outgoing_webhooks sends messages to these endpoints. An endpoint that fails repeatedly is paused "
        "and tried again later; its messages wait. A disabled endpoint gets no new messages."
    )
    large_columns = ("secret", "old_secret")
    actions = ("test", "edit", "rotate", "enable", "disable")
    add_form_template = "admin/change_form.html"
    form = AddForm
    ordering = ("name",)
    sortable_by = ()
    list_filter = ()
    list_display = ("state_badge", "name_and_url", "waiting", "since", "last_failure")
    list_display_links = ("name_and_url",)
    shown = (
        "state_badge",
        "endpoint_name",
        "shown_url",
        "shown_topics",
        "concurrency",
        "waiting",
        "since",
        "next_try",
        "why",
        "shown_secret",
    )

    @property
    def media(self) -> Media:
        """The admin's media and the style sheet of the inbox."""
        return super(ReadOnlyAdmin, self).media + Media(css={"all": ["exactly_once/admin.css"]})

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is None:
            return AddForm.Meta.fields
        may_see = request.user.has_perm(f"{self.opts.app_label}.secret_endpoint")
        return [name for name in self.shown if may_see or name != "shown_secret"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return () if obj is None else self.shown

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        form: Any = super().get_form(request, obj, change=change, **kwargs)
        if obj is None:
            offered = ", ".join(sorted(handler.topic for handler in fan_outs())) or NOTHING
            form.base_fields["topics"].help_text = (
                _('A list, ["shop.order.placed"]. [] means all. The topics that are sent: %s') % offered
            )
        return form

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        of_it = InboxMessage.objects.filter(handler=Concat(Value(WEBHOOK_HANDLERS), OuterRef("name")), state__in=DUE).order_by()
        counted = Subquery(of_it.values("handler").annotate(messages=Count("pk")).values("messages"))
        rows: QuerySet[Any] = super().get_queryset(request).annotate(messages=Coalesce(counted, 0))
        return rows

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: Any) -> None:
        obj.save(using=self.using, force_insert=True)
        self.audit(request, self.using, "add", obj)

    def audit(self, request: HttpRequest, alias: str, action: str, row: Any) -> None:
        subject = Subject(kind=self.kind, id=row.name, name=self.subject(row))
        # Parts of a URL may be secrets.
        given = {name: shown(value) if name == "url" else value for name, value in posted(request).items()}
        record(_APP, alias, actor_of(request), action, [subject], given)

    def subject(self, row: Any) -> str:
        return visible(row.name)

    def badge_of(self, row: Any) -> SafeString:
        return badge(row.get_state_display(), _TONES[row.state])

    def offers(self, action: str, row: Any) -> bool:
        match action:
            case "enable":
                return bool(row.state != State.ACTIVE)
            case "disable" | "test":
                return bool(row.state != State.DISABLED)
            case _:
                return True

    def why_not(self, request: HttpRequest, alias: str, pk: Any) -> str:
        row = self.everything(request).using(alias).filter(pk=pk).first()
        if row is None:
            return gettext("it no longer exists")
        return gettext("it is %(state)s now") % {"state": row.get_state_display().lower()}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.add_endpoint")

    def has_test_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.test_endpoint")

    def has_edit_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.edit_endpoint")

    def has_rotate_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.rotate_endpoint")

    def has_enable_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.enable_endpoint")

    def has_disable_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.disable_endpoint")

    @admin.action(permissions=["test"], description=_("Send a test message…"))
    def test(self, request: HttpRequest, queryset: QuerySet[Endpoint]) -> HttpResponse | None:
        return self.once_confirmed(
            request,
            queryset,
            ReasonForm,
            action="test",
            question=gettext("Send a message of the topic webhook.test to these endpoints?"),
            button=gettext("Send the test messages"),
            done=gettext("a test message is on its way; the inbox messages show what becomes of it"),
            transition=lambda given: send_test,
        )

    @admin.action(permissions=["edit"], description=_("Change the URL, the topics or the concurrency…"))
    def edit(self, request: HttpRequest, queryset: QuerySet[Endpoint]) -> HttpResponse | None:
        filled = EditForm(request.POST if self.is_confirmed(request) else None)
        if filled.is_valid():
            transition = partial(endpoints.edit, **filled.changes())
            reason = filled.cleaned_data["reason"]
            return self.carry_out(request, queryset, done=gettext("changed"), transition=transition, reason=reason)
        question, button = (
            gettext("Change these endpoints? What is left empty stays as it is."),
            gettext("Change the endpoints"),
        )
        return self.ask(request, queryset, action="edit", question=question, button=button, form=filled)

    @admin.action(permissions=["rotate"], description=_("Make a new secret…"))
    def rotate(self, request: HttpRequest, queryset: QuerySet[Endpoint]) -> HttpResponse | None:
        return self.once_confirmed(
            request,
            queryset,
            ReasonForm,
            action="rotate",
            question=gettext("Make a new secret for these endpoints? Requests are signed with the old one, too, for 24 hours."),
            button=gettext("Make new secrets"),
            done=gettext("has a new secret"),
            transition=lambda given: endpoints.rotate,
        )

    @admin.action(permissions=["enable"], description=_("Enable…"))
    def enable(self, request: HttpRequest, queryset: QuerySet[Endpoint]) -> HttpResponse | None:
        return self.once_confirmed(
            request,
            queryset,
            ReasonForm,
            action="enable",
            question=gettext("Enable these endpoints? The messages that wait for them are sent."),
            button=gettext("Enable the endpoints"),
            done=gettext("enabled"),
            transition=lambda given: endpoints.enable,
        )

    @admin.action(permissions=["disable"], description=_("Disable…"))
    def disable(self, request: HttpRequest, queryset: QuerySet[Endpoint]) -> HttpResponse | None:
        return self.once_confirmed(
            request,
            queryset,
            ReasonForm,
            action="disable",
            question=gettext("Disable these endpoints? They get no new messages; those that are stored wait."),
            button=gettext("Disable the endpoints"),
            done=gettext("disabled"),
            transition=lambda given: partial(endpoints.disable, reason=given["reason"]),
        )

    # display

    @admin.display(description=_("state"))
    def state_badge(self, row: Any) -> SafeString:
        return self.badge_of(row)

    @admin.display(description=_("name, URL"))
    def name_and_url(self, row: Any) -> SafeString:
        return stacked(identifier(row.name), identifier(shown(row.url)))

    @admin.display(description=_("name"))
    def endpoint_name(self, row: Any) -> SafeString:
        return identifier(row.name)

    @admin.display(description="URL")
    def shown_url(self, row: Any) -> SafeString:
        return identifier(shown(row.url))

    @admin.display(description=_("topics"))
    def shown_topics(self, row: Any) -> SafeString | str:
        return stacked(*map(identifier, row.topics)) if row.topics else gettext("all")

    @admin.display(description=_("messages that wait"))
    def waiting(self, row: Any) -> str:
        return f"{row.messages:,}"

    @admin.display(description=_("since"))
    def since(self, row: Any) -> SafeString:
        return age(row.state_since, row.database_now)

    @admin.display(description=_("next try"))
    def next_try(self, row: Any) -> SafeString:
        return moment(row.probe_at, row.database_now)

    @admin.display(description=_("last failure"))
    def last_failure(self, row: Any) -> SafeString:
        return headline(row.reason)

    @admin.display(description=_("why"))
    def why(self, row: Any) -> SafeString:
        return as_text(row.reason).as_html()

    @admin.display(description=_("secret"))
    def shown_secret(self, row: Any) -> SafeString:
        return folded(
            gettext("Show the URL and the secret"),
            format_html("<p>{}</p><p>{}</p>", identifier(row.url), identifier(row.secret)),
        )
