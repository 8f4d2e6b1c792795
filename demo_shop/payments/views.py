"""The door the payment provider knocks at. It answers 200 only to what is stored: anything else makes it call again."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from http import HTTPStatus

from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from demo_shop.payments.models import Payment
from demo_shop.payments.services import Answer, Notice, accept, is_signed

SIGNATURE_HEADER = "X-Signature"


@csrf_exempt
@require_POST
def webhook(request: HttpRequest) -> JsonResponse:
    """200 stored or known, 400 unreadable, 403 not signed by the provider, 404 no such payment, 409 a contradiction."""
    if not is_signed(request.body, request.headers.get(SIGNATURE_HEADER, "")):
        return _answer("the signature does not fit the body", HTTPStatus.FORBIDDEN)
    try:
        notice = _read(request.body)
    except (ValueError, KeyError, TypeError, InvalidOperation) as error:
        return _answer(f"the body cannot be read: {error}", HTTPStatus.BAD_REQUEST)
    try:
        answer = accept(notice)
    except Payment.DoesNotExist:
        return _answer(f"there is no payment {notice.payment_id}", HTTPStatus.NOT_FOUND)
    return _answer(answer.value, HTTPStatus.CONFLICT if answer is Answer.CONTRADICTION else HTTPStatus.OK)


def _read(body: bytes) -> Notice:
    said = json.loads(body)
    amount = Decimal(said["amount"])
    if not amount.is_finite():
        raise ValueError(f"the amount is {amount}")
    return Notice(event_id=str(said["id"]), payment_id=int(said["payment"]), amount=amount, body=body)


def _answer(what: str, status: HTTPStatus) -> JsonResponse:
    return JsonResponse({"answer": what}, status=status)
