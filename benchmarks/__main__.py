"""`python -m benchmarks [names…]`: measure on private servers, print tables, write JSON.

The exit status reports correctness only: 1 when a message was lost, doubled or out of order, or when a benchmark could not be
run; never because of a slow result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.lab.environment import environment, load
from benchmarks.lab.last import keep, last_figures
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.record import Incorrect, Record
from benchmarks.lab.report import table
from benchmarks.lab.servers import Lab

RELAY_SIDE = (
    "relay",
    "peers",
    "publish",
    "backlog",
    "relays",
    "latency",
    "silent_queue",
    "steps",
    "footprint",
    "horizon",
    "order",
    "neighbours",
    "unique",
    "history",
    "pages",
)
TIME_SIDE = ("lateness", "scheduled_backlog", "due_burst", "rows_read")
INBOX_SIDE = (
    "trace",
    "inbox",
    "publishing",
    "duplicates",
    "group_commit",
    "batch",
    "ordered",
    "lease",
    "effect_latency",
    "rate_limit",
    "celery",
    "tasks",
    "days",
)
NAMES = (*RELAY_SIDE, *TIME_SIDE, *INBOX_SIDE)
RESULTS = Path(__file__).parent / ".results"
FULL_RUNS, QUICK_RUNS = 5, 2


def main() -> int:
    options = _options()
    runs = options.runs or (QUICK_RUNS if options.quick else FULL_RUNS)
    plan = Plan(runs=runs, quick=options.quick, minutes=options.minutes, history=options.history, live=options.live)
    results: dict[str, Any] = {"quick": plan.quick, "runs": plan.runs, "benchmarks": []}
    failed = []
    with Lab() as lab:
        results["environment"] = environment(lab)
        for name in options.names:
            record = _measured(lab, plan, name, results)
            print(table(record, last_figures(name)), flush=True)
            if record.failure:
                failed.append(name)
            elif options.keep:
                keep(record)
            _write(options.json, results)
    print(f"\nEvery single figure: {options.json}")
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _measured(lab: Lab, plan: Plan, name: str, results: dict[str, Any]) -> Record:
    case = import_module(f"benchmarks.cases.{name}")
    record = Record(name=name, question=_question(case))
    print(f"\n{name}", flush=True)
    loaded, began = load(), time.monotonic()
    try:
        case.measure(lab, plan, record)
    except Incorrect as error:
        record.failure = str(error)
    except Exception as error:  # noqa: BLE001 - one benchmark that cannot run must not take the others' figures along
        traceback.print_exc()
        what = str(error).partition("\n")[0]
        record.failure = f"could not be carried out, see the traceback: {type(error).__name__}: {what}"
    seconds = round(time.monotonic() - began, 1)
    say(f"{name}: done in {seconds:.0f} s")
    results["benchmarks"].append({**record.as_json(), "load_before": loaded, "seconds": seconds})
    return record


def _question(case: ModuleType) -> str:
    """The first paragraph of a benchmark's docstring."""
    return " ".join((case.__doc__ or "").strip().split("\n\n")[0].split())


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


def _options() -> argparse.Namespace:
    listing = "\n".join(f"  {name:<17} {_question(import_module(f'benchmarks.cases.{name}'))}" for name in NAMES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure on private servers; print tables, write JSON.",
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stamp = datetime.now(tz=UTC).strftime("%Y%m%dT%H%M%SZ")
    parser.add_argument("names", nargs="*", metavar="name", help="which benchmarks (default: all)")
    parser.add_argument("--quick", action="store_true", help="small counts and two runs: does everything work?")
    parser.add_argument("--keep", action="store_true", help="write the figures to last.json, to be shown beside the next ones")
    parser.add_argument("--runs", type=int, help=f"interleaved runs (default: {FULL_RUNS}, with --quick {QUICK_RUNS})")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long `horizon` goes on (default: %(default)s)")
    parser.add_argument("--history", type=int, metavar="ROWS", help="published messages for `pages` (default: 10,000,000)")
    parser.add_argument("--live", type=int, metavar="ROWS", help="live messages for `pages` (default: 1,000,000)")
    parser.add_argument("--json", type=Path, default=RESULTS / f"{stamp}.json", metavar="FILE", help="default: %(default)s")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if options.runs is not None and options.runs < 1:
        parser.error("--runs must be at least 1")
    if options.keep and options.quick:
        parser.error("--keep needs a full run, without --quick")
    options.names = options.names or list(NAMES)
    return options


if __name__ == "__main__":
    sys.exit(main())
