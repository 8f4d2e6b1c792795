"""The documentation says what is there, all of it and no more.

The reference is written by hand, and compared with the code here: names, signatures, attributes, defaults, commands, checks,
signals, metrics, tables. It is not generated from docstrings, because a docstring is read in an editor, is short and has no
links, while a page links from an argument to the page that explains it and says what a group of functions has in common. The
price: a sentence about an argument is in both, and no test notices when the two differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
import ssl
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from django.apps import apps
from django.core.management import BaseCommand, load_command_class
from django.db.models import CheckConstraint
from django.dispatch import Signal

import exactly_once.checks
import exactly_once.contrib.views
import exactly_once.contrib.views.checks
import inbox
import inbox.checks
import inbox.contrib.http
import inbox.contrib.joins
import inbox.contrib.joins.decorators
import inbox.contrib.joins.sets
import inbox.contrib.outgoing_webhooks
import inbox.contrib.outgoing_webhooks.fanning_out
import inbox.contrib.tasks.checks
import inbox.contrib.tasks.testing
import inbox.metrics
import inbox.signals
import inbox.tasks
import inbox.testing
import outbox
import outbox.checks
import outbox.contrib.incoming_webhooks
import outbox.contrib.recurring
import outbox.contrib.recurring.declarations
import outbox.contrib.sql.checks
import outbox.metrics
import outbox.signals
import outbox.testing
from exactly_once import metrics
from exactly_once.conf.app_options import TlsOptions
from inbox import states
from inbox.conf import InboxOptions
from inbox.models import InboxMessage, Receipt
from outbox.conf import OutboxOptions
from outbox.models import OutboxMessage
from outbox.states import TRANSITIONS, UNDECIDED, State
from tests import plugin
from tests.support import ROOT
from tests.support.commands import ran
from tests.support.lower_bounds import at_least
from tests.support.own_apps import OWN_APPS
from tools import docs_site

DOCS = ROOT / "docs"
DECISIONS = ROOT / "decisions"
SIDES = ("outbox", "inbox")


def page(name):
    return (DOCS / name).read_text()


def section(text, title):
    """What stands under the heading `title`, down to the next heading of its level."""
    level, body = re.search(rf"^(#+) {re.escape(title)}\n(.*)", text, re.MULTILINE | re.DOTALL).groups()
    return re.split(rf"^#{{1,{len(level)}}} ", body, maxsplit=1, flags=re.MULTILINE)[0]


def headings(text, level):
    return re.findall(rf"^{'#' * level} (.+)$", text, re.MULTILINE)


def rows(text, *columns):
    """The cells of the tables with these columns."""
    tables = re.findall(rf"^\| {re.escape(' | '.join(columns))} \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for table in tables for row in table.splitlines()]


def code(cell):
    """What a cell has in backticks."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(("app", "options"), [("outbox", OutboxOptions), ("inbox", InboxOptions)])
def test_every_option_is_documented_with_its_default(app, options):
    table = rows(page(f"reference/{app}/settings.md"), "option", "default", "meaning")

    assert defaults_in(table) == {field.name: default_of(field) for field in dataclasses.fields(options)}


@pytest.mark.parametrize("name", ["WHEEL", "CHECKS", "BROKER_SSL"])
def test_every_option_of_a_dictionary_in_a_setting_is_documented_with_its_default(name):
    place = "how-to/tls.md" if name == "BROKER_SSL" else "reference/outbox/settings.md"
    table = rows(page(place), f"option of `{name}`", "default", "meaning")

    assert defaults_in(table) == vars(TlsOptions() if name == "BROKER_SSL" else getattr(OutboxOptions(), name))


def defaults_in(table):
    names = {"timedelta": timedelta, "ssl": ssl}
    return {name.strip("`"): eval(default.strip("`"), names) for name, default, _ in table}


def default_of(field):
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return {} if dataclasses.is_dataclass(default) else default


