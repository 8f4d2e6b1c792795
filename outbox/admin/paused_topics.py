"""The topics that are paused: by whom, why, and how many messages wait; and the pausing and resuming of topics."""

from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib import admin
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.actions import Action, ReasonForm
from exactly_once.console.admin.filters import MOST_OFFERED
from exactly_once.console.admin.html import NOTHING, age, identifier, labelled
from exactly_once.console.admin.pages import counted, shown
from exactly_once.console.admin.paused import PausedAdmin, PauseForm
from exactly_once.console.operators.changes import each
from exactly_once.upkeep.operation_rows import Given
from exactly_once.wire.text import NAME_LENGTH, why_no_topic
from outbox.models import OutboxMessage, PausedTopic
from outbox.states import STOPPED, State, TopicState
from outbox.store import selecting
from outbox.topic_pauses import pause, resume


class PauseTopicForm(PauseForm):
    topic = forms.CharField(label=_("Topic"), max_length=NAME_LENGTH, help_text=_("Its exact name."))

    def known(self) -> Sequence[str]:
        return selecting.topics(self.alias, MOST_OFFERED)

    def clean_topic(self) -> str:
        topic: str = self.cleaned_data["topic"]
        if reason := why_no_topic(topic):
            raise forms.ValidationError(gettext("No message has this topic: %(reason)s.") % {"reason": reason})
        return topic


def _pause(alias: str, pk: Any, given: Given) -> bool:
    pause(given.values["topic"], reason=given.reason, by=given.who, using=alias)
    return True


def _resume(alias: str, pk: Any, given: Given) -> bool:
    row = PausedTopic.objects.using(alias).filter(pk=pk, mode__in=STOPPED).first()
    if row is None:
        return False
    resume(row.topic, by=given.text.removeprefix("by "), using=alias)
    return True


PAUSE = Action(
    name="pause",
    label=_("Pause a topic"),
    done=_("paused"),
    perform=each(PausedTopic, _pause),
    form=PauseTopicForm,
    question=_("Pause a topic? Its messages wait until it is resumed."),
    button=_("Pause the topic"),
)
RESUME = Action(
    name="resume",
    label=_("Resume"),
    done=_("being resumed"),
    perform=each(PausedTopic, _resume, _("it is being resumed already, or not paused")),
    offered=lambda row: row.mode in STOPPED,
    form=ReasonForm,
    question=_("Resume these topics? Their messages are sent, the oldest first, and what is sent cannot be taken back."),
    button=_("Resume the topics"),
)


_REMARKS = {
    TopicState.REFUSED: _("If the broker still refuses its messages, it is paused again."),
    TopicState.RESUMING: _("It is being resumed already."),
    TopicState.LIMITED: _("It is not paused: its rate limits it."),
}
"""On a topic that is selected to be resumed."""


@admin.register(PausedTopic)
class PausedTopicAdmin(PausedAdmin):
    """By topic. To add one is to pause it."""

    kind = "topic"
    noun = _("topic")
    nouns = _("topics")
    nothing = _("No topic is paused.")
    hint = _(
        "Relays send no messages of these topics, and those of limited topics at their rate. If the broker refuses a topic, a "
        "relay tries a few of its messages at least every half minute, and resumes the topic when the broker takes one. Only "
        "an operator resumes what an operator paused."
    )
    named_by = "topic"
    adds = PAUSE
    actions = (RESUME,)

    ordering = ("topic",)
    list_display = ("topic_name", "state_badge", "messages", "since", "by_whom", "why")
    fields = ("topic_name", "state_badge", "messages", "since_exactly", "by_whom", "reason_text", "next_try")

    def remark(self, action: Action, row: Any) -> SafeString | str:
        return str(_REMARKS.get(row.mode, ""))

    topic_name = shown(_("topic"), "topic", identifier)

    @admin.display(description=_("messages"))
    def messages(self, row: Any) -> SafeString:
        waiting = OutboxMessage.objects.using(self.using).filter(topic=row.topic, state=State.PAUSED)
        return labelled(_("messages"), counted(waiting))

    @admin.display(description=_("next probe"))
    def next_try(self, row: Any) -> SafeString:
        return NOTHING if row.mode != TopicState.REFUSED else age(row.probe_at, row.database_now)
