"""What the pages offer to do to messages of the inbox."""

import hashlib
from collections.abc import Sequence
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.actions import Action, ActionForm, reason_field
from exactly_once.console.admin.html import difference_as_html
from exactly_once.console.operators.changes import by_name
from exactly_once.sql.partitions import lately
from inbox import states
from inbox.errors import NotEditable
from inbox.models import InboxMessage
from inbox.operators import changes
from inbox.operators.editing import conflict_token, correct, editable

_LARGEST_EDITED = 256 * 1024
"""In characters. A larger form may exceed Django's DATA_UPLOAD_MAX_MEMORY_SIZE after encoding."""


class SkipForm(ActionForm):
    reason = reason_field(_("Why the effect must not happen. The reason is stored with the message and in the admin log."))


class OverrideForm(ActionForm):
    danger = _(
        "These messages are in quarantine, because the inbox no longer knows whether they were handled before. If one was, its "
        "effect would happen a second time. First check the data that it would write, the logs of the day it was published, "
        "and the publisher's records. Skip the messages that were handled."
    )
    reason = reason_field(
        _("What shows that none of them was handled before. The reason is stored in the admin log."), label=_("Evidence")
    )


class ConflictForm(ActionForm):
    danger = _(
        "The handler runs with the content of the latest message that has the biz-id of an earlier one. Its effect happens in "
        "addition to that of the earlier one. First check that the two are different facts. Earlier contents are not stored."
    )
    reason = reason_field(
        _("What shows that it is another fact. The reason is stored in the trail and in the admin log."), label=_("Evidence")
    )
    shown = forms.CharField(required=False, widget=forms.HiddenInput)

    def __init__(self, data: Any = None, *, rows: Sequence[Any] = (), **options: Any) -> None:
        shown = "" if data else " ".join(conflict_token(row) for row in rows)
        super().__init__(data, rows=rows, initial={"shown": shown}, **options)


class EditForm(ActionForm):
    """Edits the payload of a message. The edit is confirmed if its changes were shown and the payload is the same since.

    Raises:
        NotEditable: the message cannot be corrected, or not on this page, for this reason.
    """

    payload = forms.CharField(
        label=_("Payload"),
        strip=False,
        widget=forms.Textarea(
            attrs={"class": "message-edit", "rows": 24, "spellcheck": "false", "autocapitalize": "off", "autofocus": True}
        ),
        help_text=_("JSON. The content type and the headers stay unchanged."),
    )
    shown = forms.CharField(required=False, widget=forms.HiddenInput)

    def __init__(self, data: Any = None, *, rows: Sequence[Any] = (), **options: Any) -> None:
        messages = InboxMessage.objects.using(rows[0]._state.db)
        self._stored = messages.get(pk=rows[0].pk, day__in={rows[0].day, *lately()})
        text = editable(self._stored)
        if len(text) > _LARGEST_EDITED:
            raise NotEditable(
                f"Its payload has {len(text):,} characters; the limit of this page is {_LARGEST_EDITED:,}. Use the command "
                "inbox_edit."
            )
        super().__init__(data, rows=rows, initial={"payload": text}, **options)
        self._is_agreed = False

    def is_valid(self) -> bool:
        return super().is_valid() and self._is_agreed

    def clean(self) -> dict[str, Any]:
        given: dict[str, Any] = super().clean() or {}
        if "payload" not in given:
            return given
        try:
            self.preview = difference_as_html(correct(self._stored, given["payload"]).changes)
        except NotEditable as error:
            self.add_error("payload", str(error))
            return given
        digest = hashlib.sha256(given["payload"].encode("utf-8", "surrogatepass")).hexdigest()
        self.question, self.button = _("Replace this message with the corrected one?"), _("Replace the message and run it")
        self._is_agreed = given.get("shown") == digest
        self.data = {**dict(self.data.items()), "shown": digest}
        return given


RETRY = Action(**vars(changes.RETRY), label=_("Retry now"), done=_("due for a retry now"))
EDIT = Action(
    **vars(changes.EDIT),
    label=_("Edit and retry"),
    done=_("replaced by a corrected message"),
    question=_("Edit the payload of this message"),
    button=_("Show the changes"),
    form=EditForm,
    is_single=True,
)
SKIP = Action(
    **vars(changes.SKIP),
    label=_("Skip"),
    done=_("skipped"),
    question=_("Skip these messages? Their effect will not happen."),
    button=_("Skip the messages"),
    form=SkipForm,
)
OVERRIDE = Action(
    **vars(changes.OVERRIDE),
    label=_("Retry past the maximum message age"),
    done=_("due now, past the maximum message age"),
    permission=states.OVERRIDE.permission,
    question=_("Run these messages although they may have been handled before?"),
    button=_("Run the messages"),
    form=OverrideForm,
)
RUN_CONFLICTING = Action(
    **vars(changes.RUN_CONFLICTING),
    label=_("Run the different content as its own message"),
    done=_("different content due now, as its own message"),
    question=_("Run the different content of these messages as messages of their own?"),
    button=_("Run as own messages"),
    form=ConflictForm,
)
OPERATIONS = by_name(RETRY, SKIP)
