"""Idempotent views: a request that is repeated with its `Idempotency-Key` has one effect and one answer.

    @idempotent_view
    def pay(request: HttpRequest) -> HttpResponse:
        payment = Payment.objects.create(...)
        return JsonResponse({"payment": payment.pk}, status=201)

The response is stored in the transaction of the view, in a row that is unique for scope and key (`store`). A repeated request
gets the stored response, and the view is not called. The header is that of draft-ietf-httpapi-idempotency-key-header-07.

An optional app: add "exactly_once.contrib.views" to INSTALLED_APPS.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from exactly_once.packages import looked_up

if TYPE_CHECKING:
    from exactly_once.contrib.views.decorators import NotStorable, TransactionBroken, by_token, by_user, idempotent_view

__all__ = ["NotStorable", "TransactionBroken", "by_token", "by_user", "idempotent_view"]

__getattr__ = partial(looked_up, __name__, dict.fromkeys(__all__, "decorators"))
