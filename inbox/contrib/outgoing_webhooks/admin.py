"""The endpoints of webhooks in the admin: how they fare, what waits for them, and the operators' decisions."""

from collections.abc import Mapping
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Count, OuterRef, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, Concat
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action, ActionForm, NeededReasonForm
from exactly_once.console.admin.html import NOTHING, Tone, age, badge, folded, headline, identifier, labelled, stacked, text
from exactly_once.console.admin.pages import computed, instant, shown
from exactly_once.console.display import number
from exactly_once.console.operators.changes import each
from exactly_once.wire.formats import WEBHOOK_HANDLERS
from inbox.contrib.outgoing_webhooks import endpoints
from inbox.contrib.outgoing_webhooks.addresses import shown as masked
from inbox.contrib.outgoing_webhooks.fanning_out import fan_outs, send_test
from inbox.contrib.outgoing_webhooks.models import Endpoint, State
from inbox.models import InboxMessage
from inbox.states import DUE

_TONES = {State.ACTIVE: Tone.DONE, State.PAUSED: Tone.LATER, State.DISABLED: Tone.STOPPED}


class AddForm(ActionForm, forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Endpoint
        fields = ("name", "url", "topics", "concurrency")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields["url"].widget.attrs["class"] = self.fields["name"].widget.attrs["class"] = "vTextField"
        sent = ", ".join(sorted(topic for handler in fan_outs() for topic in handler.topics)) or NOTHING
        self.fields["topics"].help_text = _('A list, ["shop.order.placed"]. [] means all. The topics that are sent: %s') % sent


class EditForm(NeededReasonForm):
    """What is left empty stays as it is."""

    url = forms.CharField(label="URL", required=False, widget=forms.TextInput(attrs={"class": "vTextField"}))
    topics = forms.JSONField(
        label=_("Topics"),
        required=False,
        initial="",
        widget=forms.Textarea(attrs={"rows": 3, "cols": 40}),
        help_text=_('A list, ["shop.order.placed"]. [] means all.'),
    )
    concurrency = forms.IntegerField(label=_("Concurrency"), required=False)
    field_order = ("url", "topics", "concurrency", "reason")

    def clean(self) -> None:
        for name, value in changes(self.cleaned_data).items():
            column: Any = Endpoint._meta.get_field(name)
            try:
                column.clean(value, None)
            except forms.ValidationError as error:
                self.add_error(name, error)


def changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The columns to change: what was not left empty."""
    return {name: given[name] for name in ("url", "topics", "concurrency") if given.get(name) is not None and given[name] != ""}


ADD = Action(
    name="add",
    label=_("Add an endpoint"),
    done=_("added"),
    perform=each(Endpoint, lambda alias, pk, given: Endpoint.objects.using(alias).create(**given.values)),
    question=_("Add an endpoint?"),
    button=_("Add the endpoint"),
    form=AddForm,
)
TEST = Action(
    name="test",
    label=_("Send a test message"),
    done=_("a test message is on its way; the inbox messages show what becomes of it"),
    perform=each(Endpoint, lambda alias, pk, given: send_test(alias, pk)),
    offered=lambda row: row.state != State.DISABLED,
    question=_("Send a message of the topic webhook.test to these endpoints?"),
    button=_("Send the test messages"),
    form=NeededReasonForm,
)
EDIT = Action(
    name="edit",
    label=_("Change the URL, the topics or the concurrency"),
    done=_("changed"),
    perform=each(Endpoint, lambda alias, pk, given: endpoints.edit(alias, pk, **changes(given.values))),
    question=_("Change these endpoints? What is left empty stays as it is."),
    button=_("Change the endpoints"),
    form=EditForm,
)
ROTATE = Action(
    name="rotate",
    label=_("Make a new secret"),
    done=_("has a new secret"),
    perform=each(Endpoint, lambda alias, pk, given: endpoints.rotate(alias, pk)),
    question=_("Make a new secret for these endpoints? Requests are signed with the old one, too, for 24 hours."),
    button=_("Make new secrets"),
    form=NeededReasonForm,
)
ENABLE = Action(
    name="enable",
    label=_("Enable"),
    done=_("enabled"),
    perform=each(Endpoint, lambda alias, pk, given: endpoints.enable(alias, pk)),
    offered=lambda row: row.state != State.ACTIVE,
    question=_("Enable these endpoints? The messages that wait for them are sent."),
    button=_("Enable the endpoints"),
    form=NeededReasonForm,
)
DISABLE = Action(
    name="disable",
    label=_("Disable"),
    done=_("disabled"),
    perform=each(Endpoint, lambda alias, pk, given: endpoints.disable(alias, pk, reason=given.reason)),
    offered=lambda row: row.state != State.DISABLED,
    question=_("Disable these endpoints? They get no new messages; those that are stored wait."),
    button=_("Disable the endpoints"),
    form=NeededReasonForm,
)


@admin.register(Endpoint)
class EndpointAdmin(ActingAdmin):
    """By name. An endpoint is not deleted but disabled, because its messages refer to it."""

    kind = "endpoint"
    noun = _("endpoint")
    nouns = _("endpoints")
    nothing = _("No endpoint has been added yet.")
    hint = _(
        "The process inbox_outgoing_webhooks sends messages to these endpoints. An endpoint that fails repeatedly is paused "
        "and tried again later; its messages wait. A disabled endpoint gets no new messages."
    )
    large_columns = ("secret", "old_secret")
    actions = (TEST, EDIT, ROTATE, ENABLE, DISABLE)
    adds = ADD
    named_by = "name"
    ordering = ("name",)
    list_display = ("state_badge", "name_and_url", "waiting", "since", "last_failure")
    list_display_links = ("name_and_url",)
    fields = (
        *("state_badge", "why", "next_try", "endpoint_name", "shown_url", "shown_topics", "concurrency", "waiting", "since"),
        "shown_secret",
    )

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        may_see = request.user.has_perm(f"{self.opts.app_label}.secret_endpoint")
        return [name for name in self.fields if may_see or name != "shown_secret"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        of_it = InboxMessage.objects.filter(handler=Concat(Value(WEBHOOK_HANDLERS), OuterRef("name")), state__in=DUE).order_by()
        counted = Subquery(of_it.values("handler").annotate(messages=Count("pk")).values("messages"))
        rows: QuerySet[Any] = super().get_queryset(request).annotate(messages=Coalesce(counted, 0))
        return rows

    def parameters(self, request: HttpRequest) -> dict[str, Any]:
        """Parts of a URL may be secrets."""
        return {name: masked(value) if name == "url" else value for name, value in super().parameters(request).items()}

    def badge_of(self, row: Any) -> SafeString:
        return badge(row.get_state_display(), _TONES[row.state])

    name_and_url = computed(_("name, URL"), lambda row: stacked(identifier(row.name), identifier(masked(row.url))))
    endpoint_name = shown(_("name"), "name", identifier)
    shown_url = computed("URL", lambda row: identifier(masked(row.url)))
    shown_topics = computed(_("topics"), lambda row: stacked(*map(identifier, row.topics)) if row.topics else gettext("all"))

    waiting = computed(_("messages that wait"), lambda row: labelled(_("messages that wait"), number(row.messages)))

    since = instant(_("since"), "state_since", age)
    next_try = instant(_("next try"), "probe_at")
    last_failure = shown(_("last failure"), "reason", headline)
    why = shown(_("why"), "reason", text)

    @admin.display(description=_("secret"))
    def shown_secret(self, row: Any) -> SafeString:
        return folded(
            gettext("Show the URL and the secret"),
            format_html("<p>{}</p><p>{}</p>", identifier(row.url), identifier(row.secret)),
        )
