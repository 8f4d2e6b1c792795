"""The undecided prepared messages; first those that an operator must decide about."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.message_filters import StateFilter
from exactly_once.display import Tone, age, badge, stacked
from outbox.admin.selections import SelectionAdmin
from outbox.checkers import checkers
from outbox.conf import outbox_options
from outbox.models import PreparedMessage
from outbox.operators.operations import ASK_AGAIN, COMMIT_THEM, ROLL_THEM_BACK
from outbox.states import UNDECIDED, State


class UndecidedFilter(StateFilter):
    """By the two undecided states."""

    def states(self, model_admin: Any) -> list[tuple[str, str]]:
        return [(state, label) for state, label in super().states(model_admin) if state in model_admin.selected]


@admin.register(PreparedMessage)
class PreparedMessageAdmin(SelectionAdmin):
    """Stuck messages first, then in the order of their next check, which is that of the index."""

    selected = UNDECIDED
    ordering = ("-state", "available_at", "id")
    list_display = ("state_badge", "summary", "prepared", "checks", "said")
    list_filter = (UndecidedFilter,)
    actions = (COMMIT_THEM, ROLL_THEM_BACK, ASK_AGAIN)
    nothing = _("No prepared message waits for a decision. Each one stands here until it is committed or rolled back.")
    hint = _(
        "A relay asks the checkers. Stuck messages come first: their checkers are not asked any more, so an operator must "
        "find out what happened."
    )

    @admin.display(description=_("prepared"))
    def prepared(self, row: Any) -> SafeString:
        return age(row.created_at, row.database_now)

    @admin.display(description=_("next check, answers so far"))
    def checks(self, row: Any) -> SafeString:
        next_one = age(row.available_at, row.database_now, gettext("due "))
        lines = [format_html("{}", gettext("none: an operator decides")) if row.state == State.STUCK else next_one]
        if row.attempts:
            lines.append(
                format_html(gettext("unknown {} of {} times"), f"{row.attempts:,}", f"{outbox_options().CHECK_LIMIT:,}")
            )
        if checkers.of(row.topic) is None:
            lines.append(badge(gettext("No checker here"), Tone.FAILING))
        return stacked(*lines)

    @admin.display(description=_("last answer"))
    def said(self, row: Any) -> SafeString:
        return self.error_headline(row)