def commands():
    return {
        path.stem: ".".join(path.relative_to(ROOT).parts[:-3])
        for side in ("exactly_once", *SIDES)
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


def command_pages():
    names = ["console-commands.md", "status-commands.md"]
    names += [f"{side}/{name}.md" for side in SIDES for name in ("process-commands", "message-commands")]
    return {name: page(f"reference/{name}") for name in names}


def test_every_command_is_documented_and_in_the_overview_and_no_other():
    documented = [(title, path) for path, text in command_pages().items() for title in headings(text, 2)]
    linked = re.findall(r"\[`(\w+)`\]\((.+?)#\1\)", page("reference/commands.md"))

    assert sorted(title for title, _ in documented) == sorted(commands())
    assert sorted(linked) == sorted(documented)


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_argument_of_a_command_is_documented_and_no_other(name):
    command = load_command_class(commands()[name], name)
    assert isinstance(command, BaseCommand)

    [text] = [section(each, name) for each in command_pages().values() if name in headings(each, 2)]

    documented = [option.strip("`") for option, _ in rows(text, "option", "meaning")]
    assert sorted(documented) == sorted(arguments(command))


def test_every_check_is_documented_and_no_other():
    optional = (
        exactly_once.contrib.views.checks,
        outbox.contrib.recurring.declarations,
        outbox.contrib.sql.checks,
        inbox.contrib.joins.decorators,
        inbox.contrib.joins.sets,
        inbox.contrib.outgoing_webhooks.fanning_out,
        inbox.contrib.tasks.checks,
    )
    modules = (exactly_once.checks, outbox.checks, inbox.checks, *optional)
    text = "".join(Path(module.__file__).read_text() for module in modules)
    ids = re.findall(rf'id="((?:{"|".join(OWN_APPS)})\.[EWI]\d{{3}})"', text)

    assert sorted(headings(page("reference/checks.md"), 3)) == sorted({*ids})


PACKAGES = [
    exactly_once.contrib.views,
    *(outbox, outbox.testing, outbox.contrib.incoming_webhooks, outbox.contrib.recurring),
    *(inbox, inbox.testing, inbox.contrib.http, inbox.contrib.joins, inbox.contrib.outgoing_webhooks),
    *(inbox.tasks, inbox.contrib.tasks.testing),
]


def documented_names(package):
    """The public names that the overview of the API lists for a package, each with its page."""
    table = rows(page("reference/api.md"), "package", "page", "names")
    listed = [cell for name, _, cell in table if name == f"`{package}`"]
    return {name: path for cell in listed for name, path in re.findall(r"\[`(\w+)`\]\((.+?)#\w+\)", cell)}


def test_every_public_name_is_documented_and_described_on_the_page_that_the_overview_lists():
    for package in PACKAGES:
        assert sorted(documented_names(package.__name__)) == sorted(package.__all__), package
    listed = {}
    for name, path in at_least(50, re.findall(r"\[`(\w+)`\]\((.+?)#\w+\)", page("reference/api.md"))):
        listed.setdefault(path, []).append(name)

    assert listed == {path: headings(page(f"reference/{path}"), 2) for path in listed}


def own(package, kind):
    """The public names of a package that are of this kind and defined in its app, as parameters of a test."""
    app = package.__name__.partition(".")[0]
    return [
        pytest.param(package, name, id=f"{package.__name__}.{name}")
        for name in package.__all__
        if kind(value := getattr(package, name)) and value.__module__.startswith(app)
    ]


def described(package, name):
    return section(page("reference/" + documented_names(package.__name__)[name]), name)


@pytest.mark.parametrize(("package", "name"), [each for package in PACKAGES for each in own(package, inspect.isfunction)])
def test_documented_signature_of_a_function_is_that_of_the_code(package, name):
    [source] = re.findall(rf"^```python\n((?:async )?def {name}\(.*?)```", described(package, name), re.MULTILINE | re.DOTALL)
    written = {"timedelta": timedelta}
    exec(f"from __future__ import annotations\n{source}", written)

    signature = inspect.signature(getattr(package, name))
    assert inspect.signature(written[name]) == signature
    arguments = {argument for cell, _ in rows(described(package, name), "argument", "meaning") for argument in code(cell)}
    assert arguments <= set(signature.parameters)


@pytest.mark.parametrize(("package", "name"), [each for package in PACKAGES for each in own(package, dataclasses.is_dataclass)])
def test_documented_attributes_of_a_value_are_those_of_the_code(package, name):
    text = described(package, name)
    documented = [
        attribute
        for cells in [*rows(text, "attribute", "meaning"), *rows(text, "attribute", "meaning", "default")]
        for attribute in code(cells[0])
    ]

    public = [field.name for field in dataclasses.fields(getattr(package, name)) if not field.name.startswith("_")]
    if documented:
        assert sorted(documented) == sorted(public)
    else:  # in a sentence, or as the arguments of the function
        assert {*public} <= {*code(without_blocks(described(package, "publish" if name == "Draft" else name)))}


def test_every_table_is_documented_and_no_other():
    named = [name for cells in rows(page("architecture/tables.md"), "table", "one row for") for name in code(cells[0])]
    documented = {name for name in named if "_" in name} | {
        f"{app}_{name}" for app in SIDES for name in named if "_" not in name
    }

    tables = {
        model._meta.db_table for app in OWN_APPS for model in apps.get_app_config(app).get_models() if not model._meta.proxy
    }
    assert documented == tables - {"outbox_outboxmessage", "inbox_inboxmessage"}


def test_every_index_of_messages_is_documented_and_no_other():
    cells = [cells[0] for cells in rows(page("architecture/tables.md"), "index", "for")]
    documented = [name for cell in cells for name in code(cell) if "_" in name]

    declared = {
        each.name
        for model in (OutboxMessage, InboxMessage, Receipt)
        for each in [*model._meta.indexes, *model._meta.constraints]
        if not isinstance(each, CheckConstraint)
    }
    layouts = "".join((ROOT / app / "migrations" / "_partitions.py").read_text() for app in ("outbox", "inbox"))
    history = re.findall(r"INDEX (\w+_history_\w+)", layouts)
    assert sorted(documented) == sorted(declared | set(history))


def test_every_signal_is_documented_and_no_other():
    webhooks = outbox.contrib.incoming_webhooks
    for module, title in ((outbox.signals, "Outbox"), (inbox.signals, "Inbox"), (webhooks, webhooks.__name__)):
        table = rows(section(page("reference/signals.md"), title), "signal", "sent when", "arguments")
        documented = [name.strip("`") for name, *_ in table]
        assert sorted(documented) == sorted(name for name, value in vars(module).items() if isinstance(value, Signal))


def test_every_metric_is_documented_with_its_type_and_labels_and_no_other():
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \| (.*?) ?\|", page("reference/metrics.md"), re.MULTILINE)
    documented = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}

    assert documented == {name: (each.kind, list(each.labels)) for name, each in metrics.instruments.items()}


