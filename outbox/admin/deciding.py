"""Actions on messages in the outbox: each is one guarded transition of `outbox.store`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.acting import Transition, by
from exactly_once.admin.messages import Counterpart, MessageAdmin
from exactly_once.display import Tone, age, exact
from outbox import doorbell
from outbox.admin.failures import planner
from outbox.admin.forms import ReasonForm, RescheduleForm, RestoreForm
from outbox.dead_letters import letters
from outbox.models import OutboxMessage
from outbox.states import CANCEL, COMMIT, PUBLISH_NOW, RESCHEDULE, RESTORE, ROLL_BACK, UNDECIDED, State
from outbox.store import operating, preparing, restoring, unique

_Messages = QuerySet[OutboxMessage]


class DecidingAdmin(MessageAdmin):
    """Outbox messages and their actions. Each action has its own permission."""

    tones: ClassVar[Any] = {
        State.PREPARED: Tone.LATER,
        State.STUCK: Tone.STOPPED,
        State.SCHEDULED: Tone.LATER,
        State.READY: Tone.OPEN,
        State.RETRYING: Tone.FAILING,
        State.WAITING: Tone.LATER,
        State.PAUSED: Tone.LATER,
        State.PUBLISHED: Tone.DONE,
        State.DEAD: Tone.STOPPED,
        State.EXPIRED: Tone.OVER,
        State.CANCELLED: Tone.OVER,
        State.ROLLED_BACK: Tone.OVER,
    }
    planner = planner
    letters = letters
    counterpart = Counterpart(app="inbox", model="inboxmessage", title=_("inbox messages"))
    allowed_in: ClassVar[Any] = {
        "publish_now": PUBLISH_NOW.sources,
        "reschedule": RESCHEDULE.sources,
        "cancel": CANCEL.sources,
        "restore": RESTORE.sources,
        "commit": COMMIT.sources,
        "roll_back": ROLL_BACK.sources,
        "ask_again": UNDECIDED,
        "export": (State.DEAD,),
    }
    actions: Any = tuple(allowed_in)

    def is_here(self, where: str) -> bool:
        return where == "outbox"

    def remark(self, action: str, row: Any) -> SafeString | str:
        words = super().remark(action, row)
        if words:
            return words
        if action == "restore":
            if row.is_unique and unique.is_replaced(self.using, row.pk):
                return gettext("A later message has replaced it: it is not changed.")
            if row.deliver_at is None or row.deliver_at <= row.database_now:
                return gettext("Overdue: it is sent at once.")
            return age(row.deliver_at, row.database_now, gettext("Scheduled again, due "))
        return age(row.available_at, row.database_now, gettext("Due ")) if row.state == State.SCHEDULED else ""

    def why_not(self, request: HttpRequest, alias: str, pk: int) -> str:
        if request.POST.get("action") == "restore":
            if unique.is_replaced(alias, pk):
                return gettext("it was published with unique=True, and so was a later message with its topic and biz-id")
            row = self.everything(request).using(alias).filter(pk=pk, state__in=RESTORE.sources).first()
            overdue = row is not None and (row.deliver_at is None or row.deliver_at <= row.database_now)
            if overdue and not request.POST.get("overdue"):
                return gettext("it is overdue, and overdue messages were not selected")
        return super().why_not(request, alias, pk)

    def has_reschedule_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.reschedule_outboxmessage")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.cancel_outboxmessage")

    def has_restore_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.restore_outboxmessage")

    def has_decide_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.decide_outboxmessage")

    @admin.action(permissions=["reschedule"], description=_("Publish now…"))
    def publish_now(self, request: HttpRequest, queryset: _Messages) -> HttpResponse | None:
        return self.once_confirmed(
            request,
            queryset,
            ReasonForm,
            action="publish_now",
            question=gettext("Publish these messages now? A sent message cannot be taken back."),
            button=gettext("Publish the messages now"),
            done=gettext("to be published now"),
            transition=lambda given: _ringing(operating.reschedule, due=timedelta(), reason=by(request, given["reason"])),
        )

    @admin.action(permissions=["reschedule"], description=_("Reschedule…"))
    def reschedule(self, request: HttpRequest, queryset: _Messages) -> HttpResponse | None:
        form = RescheduleForm(request.POST if self.is_confirmed(request) else None)
        if form.is_valid():
            reason = form.cleaned_data["reason"]
            return self.carry_out(
                request,
                queryset,
                done=gettext("rescheduled, due %(when)s") % {"when": _in_words(form.due)},
                transition=partial(operating.reschedule, due=form.due, reason=by(request, reason)),
                reason=reason,
            )
        return self.ask(
            request,
            queryset,
            action="reschedule",
            question=gettext(
                "Reschedule these messages? Their attempts start again at zero, and the time between due and expiry stays "
                "the same."
            ),
            button=gettext("Reschedule the messages"),
            form=form,
        )

    @admin.action(permissions=["cancel"], description=_("Cancel…"))
    def cancel(self, request: HttpRequest, queryset: _Messages) -> HttpResponse | None:
        return self.once_confirmed(
            request,
            queryset,
            ReasonForm,
            action="cancel",
            question=gettext(
                "Cancel these messages? No relay will send them any more. The broker may already have a message whose "
                "confirmation is outstanding."
            ),
            button=gettext("Cancel the messages"),
            done=gettext("cancelled"),
            transition=lambda given: _ringing(operating.cancel, reason=by(request, given["reason"])),
        )

    @admin.action(permissions=["restore"], description=_("Restore…"))
    def restore(self, request: HttpRequest, queryset: _Messages) -> HttpResponse | None:
        return self.once_confirmed(
            request,
            queryset,
            RestoreForm,
            action="restore",
            question=gettext(
                "Restore these messages? They get a full set of attempts, and the same time until they expire again."
            ),
            button=gettext("Restore the messages"),
            done=gettext("restored"),
            transition=lambda given: _ringing(restoring.restore, overdue=given["overdue"], reason=by(request, given["reason"])),
        )

    @admin.action(permissions=["decide"], description=_("Commit, so that it is sent…"))
    def commit(self, request: HttpRequest, queryset: _Messages) -> HttpResponse | None:
        return self.once_confirmed(
            request,
            queryset,
            ReasonForm,
            action="commit",
            question=gettext(
                "Commit these prepared messages? This states that their effect has happened. They are sent, and a sent "
                "message cannot be taken back."
            ),
            button=gettext("Commit the messages"),
            done=gettext("committed"),
            transition=lambda given: _ringing(preparing.commit_prepared, reason=by(request, given["reason"])),
        )

    @admin.action(permissions=["decide"], description=_("Roll back…"))
    def roll_back(self, request: HttpRequest, queryset: _Messages) -> HttpResponse | None:
        return self.once_confirmed(
            request,
            queryset,
            ReasonForm,
            action="roll_back",
            question=gettext(
                "Roll back these prepared messages? This states that their effect has not happened and never will. They "
                "are never sent."
            ),
            button=gettext("Roll back the messages"),
            done=gettext("rolled back"),
            transition=lambda given: partial(preparing.roll_back_prepared, reason=by(request, given["reason"])),
        )

    @admin.action(permissions=["decide"], description=_("Ask the checker again"))
    def ask_again(self, request: HttpRequest, queryset: _Messages) -> HttpResponse | None:
        ask = partial(_ask_again, reason=by(request))
        return self.carry_out(request, queryset, done=gettext("to be asked about at once"), transition=ask)


def _ringing(transition: Callable[..., bool], **given: Any) -> Transition:
    """The transition; it rings the doorbell if it was made."""

    def decide(alias: str, position: int) -> bool:
        done = transition(alias, position, **given)
        if done:
            doorbell.ring_after_commit(alias)
        return done

    return decide


def _ask_again(alias: str, position: int, *, reason: str) -> bool:
    """Resume the checks of a stuck message; for one that is not stuck, make the next check due at once."""
    return preparing.resume(alias, position, reason=reason) or preparing.make_check_due(alias, position)


def _in_words(due: timedelta | datetime) -> str:
    if isinstance(due, datetime):
        return gettext("at %(instant)s") % {"instant": exact(due)}
    return gettext("in %(time)s") % {"time": due}
