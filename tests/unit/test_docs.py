"""The documentation says what is there, all of it and no more."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.management import BaseCommand, load_command_class
from django.dispatch import Signal

import inbox
import inbox.checks
import inbox.http
import inbox.joins
import inbox.metrics
import inbox.signals
import inbox.testing
import inbox.webhooks
import inbox.webhooks.checks
import outbox
import outbox.checks
import outbox.metrics
import outbox.signals
import outbox.testing
import outbox.webhooks
import outbox.webhooks.signals
from inbox.conf import InboxOptions
from outbox.conf import OutboxOptions
from outbox.kernel import meter
from outbox.states import TRANSITIONS, UNDECIDED, State
from tests.support import ROOT

DOCS = ROOT / "docs"
SIDES = ("outbox", "inbox")


def page(name):
    return (DOCS / name).read_text()


def section(text, title):
    """What stands under the heading `title`, down to the next heading of its level."""
    level, body = re.search(rf"^(#+) {re.escape(title)}\n(.*)", text, re.MULTILINE | re.DOTALL).groups()
    return re.split(rf"^#{{1,{len(level)}}} ", body, maxsplit=1, flags=re.MULTILINE)[0]


def headings(text, level):
    return re.findall(rf"^{'#' * level} (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize(("title", "options"), [("OUTBOX", OutboxOptions), ("INBOX", InboxOptions)])
def test_every_option_is_documented_with_its_default(title, options):
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section(page("reference/settings.md"), title), re.MULTILINE)

    documented = {name: eval(default, {"timedelta": timedelta}) for name, default in rows}

    assert documented == {field.name: default_of(field) for field in dataclasses.fields(options)}


def default_of(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def commands():
    return {
        path.stem: ".".join(path.relative_to(ROOT).parts[:-3])
        for side in SIDES
        for path in (ROOT / side).rglob("management/commands/*.py")
        if path.stem != "__init__"
    }


def arguments(command):
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    return {
        action.option_strings[0] if action.option_strings else f"{action.metavar} …" if action.nargs else action.metavar
        for action in parser._actions
    }


def test_every_command_is_documented_and_no_other():
    assert sorted(headings(page("reference/commands.md"), 2)) == sorted(commands())


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_argument_of_a_command_is_documented_and_no_other(name):
    command = load_command_class(commands()[name], name)
    assert isinstance(command, BaseCommand)

    documented = re.findall(r"^\| `([^`]+)` \|", section(page("reference/commands.md"), name), re.MULTILINE)

    assert sorted(documented) == sorted(arguments(command))


def test_every_check_is_documented_and_no_other():
    ids = {
        found
        for module in (outbox.checks, inbox.checks, inbox.joins.checks, inbox.webhooks.checks)
        for found in re.findall(
            r'id="((?:outbox|inbox|inbox_joins|inbox_webhooks)\.[EWI]\d{3})"', Path(module.__file__).read_text()
        )
    }

    assert sorted(headings(page("reference/checks.md"), 3)) == sorted(ids)


@pytest.mark.parametrize(
    "package",
    [outbox, inbox, inbox.http, inbox.joins, inbox.webhooks, outbox.testing, inbox.testing, outbox.webhooks],
    ids=lambda package: package.__name__,
)
def test_every_public_name_is_documented_and_no_other(package):
    names = headings(section(page("reference/api.md"), package.__name__), 3)

    assert sorted(names) == sorted(package.__all__)


@pytest.mark.parametrize(
    ("module", "title"), [(outbox.signals, "Outbox"), (inbox.signals, "Inbox"), (outbox.webhooks.signals, "outbox.webhooks")]
)
def test_every_signal_is_documented_and_no_other(module, title):
    documented = re.findall(r"^\| `(\w+)` \|", section(page("reference/signals.md"), title), re.MULTILINE)

    assert sorted(documented) == sorted(name for name, value in vars(module).items() if isinstance(value, Signal))


def test_every_metric_is_documented_with_its_type_and_labels_and_no_other():
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \| (.*?) ?\|", page("reference/metrics.md"), re.MULTILINE)
    documented = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}

    assert documented == {name: (each.kind, list(each.labels)) for name, each in meter.instruments.items()}


def every_page():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *sorted(DOCS.rglob("*.md"))]


def prose(path):
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_every_file_that_a_page_names_or_links_to_exists():
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in every_page()
        for target, place in [
            *((name, ROOT / name) for name in re.findall(r"`(tests/[\w/]+(?:\.\w+)?)/?`", prose(path))),
            *((link, path.parent / link) for link in re.findall(r"\]\((?!\w+://)([^)#\s]+)[^)]*\)", prose(path))),
        ]
        if not place.exists()
    ]

    assert broken == []


def decisions():
    return sorted((DOCS / "adr").glob("0*.md"))


LINKS_OF_A_STATUS = r"\[\d+\]\((0[\w-]+\.md)\)(?: and \[\d+\]\((0[\w-]+\.md)\))*"
STATUS = re.compile(
    r"\*\*Date\.\*\* \d{4}-\d\d-\d\d\. \*\*Status\.\*\* "
    rf"(?:Accepted|Superseded by {LINKS_OF_A_STATUS})(?:; (?:amended by|amends|supersedes) {LINKS_OF_A_STATUS})*\."
)
BACK = {"amended by": "amends", "amends": "amended by", "superseded by": "supersedes", "supersedes": "superseded by"}


def relations(path):
    """What the status of a decision says about others: the word and the other page."""
    status = path.read_text().splitlines()[2].partition("**Status.** ")[2].lower()
    return {(part.split(" [")[0], other) for part in status.split("; ") for other in re.findall(r"\((0[\w-]+\.md)\)", part)}


@pytest.mark.parametrize("path", decisions(), ids=lambda path: path.stem)
def test_decision_has_a_date_and_a_status_and_the_decisions_it_names_link_back(path):
    assert STATUS.fullmatch(path.read_text().splitlines()[2])

    for word, other in relations(path):
        assert (BACK[word], path.name) in relations(DOCS / "adr" / other), other


def test_index_of_the_decisions_has_each_with_its_title():
    titles = {path: path.read_text().splitlines()[0].removeprefix("# ").replace(". ", " ", 1) for path in decisions()}
    listed = re.findall(r"^- (\[.+)$", page("adr/index.md"), re.MULTILINE)

    assert listed == [f"[{title}]({path.name})" for path, title in titles.items()]


def test_every_how_to_page_has_at_most_1200_words():
    pages = sorted(DOCS.glob("how-to/*.md"))
    words = {path.name: [word for word in prose(path).split() if word.strip("|-:")] for path in pages}

    assert {name: len(found) for name, found in words.items() if len(found) > 1_200} == {}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the features page."""

    id: str
    what: str
    status: str
    page: str
    tests: list[str]