def every_page():
    beside = (ROOT, DECISIONS, ROOT / "tests", ROOT / "benchmarks", ROOT / "benchmarks" / "notes")
    return [*(path for place in beside for path in sorted(place.glob("*.md"))), *sorted(DOCS.rglob("*.md"))]


def prose(path):
    return without_blocks(path.read_text())


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_file_that_a_page_names_or_links_to_exists():
    named = [
        (f"{path.relative_to(ROOT)}: {target}", place)
        for path in every_page()
        for target, place in [
            *((name, ROOT / name) for name in re.findall(r"`(tests/[\w/]+(?:\.\w+)?)/?`", prose(path))),
            *((link, path.parent / link) for link in re.findall(r"\]\((?!\w+://)([^)#\s]+)[^)]*\)", prose(path))),
            *(
                (link, path.parent / link)
                for link in re.findall(r"^\[[^\]]+\]: (?!\w+://)([^#\s]+)", prose(path), re.MULTILINE)
            ),
        ]
    ]

    assert [name for name, place in at_least(1_000, named) if not place.exists()] == []


def decisions():
    return sorted(DECISIONS.glob("0*.md"))


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
        assert (BACK[word], path.name) in relations(DECISIONS / other), other


def test_decisions_are_numbered_without_holes_and_the_index_has_each_with_its_title():
    titles = {path: path.read_text().splitlines()[0].removeprefix("# ").replace(". ", " ", 1) for path in decisions()}
    listed = re.findall(r"^- (\[.+)$", (DECISIONS / "README.md").read_text(), re.MULTILINE)

    assert [int(path.name[:4]) for path in titles] == list(range(1, len(titles) + 1))
    assert listed == [f"[{title}]({path.name})" for path, title in titles.items()]


