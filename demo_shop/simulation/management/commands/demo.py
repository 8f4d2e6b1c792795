from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.migrations.executor import MigrationExecutor
from rich.console import Console

from demo_shop.simulation.audit import EFFECTS, Audit
from demo_shop.simulation.story import Options, run


class Command(BaseCommand):
    help = "Simulate customers of the demo shop, kill its processes, and audit the result."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--orders", type=_positive, default=200, help="orders to place (default: %(default)s)")
        parser.add_argument("--threads", type=_positive, default=4, help="customers at once (default: %(default)s)")
        kills = parser.add_mutually_exclusive_group()
        kills.add_argument("--kills", type=_count, default=6, help="processes to kill -9 (default: %(default)s)")
        kills.add_argument("--no-kills", action="store_const", const=0, dest="kills", help="kill none")
        parser.add_argument("--seed", type=int, help="plans the same purchases again (default: a new one)")
        parser.add_argument(
            "--timeout",
            type=float,
            default=60.0,
            help="fail after this number of seconds without progress (default: %(default)s)",
        )
        parser.add_argument("--json", action="store_true", help="print the audit as one JSON line, progress to stderr")

    def handle(self, *args: Any, **options: Any) -> None:
        _require_tables()
        seed = random.randrange(10**6) if options["seed"] is None else options["seed"]
        wanted = Options(
            orders=options["orders"],
            threads=options["threads"],
            kills=options["kills"],
            seed=seed,
            timeout_seconds=options["timeout"],
        )
        try:
            result = run(wanted, Console(stderr=options["json"]))
        except KeyboardInterrupt:
            raise CommandError("Interrupted, and the processes are ended; nothing was audited.", returncode=130) from None
        if options["json"]:
            self.stdout.write(json.dumps(_as_json(result)))
        if not result.passed:
            sys.exit(1)


def _positive(text: str) -> int:
    number = _count(text)
    if not number:
        raise ValueError
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def _require_tables() -> None:
    for alias in connections:
        executor = MigrationExecutor(connections[alias])
        if executor.migration_plan(executor.loader.graph.leaf_nodes()):
            option = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
            raise CommandError(
                f"The database {alias!r} is not migrated: run `python manage.py migrate{option}` first, or `make demo`."
            )


def _as_json(result: Audit) -> dict[str, Any]:
    facts = result.facts
    return {
        "passed": result.passed,
        "orders": len(facts.committed),
        "rolled_back": len(facts.rolled_back),
        "taken_back": len(facts.taken_back),
        "came_too_late_to_take_back": facts.too_late,
        "rated_by_customers": len(facts.rated),
        "receipts_refused_at_first": facts.receipts_retried,
        "effects": {effect: result.total(effect) for effect in EFFECTS},
        "duplicates_injected": facts.injected,
        "copied_on_the_broker": facts.copied,
        "duplicates_suppressed": facts.traffic.suppressed,
        "webhook_calls_repeated": facts.repeated_calls,
        "webhook_calls_refused": facts.refused_calls,
        "transfers": {
            "sent": len(facts.transfers.sent),
            "refused": len(facts.transfers.refused),
            "withdrawn": len(facts.transfers.withdrawn),
            "deposited": len(facts.transfers.deposited),
            "given_up_by_the_checker": facts.transfers.given_up,
            "money_missing": facts.transfers.money_missing,
        },
        "kills": facts.kills,
        "dead": facts.traffic.dead,
        "lost": [asdict(finding) for finding in result.lost],
        "doubled": [asdict(finding) for finding in result.doubled],
        "ghosts": [asdict(finding) for finding in result.ghosts],
        "early": [asdict(finding) for finding in result.early],
        "problems": list(result.problems),
    }
