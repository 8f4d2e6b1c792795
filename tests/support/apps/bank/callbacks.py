from outbox import Answer, checker
from tests.support.apps.bank import SAVINGS
from tests.support.apps.effects.models import Booking


@checker("bank.transfer")
def was_debited(message):
    booking, _ = Booking.objects.using(SAVINGS).get_or_create(transfer=message.biz_id, defaults={"amount": 0})
    return Answer.COMMIT if booking.amount else Answer.ROLLBACK
