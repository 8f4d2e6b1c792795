"""The forms of the admin actions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from django import forms
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from exactly_once.difference import as_html
from inbox.dry_run import LONGEST
from inbox.editing import correct, editable
from inbox.errors import NotEditable
from inbox.models import InboxMessage

_LARGEST_EDITED = 256 * 1024
"""In characters. A larger form may exceed Django's DATA_UPLOAD_MAX_MEMORY_SIZE after encoding."""


class SkipForm(forms.Form):
    reason = forms.CharField(
        max_length=500,
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True}),
        help_text=_("Why the effect must not happen. The reason is stored with the message and in the admin log."),
    )


class OverrideForm(forms.Form):
    danger = _(
        "These messages are in quarantine, because the inbox no longer knows whether they were handled before. If one was, its "
        "effect would happen a second time. First check the data that it would write, the logs of the day it was published, "
        "and the publisher's records. Skip the messages that were handled."
    )
    reason = forms.CharField(
        max_length=500,
        label=_("Evidence"),
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True}),
        help_text=_("What shows that none of them was handled before. The reason is stored in the admin log."),
    )


class ConflictForm(forms.Form):
    danger = _(
        "The handler runs with the content of the latest message that has the biz-id of an earlier one. Its effect happens in "
        "addition to that of the earlier one. First check that the two are different facts. Earlier contents are not stored."
    )
    reason = forms.CharField(
        max_length=500,
        label=_("Evidence"),
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True}),
        help_text=_("What shows that it is another fact. The reason is stored in the trail and in the admin log."),
    )
    shown = forms.CharField(required=False, widget=forms.HiddenInput)


class DryRunForm(forms.Form):
    danger = _(
        "The handler runs in this web process, and its transaction is rolled back. Mail, HTTP requests and other effects "
        "outside the database are real."
    )
    seconds = forms.IntegerField(
        label=_("Time limit in seconds"),
        min_value=1,
        max_value=int(LONGEST.total_seconds()),
        initial=5,
        help_text=_("The handler is interrupted after this time."),
    )


class EditForm(forms.Form):
    """Edits the payload of a message. The edit is confirmed if its changes were shown and the payload is the same since.

    Raises:
        NotEditable: the message cannot be corrected, or not on this page, for this reason.
    """

    payload = forms.CharField(
        strip=False,
        widget=forms.Textarea(
            attrs={"class": "message-edit", "rows": 24, "spellcheck": "false", "autocapitalize": "off", "autofocus": True}
        ),
        help_text=_("JSON. The content type and the headers stay unchanged."),
    )
    shown = forms.CharField(required=False, widget=forms.HiddenInput)

    def __init__(self, stored: InboxMessage, data: Any = None) -> None:
        self._stored = stored
        text = editable(stored)
        if len(text) > _LARGEST_EDITED:
            raise NotEditable(
                f"Its payload has {len(text):,} characters; the limit of this page is {_LARGEST_EDITED:,}. Use the command "
                "inbox_edit."
            )
        super().__init__(data, initial={"payload": text})
        self.changes: Sequence[str] = ()
        self.is_agreed = False

    @property
    def preview(self) -> SafeString | str:
        """The changes as HTML, for the page."""
        return as_html(self.changes) if self.changes else ""

    def clean(self) -> dict[str, Any]:
        given: dict[str, Any] = super().clean() or {}
        if "payload" not in given:
            return given
        try:
            self.changes = correct(self._stored, given["payload"]).changes
        except NotEditable as error:
            self.add_error("payload", str(error))
            return given
        digest = hashlib.sha256(given["payload"].encode("utf-8", "surrogatepass")).hexdigest()
        self.is_agreed = given.get("shown") == digest
        self.data = {**dict(self.data.items()), "shown": digest}
        return given
