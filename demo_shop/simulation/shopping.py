"""Customers and a supplier.

Some customers change their mind: their order is rolled back after it was announced. Some drop a part of it, which is rolled
back to a savepoint. Some cancel their order after the commit, in time or too late. Some browsers submit twice, and some
customers wait for a product that is sold out. Some rate their order, at once or after its shipment.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from queue import Empty, SimpleQueue
from typing import NoReturn

from django.conf import settings
from django.db import transaction

from demo_shop.orders import services as orders
from demo_shop.orders.models import HistoryEntry
from demo_shop.simulation.ledger import Deed, Fate, Ledger
from demo_shop.stock import services as stock

PRODUCTS = {"mug": Decimal("9.90"), "lamp": Decimal("34.50"), "chair": Decimal("119.00")}
CUSTOMERS = 40
PART_SUBMITTED_TWICE = 0.08
PART_RATED = 0.2
PART_RATED_AT_ONCE = 0.3
"""Of the customers who rate; the others wait for the shipment."""
LONGEST_HESITATION = 1.8
"""As a part of the time in which the action is possible; above 1 is too late."""
PART_REGRETTED = 0.1
FEWEST_REGRETTED = 4
PART_IN_STOCK_AT_FIRST = 0.6
SUPPLIER_COMES_AFTER = 0.7
"""Of the shopping time."""
_HANDLERS_OF_ORDER_PLACED = 1


class ChangedMind(Exception):
    """Raised inside a transaction, to roll it back."""


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """One visit to the checkout.

    Attributes:
        at: seconds after opening.
        abandoned: rolled back after everything was written.
        gift: the number of a second order in the same transaction, rolled back to a savepoint; "" for none.
        submitted_twice: announced a second time, in a transaction of its own.
        regretted: cancelled, or tried too late.
        stars: the customer's own rating; 0 for none.
        rated_at_once: the rating does not wait for the shipment.
        hesitation: the delay before an order is cancelled or rated, as a part of the available time.
    """

    at: float
    number: str
    customer: str
    product: str
    quantity: int
    total: Decimal
    abandoned: bool = False
    gift: str = ""
    submitted_twice: bool = False
    regretted: bool = False
    stars: int = 0
    rated_at_once: bool = False
    hesitation: float = 0.0


def plan(run: str, orders: int, seconds: float, rng: random.Random) -> list[Purchase]:
    """This number of orders that commit, evenly over the time, and about a tenth as many abandoned ones."""
    abandoned = max(1, orders // 10)
    fates = [False] * orders + [True] * abandoned
    rng.shuffle(fates)
    lasting = [place for place, is_abandoned in enumerate(fates) if not is_abandoned]
    regretted = rng.sample(lasting, k=min(len(lasting), max(FEWEST_REGRETTED, int(orders * PART_REGRETTED))))
    at_once = set(regretted[::2])
    with_gift = set(rng.sample(range(len(fates)), k=max(1, len(fates) // 10)))
    purchases = []
    for place, is_abandoned in enumerate(fates):
        name = rng.choice(list(PRODUCTS))
        quantity = rng.randint(1, 3)
        purchases.append(
            Purchase(
                at=seconds * place / len(fates),
                number=f"{run}-{place:05}",
                customer=f"{run}-{rng.randrange(CUSTOMERS)}",
                product=f"{run}-{name}",
                quantity=quantity,
                total=quantity * PRODUCTS[name],
                abandoned=is_abandoned,
                gift=f"{run}-{place:05}-gift" if place in with_gift else "",
                submitted_twice=rng.random() < PART_SUBMITTED_TWICE and place not in regretted,
                regretted=place in regretted,
                stars=rng.randint(1, 4) if rng.random() < PART_RATED and place not in regretted else 0,
                rated_at_once=rng.random() < PART_RATED_AT_ONCE,
                hesitation=0.0 if place in at_once else rng.uniform(0, LONGEST_HESITATION),
            )
        )
    return purchases


class Customers:
    """Threads that place the planned orders. The last order waits for `before_the_last`."""

    def __init__(self, purchases: list[Purchase], ledger: Ledger, before_the_last: threading.Event) -> None:
        self._queue: SimpleQueue[Purchase] = SimpleQueue()
        for purchase in purchases:
            self._queue.put(purchase)
        self._ledger = ledger
        *others, last = [purchase for purchase in purchases if not (purchase.abandoned or purchase.regretted)]
        self._last = last if others else None
        self._before_the_last = before_the_last

    def run(self, stop: threading.Event) -> None:
        opened_at = time.monotonic()
        for purchase in self._take():
            if stop.wait(max(0.0, opened_at + purchase.at - time.monotonic())):
                return
            # Other orders trigger the delivery.
            while purchase is self._last and not self._before_the_last.wait(0.1):
                if stop.is_set():
                    return
            if self._buy(purchase):
                self._think_again(purchase, stop)

    def _take(self) -> Iterator[Purchase]:
        while True:
            try:
                yield self._queue.get_nowait()
            except Empty:
                return

    def _buy(self, purchase: Purchase) -> bool:
        """Whether the order was placed in the end."""
        try:
            with transaction.atomic():
                order = orders.place_order(
                    purchase.customer, purchase.product, purchase.quantity, purchase.total, number=purchase.number
                )
                if purchase.gift:
                    self._think_again_about_a_gift(purchase)
                if purchase.abandoned:
                    _change_mind()
        except ChangedMind:
            self._ledger.record(Fate.ROLLED_BACK, purchase.number)
            return False
        self._ledger.record(Fate.COMMITTED, purchase.number)
        if purchase.submitted_twice:
            self._ledger.done(Deed.INJECTED, _HANDLERS_OF_ORDER_PLACED)
            orders.announce(order)
        return True

    def _think_again(self, purchase: Purchase, stop: threading.Event) -> None:
        if purchase.regretted:
            stop.wait(purchase.hesitation * settings.SHOP_TAKE_BACK_WITHIN.total_seconds())
            try:
                orders.take_back(purchase.number)
            except orders.TooLate:
                self._ledger.done(Deed.TOO_LATE)
            else:
                self._ledger.record(Fate.TAKEN_BACK, purchase.number)
        if purchase.stars and purchase.rated_at_once:
            rate(purchase, self._ledger)

    def _think_again_about_a_gift(self, purchase: Purchase) -> None:
        try:
            with transaction.atomic():
                orders.place_order(purchase.customer, purchase.product, 1, purchase.total, number=purchase.gift)
                _change_mind()
        except ChangedMind:
            self._ledger.record(Fate.ROLLED_BACK, purchase.gift)


class Critics:
    """Customers who rate their orders after a delay, some of them after the automatic rating."""

    def __init__(self, purchases: list[Purchase], ledger: Ledger) -> None:
        self._waiting = {purchase.number: purchase for purchase in purchases if purchase.stars and not purchase.rated_at_once}
        self._ledger = ledger

    def run(self, stop: threading.Event) -> None:
        seen_at: dict[str, float] = {}
        while not stop.wait(0.1):
            now = time.monotonic()
            shipped = HistoryEntry.objects.filter(order__number__in=self._waiting, what=HistoryEntry.What.SHIPPED)
            for number in shipped.values_list("order__number", flat=True):
                rated_at = seen_at.setdefault(number, now) + (
                    self._waiting[number].hesitation * settings.SHOP_RATE_AFTER.total_seconds()
                )
                if now >= rated_at:
                    rate(self._waiting.pop(number), self._ledger)


def rate(purchase: Purchase, ledger: Ledger) -> None:
    """Rate as the customer, and record it if the rating was accepted."""
    try:
        orders.rate(purchase.number, purchase.stars)
    except orders.AlreadyRated:
        return
    ledger.record(Fate.RATED, purchase.number)


def _change_mind() -> NoReturn:
    raise ChangedMind


class Supplier:
    """Delivers a part of the goods before opening, and the rest when customers already wait for them."""

    def __init__(self, purchases: list[Purchase], seconds: float, ledger: Ledger) -> None:
        self._wanted: Counter[str] = Counter()
        for purchase in purchases:
            self._wanted[purchase.product] += purchase.quantity
        self._comes_after = seconds * SUPPLIER_COMES_AFTER
        self._ledger = ledger

    def fill_shelves(self) -> None:
        for product, wanted in self._wanted.items():
            stock.deliver(product, int(wanted * PART_IN_STOCK_AT_FIRST))

    def run(self, stop: threading.Event) -> None:
        stop.wait(self._comes_after)
        for product, wanted in self._wanted.items():
            stock.deliver(product, wanted - int(wanted * PART_IN_STOCK_AT_FIRST))
        self._ledger.news.append("delivery: products that were sold out are available again")