def groups(title, entries):
    """A group of the navigation and those in it, each with its title and its entries."""
    yield title, entries
    for name, inside in ((name, inside) for entry in entries for name, inside in entry.items()):
        if isinstance(inside, list):
            yield from groups(name, inside)


def test_groups_of_the_navigation_have_at_most_twelve_entries():
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2])

    assert [next(iter(entry)) for entry in navigation] == ["Learn", "How-to", "Reference", "Explanation"]
    assert {title: len(entries) for title, entries in groups("navigation", navigation) if len(entries) > 12} == {}


def test_links_of_a_file_that_a_page_includes_lead_to_pages_or_become_text():
    text = (
        "[a](docs/how-to/a.md#b) [c](CHANGELOG.md) [d\ne](pyproject.toml) [f](https://example.org/g) [h](#i) `[j](docs/k.md)`"
    )

    expected = "[a](how-to/a.md#b) [c](changelog.md) d\ne [f](https://example.org/g) [h](#i) `[j](docs/k.md)`"
    assert docs_site.with_links_of_the_site(text) == expected


def test_each_included_file_is_the_whole_of_its_page():
    for file, name in docs_site.PAGES.items():
        assert page(name) == f'--8<-- "{file}"\n'
        assert docs_site.on_page_markdown(page(name)).startswith("# ")


LONG = {"checks.md", "features.md", "glossary.md"}
"""Lists, in which one looks something up."""


def test_no_page_has_more_than_1200_words():
    pages = [path for path in sorted(DOCS.rglob("*.md")) if path.name not in LONG]
    words = {path.relative_to(DOCS): [word for word in prose(path).split() if word.strip("|-:")] for path in pages}

    assert sum(map(len, words.values())) > 50_000
    assert {str(name): len(found) for name, found in words.items() if len(found) > 1_200} == {}


@dataclasses.dataclass(frozen=True)
class Row:
    """One feature: its line on the page for users, and its exact statement with its tests."""

    id: str
    line: str
    what: str
    tests: list[str]


def features():
    """In the order of the file with the statements."""
    text = (ROOT / "tests" / "features.md").read_text()
    statements = re.findall(r"^### ([A-H]\d+)\n\n(.+)\n((?:\n- `.+`)*)", text, re.MULTILINE)
    lines = rows(page("features.md"), "id", "feature")
    assert headings(text, 3) == [name for name, *_ in statements]
    assert sorted(name for name, _ in lines) == sorted(name for name, *_ in statements)
    return [Row(name, dict(lines)[name], what, re.findall(r"- `(.+)`", tests)) for name, what, tests in statements]


def planned():
    return [name for name, _ in rows(page("features.md"), "id", "planned feature")]


