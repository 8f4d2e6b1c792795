"""Count what happened, from the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from django.apps import apps
from django.conf import settings
from django.db.models import Sum

from demo_shop.banks import customer
from demo_shop.banks.models import Deposit, GiroAccount, SavingsAccount, Withdrawal
from demo_shop.notices.models import MailAttempt, Notice
from demo_shop.orders.models import HistoryEntry, Order, Rating
from demo_shop.payments.models import Payment
from demo_shop.simulation import audit
from demo_shop.simulation.audit import Facts, Traffic, Transfers
from demo_shop.simulation.ledger import Deed, Fate, Ledger
from demo_shop.stock.models import Product, Shipment, StockMovement

What = HistoryEntry.What
_HISTORY = {
    audit.PAID: What.PAID,
    audit.SHIPPED: What.SHIPPED,
    audit.RATING_CLOSED: What.RATING_CLOSED,
    audit.REPORTED: What.REPORTED,
}
_NOTICES = {audit.SMS: Notice.Kind.SMS, audit.REVIEW_REQUEST: Notice.Kind.REVIEW_REQUEST}
_REMINDER = (What.REMINDED, What.REMINDER_SPARED)


def is_local() -> bool:
    """Does the shop run without a broker?"""
    return str(settings.OUTBOX["BROKER_URL"]).startswith("local://")


def _traffic(run: str) -> Traffic:
    """The models are asked for by name: the shop imports public names only."""
    outbox = apps.get_model("outbox", "OutboxMessage").objects.filter(biz_id__contains=run)
    inbox = apps.get_model("inbox", "InboxMessage").objects.filter(biz_id__contains=run)
    sent = list(outbox.values_list("state", "biz_id"))
    received = list(inbox.values_list("state", "biz_id", "duplicates", "conflicts"))
    biz_ids = [biz_id for state, biz_id in sent if state != "cancelled"] + [biz_id for _, biz_id, *_ in received]
    of_orders = [biz_id for biz_id in biz_ids if not biz_id.startswith("transfer-")]
    return Traffic(
        outbox=Counter(state for state, _ in sent),
        inbox=Counter(state for state, *_ in received),
        messages=Counter(run + biz_id.partition(run)[2] for biz_id in of_orders),
        suppressed=sum(duplicates for *_, duplicates, _ in received),
        contradictions=sum(conflicts for *_, conflicts in received),
    )


def take(ledger: Ledger, results: Mapping[str, frozenset[str]], *, wanted: int, kills_wanted: int) -> Facts:
    """Everything that can be counted now.

    Args:
        results: the transfers by the result that their customers printed, SENT or REFUSED.

    While customers are still active, an order may be in the tables and not yet in their records, and look like a
    ghost. The audited count is taken after all customers have ended.
    """
    return Facts(
        wanted=wanted,
        traffic=_traffic(ledger.run),
        effects=_effects(ledger.run),
        committed=ledger.orders(Fate.COMMITTED),
        rolled_back=ledger.orders(Fate.ROLLED_BACK),
        taken_back=ledger.orders(Fate.TAKEN_BACK),
        rated=ledger.orders(Fate.RATED),
        rated_by_itself=_rated_by_itself(ledger.run),
        lateness=_lateness(ledger.run),
        transfers=_transfers(ledger.run, results),
        stock_differences=_stock_differences(ledger.run),
        injected=ledger.count(Deed.INJECTED),
        copied=None if is_local() else ledger.count(Deed.COPIED),
        repeated_calls=ledger.count(Deed.REPEATED_CALL),
        forged_calls=ledger.count(Deed.FORGED_CALL),
        contradicting_calls=ledger.count(Deed.CONTRADICTING_CALL),
        refused_calls=ledger.count(Deed.REFUSED_CALL),
        too_late=ledger.count(Deed.TOO_LATE),
        kills_wanted=kills_wanted,
        kills=ledger.count(Deed.KILL),
    )


def _effects(run: str) -> dict[str, dict[str, int]]:
    history = HistoryEntry.objects.filter(order__number__startswith=run)
    notices = Notice.objects.filter(order__startswith=run)
    return {
        audit.ORDER: _by_order(Order.objects.filter(number__startswith=run).values_list("number")),
        audit.MOVEMENT: _by_order(StockMovement.objects.filter(order__startswith=run).values_list("order")),
        audit.PAYMENT: _by_order(Payment.objects.filter(order__startswith=run).values_list("order")),
        audit.SHIPMENT: _by_order(Shipment.objects.filter(order__startswith=run).values_list("order")),
        audit.RECEIPT: _by_order(MailAttempt.objects.filter(order__startswith=run, accepted=True).values_list("order")),
        **{effect: _by_order(notices.filter(kind=kind).values_list("order")) for effect, kind in _NOTICES.items()},
        audit.REMINDER: _by_order(history.filter(what__in=_REMINDER).values_list("order__number")),
        audit.RATING: _by_order(Rating.objects.filter(order__number__startswith=run).values_list("order__number")),
        **{effect: _by_order(history.filter(what=what).values_list("order__number")) for effect, what in _HISTORY.items()},
    }


def _by_order(numbers: Iterable[tuple[str]]) -> dict[str, int]:
    return Counter(number for (number,) in numbers)


def _rated_by_itself(run: str) -> frozenset[str]:
    ratings = Rating.objects.filter(order__number__startswith=run, by_itself=True)
    return frozenset(ratings.values_list("order__number", flat=True))


def _lateness(run: str) -> dict[str, dict[str, timedelta]]:
    """Each delay counts from the row that begins it; nothing is read from the outbox."""
    placed = dict(Order.objects.filter(number__startswith=run).values_list("number", "placed_at"))
    history = HistoryEntry.objects.filter(order__number__startswith=run)
    shipped = dict(history.filter(what=What.SHIPPED).values_list("order__number", "at"))
    reminded = history.filter(what=What.REMINDED).values_list("order__number", "at")
    rated = Rating.objects.filter(order__number__startswith=run, by_itself=True).values_list("order__number", "given_at")
    reserved = StockMovement.objects.filter(order__startswith=run).values_list("order", "at")
    notices = Notice.objects.filter(order__startswith=run).values_list("order", "sent_at")
    attempts = MailAttempt.objects.filter(order__startswith=run).order_by("at").values_list("order", "at")
    refused = dict(attempts.filter(accepted=False))
    return {
        audit.MOVEMENT: _since(placed, settings.SHOP_TAKE_BACK_WITHIN, reserved),
        audit.SMS: _since(placed, settings.SHOP_SMS_AFTER, notices.filter(kind=_NOTICES[audit.SMS])),
        audit.REMINDER: _since(placed, settings.SHOP_UNPAID_AFTER, reminded),
        audit.REVIEW_REQUEST: _since(placed, settings.SHOP_REVIEW_AFTER, notices.filter(kind=_NOTICES[audit.REVIEW_REQUEST])),
        audit.RECEIPT: _since(refused, settings.SHOP_MAIL_RETRY_AFTER, attempts.filter(accepted=True)),
        audit.RATING: _since(shipped, settings.SHOP_RATE_AFTER, rated),
    }


def _since(begun: Mapping[str, datetime], span: timedelta, effects: Iterable[tuple[str, datetime]]) -> dict[str, timedelta]:
    """How late each effect was. An effect without its first row is a ghost, and is reported as one."""
    late: dict[str, timedelta] = {}
    for order, at in effects:
        if order in begun:
            late[order] = min(at - begun[order] - span, late.get(order, timedelta.max))
    return late


def _transfers(run: str, results: Mapping[str, frozenset[str]]) -> Transfers:
    # The deposits first: each of them was withdrawn before the withdrawals are read.
    deposited = _by_order(Deposit.objects.filter(transfer__startswith=run).values_list("transfer"))
    withdrawals = Withdrawal.objects.filter(transfer__startswith=run)
    balances = [
        *GiroAccount.objects.filter(holder=run).values_list("balance", flat=True),
        *SavingsAccount.objects.filter(holder=run).values_list("balance", flat=True),
    ]
    return Transfers(
        sent=results[customer.SENT],
        refused=results[customer.REFUSED],
        withdrawn=_by_order(withdrawals.filter(amount__gt=0).values_list("transfer")),
        deposited=deposited,
        given_up=withdrawals.filter(amount=0).count(),
        money_missing=customer.SAVED_AT_FIRST - sum(balances),
    )


def _stock_differences(run: str) -> dict[str, int]:
    moved = Product.objects.filter(sku__startswith=run).annotate(moved=Sum("movements__quantity"))
    return {product.sku: product.quantity - product.moved for product in moved if product.quantity != product.moved}
