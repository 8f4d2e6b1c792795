"""A payment provider with the faults of a real one: it calls twice, at the same time, and under a new event id.

Other calls have a forged signature or another amount.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from http import HTTPStatus
from itertools import cycle

from django.db import connections
from django.test import Client

from demo_shop.payments.models import Payment, State
from demo_shop.payments.services import SIGNATURE_HEADER, sign
from demo_shop.simulation.ledger import Deed, Ledger

_HANDLERS_OF_PAYMENT_RECEIVED = 4
_REFUSALS = {HTTPStatus.UNAUTHORIZED, HTTPStatus.CONFLICT}


class Provider:
    """Pays every requested payment once, and may notify several times."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # The shop warns of each forged call. Here the audit counts them.
        logging.getLogger("outbox.contrib.incoming_webhooks").setLevel(logging.ERROR)
        self._paid: set[int] = set()
        manners: list[Callable[[Payment], None]] = [
            self._call_once,
            self._call_twice,
            self._call_twice_at_once,
            self._notify_under_two_ids,
            self._call_after_a_forger,
            self._call_and_contradict,
            *[self._call_once] * 4,
        ]
        self._manners = cycle(manners)

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(0.1):
            requested = Payment.objects.filter(order__startswith=self._ledger.run, state=State.REQUESTED)
            for payment in requested.order_by("pk"):
                if payment.pk not in self._paid:
                    self._paid.add(payment.pk)
                    next(self._manners)(payment)

    def _call_once(self, payment: Payment) -> None:
        self._call(self._event(payment))

    def _call_twice(self, payment: Payment) -> None:
        self._ledger.done(Deed.REPEATED_CALL)
        self._call(self._event(payment))
        self._call(self._event(payment))

    def _call_twice_at_once(self, payment: Payment) -> None:
        self._ledger.done(Deed.REPEATED_CALL)
        with ThreadPoolExecutor(2) as both:
            for call in [both.submit(self._call_from_a_thread, self._event(payment)) for _ in range(2)]:
                call.result()

    def _notify_under_two_ids(self, payment: Payment) -> None:
        """Two events for one fact: the webhook publishes both, and the inbox suppresses the second one."""
        self._ledger.done(Deed.INJECTED, _HANDLERS_OF_PAYMENT_RECEIVED)
        self._call(self._event(payment))
        self._call(self._event(payment, suffix="-again"))

    def _call_after_a_forger(self, payment: Payment) -> None:
        self._ledger.done(Deed.FORGED_CALL)
        self._call(self._event(payment), signature="0" * 64)
        self._call(self._event(payment))

    def _call_and_contradict(self, payment: Payment) -> None:
        self._ledger.done(Deed.CONTRADICTING_CALL)
        self._call(self._event(payment))
        self._call(self._event(payment, amount=payment.amount + 1))

    def _event(self, payment: Payment, *, suffix: str = "", amount: Decimal | None = None) -> bytes:
        event_id = f"evt-{payment.pk}{suffix}-{payment.order}"
        return json.dumps({"id": event_id, "payment": payment.pk, "amount": str(amount or payment.amount)}).encode()

    def _call(self, body: bytes, signature: str = "") -> None:
        response = Client(SERVER_NAME="localhost").post(
            "/payments/webhook/",
            body,
            content_type="application/json",
            headers={SIGNATURE_HEADER: signature or sign(body)},
        )
        if response.status_code in _REFUSALS:
            self._ledger.done(Deed.REFUSED_CALL)
        elif response.status_code != HTTPStatus.OK:
            raise AssertionError(f"the webhook answered {response.status_code}: {response.content!r}")

    def _call_from_a_thread(self, body: bytes) -> None:
        try:
            self._call(body)
        finally:
            connections.close_all()
