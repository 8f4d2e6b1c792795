"""Send notices to customers. A delayed message arrives when it is due; a mail that is refused is sent again later."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings

from demo_shop.notices import mail_provider
from demo_shop.notices.models import Notice
from inbox import Lease, Message, RetryLater, idempotent_handler, leased_handler


@idempotent_handler("shop.order.sms_due")
def send_sms(message: Message) -> None:
    Notice.objects.create(kind=Notice.Kind.SMS, order=message.payload["order"], customer=message.payload["customer"])


@idempotent_handler("shop.order.review_due")
def ask_for_review(message: Message) -> None:
    kind = Notice.Kind.REVIEW_REQUEST
    Notice.objects.create(kind=kind, order=message.payload["order"], customer=message.payload["customer"])


# A mail is a call to another company, so it is made under a lease and outside of any transaction. The lease is short because
# the demo kills processes and the messages they hold wait for its end. It is longer than SHOP_MAIL_RETRY_AFTER, because a
# process may be killed after a refusal and before the inbox has stored when to retry.
@leased_handler("payment.received", lease=Lease(duration=timedelta(seconds=4)))
def mail_receipt(message: Message) -> None:
    try:
        mail_provider.send(message.payload["order"], idempotency_key=message.id)
    except mail_provider.Refused as error:
        raise RetryLater(settings.SHOP_MAIL_RETRY_AFTER, str(error)) from error
