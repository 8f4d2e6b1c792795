"""Lists of the messages in some states. Their links lead to the message's page in the list of all messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.safestring import SafeString

from exactly_once.sql.now import DatabaseTime
from outbox.admin.messages import OutboxMessageAdmin
from outbox.models import OutboxMessage
from outbox.states import State


class SelectionAdmin(OutboxMessageAdmin):
    """A list for every user with the permission to view messages."""

    selected: ClassVar[Sequence[State]]
    list_display_links = ("summary",)
    sortable_by = ()
    # The page of a message links back to the list of all messages, which has other filters.
    preserve_filters = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).filter(state__in=self.selected)

    def everything(self, request: HttpRequest) -> QuerySet[Any]:
        return OutboxMessage.objects.using(self.using).annotate(database_now=DatabaseTime())

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.view_outboxmessage")

    def warnings(self, request: HttpRequest) -> Sequence[SafeString]:
        return ()

    def own_url(self, pk: int) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_outboxmessage_change", args=[pk])

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        return HttpResponseRedirect(
            reverse(f"{self.admin_site.name}:{self.opts.app_label}_outboxmessage_change", args=[object_id])
        )
