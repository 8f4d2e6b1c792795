"""The checker: was a transfer made whose process has died or lost its connection?"""

from __future__ import annotations

from demo_shop.banks.services import TRANSFER, was_withdrawn
from outbox import Answer, UndecidedMessage, checker


@checker(TRANSFER)
def check_transfer(message: UndecidedMessage) -> Answer:
    return Answer.COMMIT if was_withdrawn(message.payload["transfer"]) else Answer.ROLLBACK