def features():
    found = re.findall(r"^\| ([A-H]\d+) \| (.+?) \| (\w+) \| (.*?) ?\| (.*?) ?\|$", page("features.md"), re.MULTILINE)
    return [Row(name, what, status, link, re.findall(r"`([^`]+)`", tests)) for name, what, status, link, tests in found]


def test_features_page_has_one_row_for_each_id():
    gaps = {"D": {1, 2, 4, 12, 15, 20, 23}, "E": {9}, "F": {4, 10, 11}}
    last = {"A": 16, "B": 9, "C": 28, "D": 31, "E": 13, "F": 16, "G": 16, "H": 20}
    expected = [f"{group}{n}" for group, end in last.items() for n in range(1, end + 1) if n not in gaps.get(group, ())]

    assert [row.id for row in features()] == expected


def test_features_page_knows_four_statuses_and_explains_what_is_not_plainly_delivered():
    for row in features():
        assert row.status in {"delivered", "partly", "differs", "later"}, row.id
        if row.status == "differs":
            assert "because" in row.what, f"{row.id} does not say why it differs"
        if row.status == "partly":
            assert "later" in row.what, f"{row.id} does not say what is missing"


def test_features_page_links_each_row_that_is_there_to_an_existing_heading():
    broken = []
    for row in features():
        if row.status == "later":
            assert row.page == "", row.id
            continue
        target, _, anchor = re.fullmatch(r"\[page\]\((.+)\)", row.page)[1].partition("#")
        slugs = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in all_headings(page(target))}
        if anchor and anchor not in slugs:
            broken.append(f"{row.id}: {target}#{anchor}")

    assert broken == []


def all_headings(text):
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def test_features_page_names_a_collected_test_function_for_each_row_that_is_there():
    named = {row.id: row.tests for row in features() if row.status != "later"}
    assert [row for row, tests in named.items() if not tests] == []
    collected = collected_from({test.partition("::")[0] for tests in named.values() for test in tests})

    missing = {f"{row}: {test}" for row, tests in named.items() for test in tests if test not in collected}

    assert missing == set()


def collected_from(files):
    """The test functions that pytest collects from these files, as node ids without parameters."""
    present = sorted(name for name in files if (ROOT / name).is_file())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--numprocesses=0", "-p", "no:cacheprovider", *present],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


def test_diagram_of_the_outbox_states_is_that_of_the_declared_transitions_of_one_state():
    arrows = [("[*]", "ready", "publish"), ("[*]", "scheduled", "publish later"), ("[*]", "prepared", "prepare")]
    drawn_ones = [one for one in TRANSITIONS if one.sources in {(source,) for source in State} | {UNDECIDED}]
    arrows += [(source, target, one.name) for one in drawn_ones for source in one.sources for target in one.targets]
    drawn = "".join(f"    {source} --> {target}: {name}\n" for source, target, name in arrows)

    assert f"```mermaid\nstateDiagram-v2\n{drawn}```\n" in page("architecture.md")


def test_table_of_the_outbox_states_is_that_of_the_declared_transitions():
    rows = [("publish", ["(none)"], ["`ready`"], "`publish()`")]
    rows += [("publish later", ["(none)"], ["`scheduled`"], "`publish()` with `delay`, `delay_level` or `deliver_at`")]
    rows += [("prepare", ["(none)"], ["`prepared`"], "[`prepare()`](how-to/prepared-messages.md)")]
    rows += [
        (one.name, [f"`{state}`" for state in one.sources], [f"`{state}`" for state in one.targets], one.when)
        for one in TRANSITIONS
    ]
    table = "".join(
        f"| {name} | {', '.join(sources)} | {', '.join(targets)} | {when} |\n" for name, sources, targets, when in rows
    )

    assert f"| transition | from | to | when |\n|---|---|---|---|\n{table}\n" in page("architecture.md")
