"""Alerts as operators see them, and the conditions that both halves have; see `upkeep.alerting`."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet

from exactly_once.conf.app_options import AlertOptions
from exactly_once.console.display import duration
from exactly_once.half import Key
from exactly_once.models import Alert
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.heartbeat_table import is_ahead, long_runs, lost
from exactly_once.upkeep.minutes import LATELY, Minutes
from exactly_once.wire.text import NAME_LENGTH

PAUSED_TOO_LONG = timedelta(hours=1)


def raised(alias: str) -> QuerySet[Any]:
    """The raised alerts of all apps, the latest first, annotated with `database_now`."""
    rows: QuerySet[Any] = Alert.objects.using(alias).annotate(database_now=DatabaseTime())
    return rows.filter(state=Alert.State.RAISED).order_by("-raised_at", "-id")


def acknowledge(alias: str, pk: int, by: str) -> str | None:
    """Record that an operator knows of a raised alert; its app. None: it is not raised, or acknowledged already."""
    rows = Alert.objects.using(alias).filter(pk=pk, state=Alert.State.RAISED, acknowledged_at=None)
    app = rows.values_list("app", flat=True).first()
    return app if rows.update(acknowledged_by=by[:NAME_LENGTH], acknowledged_at=DatabaseTime()) else None


def silent(rows: Iterable[Any]) -> Iterator[tuple[Key, str]]:
    """The condition of the processes that are `lost`, of the rows of an app."""
    for process in lost(rows):
        since = f"It has sent no heartbeat for {duration(process.database_now - process.beat_at)}"
        if is_ahead(process):
            since = "It has sent no heartbeat since the database's clock was ahead"
        words = f"{since}: it was killed, is frozen, or cannot reach the database. Look into its log."
        yield ("silent", str(process)), words


def window(options: AlertOptions) -> timedelta:
    """How long a new dead letter or conflict is reported. An alert needs several evaluations in a row."""
    return max(LATELY, 3 * options.EVERY)


def failing(minutes: Minutes, alias: str, known: Collection[str], succeeded: str, *failed: str) -> Iterator[tuple[Key, str]]:
    """The condition of the handlers or topics of an app whose attempts fail, except the `known` ones."""
    for name, (failures, attempts) in minutes.failing_lately(alias, succeeded, failed).items():
        if name not in known:
            words = f"Of {attempts:,} attempts within {duration(LATELY)}, {failures:,} have failed. See its last errors."
            yield ("failing", name), words


@dataclass
class Hanging:
    """Runs of one handler, callback or checker that last longer than usual.

    Attributes:
        lasts: the longest of them.
        messages: those that they run, the oldest of each process first.
        threads: of the processes that they are in: how many may run this.
        fills: do they occupy all of these threads in one of the processes, so that its other messages wait there?
        blocks: does a message wait behind one of them in the order of its key?
    """

    lasts: timedelta = timedelta()
    messages: list[str] = field(default_factory=list)
    threads: int = 0
    processes: list[str] = field(default_factory=list)
    fills: bool = False
    blocks: bool = False


def hanging(processes: Iterable[Any], limit: timedelta) -> dict[str, Hanging]:
    """By name, the runs that have lasted longer than `limit`, as the heartbeats say. A pass of the relay has no name."""
    found: dict[str, Hanging] = {}
    for process in processes:
        for name, lasted in long_runs(process, limit).items():
            if name:
                one, threads = found.setdefault(name, Hanging()), process.facts.get("threads", {}).get(name, len(lasted))
                one.lasts, one.threads = max(one.lasts, *lasted), one.threads + threads
                one.fills = one.fills or len(lasted) >= threads
                one.processes.append(str(process))
                one.messages += [run["message"] for run in process.running if run["what"] == name][: len(lasted)]
    return found
