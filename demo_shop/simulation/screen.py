"""The output while the demo runs, and the table at its end.

A terminal shows a display that is redrawn; other outputs get about one line per second, for logs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from demo_shop.simulation import audit
from demo_shop.simulation.audit import Audit, Facts, Finding
from demo_shop.simulation.fleet import Worker
from demo_shop.simulation.ledger import Ledger

_LINES_OF_NEWS = 6
_LINES_OF_NEWS_IF_NARROW = 3
_HEIGHT = 16
_NARROW, _WIDE = 80, 118
_SECONDS_BETWEEN_LINES = 1.0
_SHOWN_FINDINGS = 10
_STYLE_OF_STATE = {"published": "green", "done": "green", "dead": "bold red"}
_STAGES = (
    (audit.MOVEMENT, "reserved"),
    (audit.PAYMENT, "payments"),
    (audit.PAID, "paid"),
    (audit.RECEIPT, "receipts"),
    (audit.SHIPMENT, "parcels"),
    (audit.SHIPPED, "shipped"),
    (audit.SMS, "SMS"),
    (audit.REVIEW_REQUEST, "reviews"),
    (audit.RATING, "rated"),
    (audit.REPORTED, "reported"),
)


class Screen:
    """Shows one run on `console`."""

    def __init__(self, console: Console, ledger: Ledger) -> None:
        self._console = console
        self._ledger = ledger
        self._began_at = time.monotonic()
        self._live: Live | None = None
        self._line_at = 0.0
        self._told = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False) as self._live:
            yield
        self._live = None
        self._told = len(self._ledger.news)

    def say(self, text: str) -> None:
        # A terminal breaks lines between words; a log has whole lines.
        self._console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)

    def show(self, facts: Facts, workers: Sequence[Worker], *, last: bool = False) -> None:
        if self._live is not None:
            self._live.update(self._picture(facts, workers), refresh=True)
        elif last or time.monotonic() - self._line_at >= _SECONDS_BETWEEN_LINES:
            self._line_at = time.monotonic()
            self._print_news()
            self.say(self._line(facts))

    def show_audit(self, result: Audit) -> None:
        self._print_news()
        self._console.print(_audit_table(result))
        for problem in result.problems:
            self._console.print(Text(f"✗ {problem}", style="red"), soft_wrap=True)
        for early in result.early[:_SHOWN_FINDINGS]:
            text = f"✗ early: {early.effect} of {early.order}, by {early.seconds:.3f} s"
            self._console.print(Text(text, style="red"), soft_wrap=True)
        for name, findings in (("lost", result.lost), ("doubled", result.doubled), ("without an order", result.ghosts)):
            self._print_findings(name, findings)
        verdict, style = ("passed", "bold green") if result.passed else ("FAILED", "bold red")
        self._console.print(Text(f"Audit {verdict} after {self._seconds:.1f} s.", style=style))

    def _picture(self, facts: Facts, workers: Sequence[Worker]) -> RenderableType:
        first = (
            Panel(self._shop(facts), title=f"shop, open for {self._seconds:.0f} s", width=44, height=_HEIGHT),
            Panel(_messages(facts), title="messages", width=34, height=_HEIGHT),
        )
        title = f"processes, {facts.kills} killed"
        if self._console.width >= _WIDE:
            third = Panel(_processes(workers, abreast=1), title=title, width=36, height=_HEIGHT)
            return Group(Columns((*first, third), padding=(0, 1)), self._news(_LINES_OF_NEWS))
        third = Panel(_processes(workers, abreast=2), title=title, width=_NARROW - 1)
        return Group(Columns(first, padding=(0, 1)), third, self._news(_LINES_OF_NEWS_IF_NARROW))

    def _news(self, lines: int) -> Text:
        return Text("\n".join(list(self._ledger.news)[-lines:]), style="dim", no_wrap=True, overflow="ellipsis")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began_at

    def _shop(self, facts: Facts) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("placed", _bar(len(facts.committed), facts.wanted), _share(len(facts.committed), facts.wanted))
        for effect, name in _STAGES:
            done, kept = len(facts.effects[effect]), facts.wanted - len(facts.taken_back)
            grid.add_row(name, _bar(done, kept), _share(done, kept))
        grid.add_row("transfers", Text("between two banks", style="dim"), str(len(facts.transfers.deposited)))
        grid.add_row("rolled back", Text("on purpose", style="dim"), str(len(facts.rolled_back)))
        grid.add_row("cancelled", Text("after the commit", style="dim"), str(len(facts.taken_back)))
        return grid

    def _line(self, facts: Facts) -> str:
        stages = "  ".join(f"{name} {len(facts.effects[effect])}" for effect, name in _STAGES)
        on_its_way = sum(facts.traffic.open.values())
        return (
            f"{self._seconds:5.1f} s  placed {len(facts.committed)}/{facts.wanted} "
            f"(rolled back {len(facts.rolled_back)}, cancelled {len(facts.taken_back)})  {stages}  open {on_its_way}  "
            f"transfers {len(facts.transfers.deposited)}  "
            f"suppressed {facts.traffic.suppressed} (injected {facts.injected})  kills {facts.kills}"
        )

    def _print_news(self) -> None:
        news = list(self._ledger.news)
        for line in news[self._told :]:
            self._console.print(Text(f"         {line}", style="dim"))
        self._told = len(news)

    def _print_findings(self, name: str, findings: Sequence[Finding]) -> None:
        for finding in findings[:_SHOWN_FINDINGS]:
            self._console.print(
                Text(f"✗ {name}: {finding.effect} of {finding.order}, counted {finding.count}", style="red"), soft_wrap=True
            )
        if len(findings) > _SHOWN_FINDINGS:
            self._console.print(Text(f"  … and {len(findings) - _SHOWN_FINDINGS} more", style="red"))


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=min(done, total), width=20)


def _share(done: int, total: int) -> str:
    return f"{done}/{total}"


def _messages(facts: Facts) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column()
    grid.add_column(justify="right")
    for table, states, shown in (
        ("outbox", facts.traffic.outbox, ("prepared", "scheduled", "ready", "published")),
        ("inbox", facts.traffic.inbox, ("received", "retrying", "done")),
    ):
        for state in (*shown, *sorted(set(states) - set(shown))):
            grid.add_row(f"{table} {state}", str(states.get(state, 0)), style=_STYLE_OF_STATE.get(state, "yellow"))
    grid.add_row("duplicates injected", str(facts.injected), style="dim")
    grid.add_row("duplicates suppressed", str(facts.traffic.suppressed), style="bold")
    return grid


def _processes(workers: Sequence[Worker], *, abreast: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    for _ in range(3 * abreast):
        grid.add_column()
    for begin in range(0, len(workers), abreast):
        grid.add_row(*(cell for worker in workers[begin : begin + abreast] for cell in _process(worker)))
    return grid


def _process(worker: Worker) -> tuple[RenderableType, ...]:
    pid = f"pid {worker.process.pid}" if worker.process else "ended"
    return worker.name, pid, Text("†" * worker.kills, style="red")


def _audit_table(result: Audit) -> Table:
    facts = result.facts
    table = Table(box=SIMPLE_HEAD, title="Audit", title_justify="left", title_style="bold")
    table.add_column("counted")
    table.add_column("", justify="right")
    table.add_column("must be")
    ordered = len(facts.committed)
    by_effect = Counter(finding.effect for finding in (*result.lost, *result.doubled, *result.ghosts))
    table.add_row("orders committed", str(ordered), _must(f"{facts.wanted}", ordered == facts.wanted))
    table.add_row("orders rolled back", str(len(facts.rolled_back)), _must("some", bool(facts.rolled_back)))
    table.add_row("orders cancelled", str(len(facts.taken_back)), _must("some", bool(facts.taken_back)))
    table.add_row("… and too late for that", str(facts.too_late), "")
    for effect in audit.EFFECTS[1:]:
        table.add_row(effect, str(result.total(effect)), _must("one for each order kept", not by_effect[effect]))
        if effect == audit.RECEIPT:
            table.add_row("… refused at first", str(facts.receipts_retried), _must("some", bool(facts.receipts_retried)))
        if effect == audit.RATING:
            table.add_row("… given by customers", str(len(facts.rated)), "")
    table.add_section()
    table.add_row("duplicates injected", str(facts.injected), _must("some", bool(facts.injected)))
    if facts.copied is not None:
        table.add_row("… by copying on the broker", str(facts.copied), _must("some", bool(facts.copied)))
    enough = facts.traffic.suppressed >= facts.injected
    table.add_row("duplicates suppressed", str(facts.traffic.suppressed), _must("no fewer than that", enough))
    table.add_row("webhook calls repeated", str(facts.repeated_calls), "")
    refusable = facts.forged_calls + facts.contradicting_calls
    table.add_row("webhook calls refused", str(facts.refused_calls), _must(str(refusable), facts.refused_calls == refusable))
    all_fired = facts.kills == facts.kills_wanted
    table.add_row("processes killed", str(facts.kills), _must(str(facts.kills_wanted), all_fired))
    table.add_section()
    transfers = facts.transfers
    table.add_row("money withdrawn at one bank", str(len(transfers.withdrawn)), _must("some", bool(transfers.withdrawn)))
    both = not (by_effect[audit.WITHDRAWAL] or by_effect[audit.DEPOSIT])
    table.add_row("money deposited at the other", str(sum(transfers.deposited.values())), _must("the same transfers", both))
    table.add_row("transfers given up by the checker", str(transfers.given_up), _must("some", bool(transfers.given_up)))
    table.add_row("money missing", str(transfers.money_missing), _must("0", not transfers.money_missing))
    table.add_section()
    table.add_row("dead letters", str(facts.traffic.dead), _must("0", not facts.traffic.dead))
    table.add_section()
    table.add_row("lost effects", str(len(result.lost)), _must("0", not result.lost), style="bold")
    table.add_row("doubled effects", str(len(result.doubled)), _must("0", not result.doubled), style="bold")
    table.add_row("effects without an order", str(len(result.ghosts)), _must("0", not result.ghosts), style="bold")
    table.add_row("early effects", str(len(result.early)), _must("0", not result.early), style="bold")
    return table


def _must(text: str, is_so: bool) -> Text:
    return Text(f"{'✓' if is_so else '✗'} {text}", style="green" if is_so else "red")