def test_features_page_has_one_row_for_each_id_and_a_statement_for_each_that_is_not_planned():
    gaps = {"D": {1, 2, 4, 12, 15, 20, 23}, "E": {9}, "F": {4, 10, 11}}
    last = {"A": 16, "B": 9, "C": 28, "D": 31, "E": 13, "F": 16, "G": 16, "H": 32}
    every = [f"{group}{n}" for group, end in last.items() for n in range(1, end + 1) if n not in gaps.get(group, ())]
    later = planned()

    assert len(later) == len(set(later))
    assert set(later) <= set(every)
    assert [row.id for row in features()] == [name for name in every if name not in later]


def test_a_part_of_a_feature_that_is_planned_is_named_in_its_row_and_in_its_statement():
    partly = {row.id for row in features() if "planned" in row.line}

    assert partly
    assert {row.id for row in features() if "planned" in row.what} == partly


def test_features_page_links_each_row_to_existing_headings():
    links = {row.id: re.findall(r"\]\((.+?)\)", row.line) for row in features()}
    broken = []
    for name, link in [(name, link) for name, found in links.items() for link in found]:
        target, _, anchor = link.partition("#")
        slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in all_headings(page(target))}
        if anchor and anchor not in slugs:
            broken.append(f"{name}: {link}")

    assert [name for name, found in links.items() if not found] == []
    assert broken == []


def all_headings(text):
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


@pytest.mark.timeout(300)  # when a part of the suite is run, pytest collects the others
def test_statement_of_each_feature_names_a_collected_test_function(pytestconfig):
    named = {row.id: row.tests for row in features()}
    assert [row for row, tests in named.items() if not tests] == []
    collected = pytestconfig.stash[plugin.collected]
    if others := {test for tests in named.values() for test in tests} - collected:
        collected = collected | collected_from({test.partition("::")[0] for test in others})

    missing = {f"{row}: {test}" for row, tests in named.items() for test in tests if test not in collected}

    assert missing == set()


def collected_from(files):
    """The test functions that pytest collects from these files, as node ids without parameters."""
    present = sorted(name for name in files if (ROOT / name).is_file())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    collecting = ("-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider")
    done = ran(sys.executable, *collecting, *present, environment=environment)
    assert done.returncode == 0, done.stdout
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


def test_diagram_of_the_outbox_states_is_that_of_the_declared_transitions_of_one_state():
    arrows = [("[*]", "ready", "publish"), ("[*]", "scheduled", "publish later"), ("[*]", "prepared", "prepare")]
    drawn_ones = [one for one in TRANSITIONS if one.sources in {(source,) for source in State} | {UNDECIDED}]
    arrows += [(source, target, one.name) for one in drawn_ones for source in one.sources for target in one.targets]
    drawn = "".join(f"    {source} --> {target}: {name}\n" for source, target, name in arrows)

    assert f"```mermaid\nstateDiagram-v2\n{drawn}```\n" in page("architecture/states.md")


def test_table_of_the_outbox_states_is_that_of_the_declared_transitions():
    expected = [
        ["publish", "(none)", "`ready`", "`publish()`"],
        ["publish later", "(none)", "`scheduled`", "`publish()` with `delay` or `deliver_at`"],
        ["prepare", "(none)", "`prepared`", "[`prepare()`](how-to/prepared-messages.md)"],
        *([one.name, as_code(one.sources), as_code(one.targets), one.when] for one in TRANSITIONS),
    ]

    table = rows(page("architecture/states.md"), "transition", "from", "to", "when")

    assert [[cell.replace("](../", "](") for cell in cells] for cells in table] == expected


def test_table_of_the_inbox_states_is_that_of_the_declared_transitions():
    table = rows(page("architecture/states.md"), "transition", "from", "to", "when", "permission")

    assert [(name, sources.replace("(none)", ""), *others) for name, sources, *others in table] == [
        (one.name, as_code(one.sources), as_code(one.targets), one.when, f"`{one.permission}`" * bool(one.permission))
        for one in states.TRANSITIONS
    ]


def as_code(states):
    return ", ".join(f"`{state}`" for state in states)
