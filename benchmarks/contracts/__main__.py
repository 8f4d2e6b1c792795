"""`python -m benchmarks.contracts [names…]`: what the harness `pytest-obligation` says of our tasks and of other queues.

Prints a table, then what the harness says of each divergence. A gap that a contract declares counts as not held, and a history
in it as any other. Each queue has an environment of its own and private servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks.lab.peers import SAME_DJANGO, Installation
from benchmarks.lab.project import ROOT
from benchmarks.lab.servers import Lab

OURS = "django-exactly-once"
HARNESS = f"pytest-obligation[django]=={version('pytest-obligation')}"
PEERS = {
    "django_tasks_db": ("django-tasks-db[compat]==0.13.0", HARNESS, *SAME_DJANGO),
    "procrastinate": ("procrastinate[django]==3.10.0", HARNESS, *SAME_DJANGO),
    "celery": (f"celery[redis]=={version('celery')}", HARNESS, *SAME_DJANGO),
}
COLUMNS = ("held", "not held", "not applicable", "declined")


class Answer:
    """What the harness has reported into a directory.

    Attributes:
        profiles: the letters of its guarantees, by their state.
        histories: how many interrupted ones ended as the one without interruption (True), and how many otherwise.
        words: what failed, and the reasons of gaps, in order.
    """

    def __init__(self, directory: Path) -> None:
        self.profiles: defaultdict[str, set[str]] = defaultdict(set)
        self.words: dict[str, None] = {}
        for suite in json.loads((directory / "profiles.json").read_text()).values():
            for letter, profile in suite["profiles"].items():
                self._add(letter, **profile)
        properties = ET.parse(directory / "cases.xml").iterfind(".//property[@name='obligation_histories']")
        ends = [history["status"] for found in properties for history in json.loads(found.attrib["value"])]
        self.histories = Counter(end == "matches baseline" for end in ends if end not in {"baseline", "fault not reached"})

    def _add(self, letter: str, assessment: dict[str, str], verified: bool, cases: dict[str, Any], **_: Any) -> None:
        state = assessment["state"]
        if state == "known gap":
            self.words[f"known gap {letter}: {assessment['because']}"] = None
        if state in ("claimed", "known gap"):
            state = "held" if verified else "not held"
        self.profiles[state].add(letter)
        self.words |= {failure["message"]: None for case in cases.values() for failure in case["failures"]}

    def row(self, name: str) -> str:
        letters = [" ".join(sorted(self.profiles[state])) or "-" for state in COLUMNS]
        return f"| {name} | {' | '.join(letters)} | {self.histories[True]} of {self.histories.total()} |"


def answer_of(python: str, *arguments: str, **environ: str) -> Answer:
    with TemporaryDirectory() as directory:
        reports = [f"--due-work-profile-report={directory}/profiles.json", f"--junitxml={directory}/cases.xml"]
        command = [python, "-m", "pytest", *arguments, *reports]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode > 1:  # it has neither passed nor failed
            raise SystemExit(done.stdout)
        return Answer(Path(directory))


def main(names: list[str]) -> None:
    answers = {}
    with Lab() as lab:
        for name in names:
            if name == OURS:
                answers[name] = answer_of(sys.executable, "--db", "postgres", "tests/contracts/test_tasks.py")
                continue
            peer = Installation(f"contract-{name}", PEERS[name])
            peer.install()
            answers[PEERS[name][0]] = answer_of(
                peer.python,
                *("-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", f"benchmarks/contracts/{name}.py"),
                DATABASE_URL=lab.create_database(name, "template0"),
                BROKER_URL=lab.rabbit.new_vhost(),
                REDIS_URL=lab.redis.url,
            )
    print(f"| {HARNESS} | {' | '.join(COLUMNS)} | histories that converge |\n{'|---' * (len(COLUMNS) + 2)}|")
    print(*(answer.row(name) for name, answer in answers.items()), sep="\n")
    for name, answer in answers.items():
        print(f"\n{name}", *answer.words, sep="\n  ")


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m benchmarks.contracts", description="What the harness says of queues of tasks.")
    parser.add_argument("names", nargs="*", default=[OURS, *PEERS], help=f"default: {OURS} {' '.join(PEERS)}")
    given = parser.parse_args().names
    if unknown := {*given} - {OURS, *PEERS}:
        parser.error(f"there is no queue {min(unknown)!r}; these are: {', '.join([OURS, *PEERS])}")
    main(given)
