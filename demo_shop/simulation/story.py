"""From opening to audit: start the processes and the threads, wait until nothing is left to do, end the processes, count."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby

from django.conf import settings
from django.db import connection, connections
from rich.console import Console

from demo_shop.banks.customer import SAVED_AT_FIRST
from demo_shop.banks.services import open_accounts
from demo_shop.simulation import census, fleet, shopping
from demo_shop.simulation.audit import (
    MOVEMENT,
    PAID,
    PAYMENT,
    RECEIPT,
    REPORTED,
    REVIEW_REQUEST,
    SHIPMENT,
    SHIPPED,
    SMS,
    Audit,
    Facts,
    audit,
)
from demo_shop.simulation.copies import Copier
from demo_shop.simulation.fleet import Fleet
from demo_shop.simulation.ledger import Ledger
from demo_shop.simulation.provider import Provider
from demo_shop.simulation.screen import Screen

_SECONDS_PER_KILL = 2.0
_SHORTEST_DAY_SECONDS = 5.0
_LOOK_EVERY_SECONDS = 0.4
_PART_OF_A_PROCESSOR_FOR_LOOKING = 0.1
"""At most, because the observer shares the machine with the processes."""
_MOST_BAD_ENDS = 3
_OTHER_PEOPLE = 5
"""The supplier, the killer, the provider, the critics and the copier."""
_CHAIN = (MOVEMENT, PAYMENT, PAID, RECEIPT, SHIPMENT, SHIPPED, SMS, REVIEW_REQUEST, REPORTED)
"""When one order has had all of these, the queues of all copied topics exist."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run.

    Attributes:
        orders: the number of orders to place and commit.
        threads: customers at the checkout at the same time.
        kills: processes to be killed.
        seed: the same seed plans the same purchases; the timing depends on the machine.
        timeout_seconds: the run fails after this time without progress. Its total duration depends on the machine.
    """

    orders: int
    threads: int
    kills: int
    seed: int
    timeout_seconds: float

    @property
    def seconds(self) -> float:
        """The duration of shopping, so that every kill interrupts work."""
        return max(_SHORTEST_DAY_SECONDS, _SECONDS_PER_KILL * self.kills)


class NoProgress(Exception):
    """The run makes no progress and is not finished, or the processes end as soon as they begin."""


def run(options: Options, console: Console) -> Audit:
    """Run the demo and audit it.

    Raises:
        Exception: the first error of a thread of the simulation.
    """
    ledger = Ledger(f"run{random.SystemRandom().randrange(16**6):06x}")
    screen = Screen(console, ledger)
    _introduce(options, ledger, screen)
    open_accounts(ledger.run, SAVED_AT_FIRST)
    unfinished: list[str] = []
    with fleet.running(ledger, _commands()) as processes:
        day = _Day(options, ledger, screen, processes)
        with screen.drawing():
            try:
                day.run_until_finished()
            except NoProgress:
                unfinished = list(_missing(day.look()))
            processes.end()
            facts = day.look()
            screen.show(facts, processes.workers, last=True)
    result = audit(replace(facts, unfinished=tuple(unfinished), bad_ends=tuple(processes.bad_ends)))
    screen.show_audit(result)
    python = os.path.relpath(sys.executable)
    # `runserver` serves no stylesheet without DEBUG, which the processes of the demo do not have.
    screen.say(
        f"Its messages are in the admin, at http://127.0.0.1:8000/admin/, after\n    {python} manage.py createsuperuser\n"
        f"    DEBUG=1 {python} manage.py runserver"
    )
    if result.passed:
        processes.forget_logs()
    else:
        screen.say(f"The output of the processes is in {processes.directory}.")
    return result


class _Day:
    """The threads of one run."""

    def __init__(self, options: Options, ledger: Ledger, screen: Screen, processes: Fleet) -> None:
        self._options = options
        self._ledger = ledger
        self._screen = screen
        self._processes = processes
        self._chain_is_proven = threading.Event()
        self._copier_listens = threading.Event()
        if census.is_local():
            self._copier_listens.set()  # there is no copier
        purchases = shopping.plan(ledger.run, options.orders, options.seconds, random.Random(options.seed))
        self._supplier = shopping.Supplier(purchases, options.seconds, ledger)
        self._critics = shopping.Critics(purchases, ledger)
        self._customers = shopping.Customers(purchases, ledger, self._copier_listens)

    def run_until_finished(self) -> None:
        """Raises NoProgress."""
        happened, happened_at = 0, time.monotonic()
        stop, closing = threading.Event(), threading.Event()
        self._supplier.fill_shelves()
        with _threads(self._options.threads + _OTHER_PEOPLE, stop, closing) as start:
            visitors = [start(self._customers.run, stop) for _ in range(self._options.threads)]
            visitors += [start(self._supplier.run, stop), start(self._kill_some, stop)]
            residents = [start(Provider(self._ledger).run, closing), start(self._critics.run, closing)]
            residents += self._start_copier(start, closing)
            while True:
                all_have_ended = all(future.done() for future in [*visitors, *residents])
                worked_before = time.thread_time()
                self._processes.mend()
                facts = self._look_and_show()
                _raise_failures([*visitors, *residents])
                if all(future.done() for future in visitors):
                    if facts.transfers.given_up and facts.transfers.deposited:
                        self._processes.end(fleet.TRANSFERS)
                    if not any(_missing(facts)):
                        # Nothing is left to do. That is final when no thread can send another copy.
                        closing.set()
                        if all_have_ended:
                            return
                if _happened(facts) > happened:
                    happened, happened_at = _happened(facts), time.monotonic()
                timed_out = time.monotonic() > happened_at + self._options.timeout_seconds
                if timed_out or len(self._processes.bad_ends) > _MOST_BAD_ENDS:
                    raise NoProgress
                worked = time.thread_time() - worked_before
                stop.wait(max(_LOOK_EVERY_SECONDS, worked / _PART_OF_A_PROCESSOR_FOR_LOOKING))

    def look(self) -> Facts:
        return census.take(
            self._ledger, self._processes.results(), wanted=self._options.orders, kills_wanted=self._options.kills
        )

    def _look_and_show(self) -> Facts:
        facts = self.look()
        self._screen.show(facts, self._processes.workers)
        if any(all(order in facts.effects[effect] for effect in _CHAIN) for order in facts.committed):
            self._chain_is_proven.set()
        return facts

    def _kill_some(self, stop: threading.Event) -> None:
        self._processes.kill_some(self._options.kills, random.Random(self._options.seed), stop)

    def _start_copier(self, start: Callable[..., Future[None]], stop: threading.Event) -> Iterator[Future[None]]:
        if not census.is_local():
            copier = Copier(
                str(settings.OUTBOX["BROKER_URL"]),
                str(settings.OUTBOX["EXCHANGE"]),
                self._ledger,
                random.Random(self._options.seed),
            )
            yield start(copier.run, stop, self._chain_is_proven, self._copier_listens)


def _commands() -> dict[str, int]:
    """With a broker, two of each; without one a relay runs handlers as well, and one consumer beside it is enough."""
    count = 1 if census.is_local() else 2
    return {"outbox_relay": count, "inbox_consume": count}


def _introduce(options: Options, ledger: Ledger, screen: Screen) -> None:
    minute = settings.DEMO_MINUTE / timedelta(milliseconds=1)
    broker = "no broker (local://)" if census.is_local() else "a broker"
    plan = f"{options.orders} orders by {options.threads} threads, {options.kills} kills, seed {options.seed}"
    screen.say(f"{ledger.run}: {plan}.")
    screen.say(f"{connection.display_name}, {broker}. A minute lasts {minute:.0f} ms:")
    screen.say(f"  SMS              {_seconds(settings.SHOP_SMS_AFTER)} after the order (20 minutes)")
    screen.say(f"  review request   {_seconds(settings.SHOP_REVIEW_AFTER)} after the order (1 hour)")
    screen.say(f"  rating           {_seconds(settings.SHOP_RATE_AFTER)} after the shipment (for 48 hours)")
    screen.say(f"  refused receipt  {_seconds(settings.SHOP_MAIL_RETRY_AFTER)} until it is mailed again (for 10 minutes)")
    screen.say("The data of earlier runs stay in the database and are not counted.")


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():.1f} s"


@contextmanager
def _threads(count: int, *stops: threading.Event) -> Iterator[Callable[..., Future[None]]]:
    """Start functions on threads of their own, which are asked to stop at the end of the block."""

    def run(function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(max_workers=count) as pool:

        def start(function: Callable[..., None], *arguments: object) -> Future[None]:
            return pool.submit(run, function, *arguments)

        try:
            yield start
        finally:
            for stop in stops:
                stop.set()


def _raise_failures(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        if future.done():
            future.result()


def _happened(facts: Facts) -> int:
    """A count that only grows, to detect progress."""
    transfers = facts.transfers
    counted = [facts.committed, transfers.withdrawn, transfers.deposited, *facts.effects.values()]
    return sum(map(len, counted)) + facts.kills + facts.traffic.suppressed + transfers.given_up


def _missing(facts: Facts) -> Iterator[str]:
    """What must still happen before the run is finished, in words."""
    if len(facts.committed) < facts.wanted:
        yield f"{facts.wanted - len(facts.committed)} orders are not placed"
    if facts.kills < facts.kills_wanted:
        yield f"{facts.kills_wanted - facts.kills} kills have not fired"
    if not facts.transfers.given_up:
        yield "no transfer has been given up by the checker"
    if not facts.transfers.deposited:
        yield "no transfer has arrived"
    for effect, findings in groupby(audit(facts).lost, key=lambda finding: finding.effect):
        orders = [finding.order for finding in findings]
        yield f"{effect} of {len(orders)} orders are missing, {orders[0]} first"
    for where, count in facts.traffic.open.items():
        yield f"{count} messages are still in the {where}"
    if facts.traffic.suppressed < facts.injected:
        yield f"{facts.injected - facts.traffic.suppressed} duplicates have not arrived"
