"""The mail provider, another company. A real shop would call its HTTP API here.

Its records are in a table, so that the audit can count what it accepted and when it refused. Call it outside of transactions:
a rollback would make the provider forget.
"""

from __future__ import annotations

from demo_shop.notices.models import MailAttempt


class Refused(Exception):
    """The provider does not accept the mail now. A later attempt may succeed."""


def send(order: str, *, idempotency_key: str) -> None:
    """Mail the receipt for an order.

    The provider refuses about every third mail at its first attempt. It accepts one mail per idempotency key; a further call
    with that key succeeds and sends nothing.

    Raises:
        Refused: nothing was sent.
    """
    is_first_attempt = not MailAttempt.objects.filter(idempotency_key=idempotency_key).exists()
    if is_first_attempt and _refused_few():
        MailAttempt.objects.create(order=order, idempotency_key=idempotency_key, accepted=False)
        raise Refused("451 mailbox is busy, try again later")
    MailAttempt.objects.get_or_create(idempotency_key=idempotency_key, accepted=True, defaults={"order": order})


def _refused_few() -> bool:
    """Whether at most one mail was refused for every three accepted. A ratio, so that a short run has a refusal, too."""
    refused = MailAttempt.objects.filter(accepted=False).count()
    return MailAttempt.objects.filter(accepted=True).count() >= 3 * refused
