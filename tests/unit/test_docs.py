"""The documentation says what is there, all of it and no more."""

from __future__ import annotations

import argparse
import dataclasses
import re
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.management import BaseCommand, load_command_class
from django.dispatch import Signal

import inbox
import inbox.checks
import inbox.signals
import outbox
import outbox.checks
import outbox.signals
from inbox.conf import InboxOptions
from outbox.conf import OutboxOptions
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

    assert documented == {field.name: field.default for field in dataclasses.fields(options)}


def commands():
    return {
        path.stem: side
        for side in SIDES
        for path in (ROOT / side / "management" / "commands").glob("*.py")
        if path.stem != "__init__"
    }


def arguments(command):
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    return {action.option_strings[0] if action.option_strings else f"{action.metavar} …" for action in parser._actions}


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
        for module in (outbox.checks, inbox.checks)
        for found in re.findall(r'id="((?:outbox|inbox)\.[EWI]\d{3})"', Path(module.__file__).read_text())
    }

    assert sorted(headings(page("reference/checks.md"), 3)) == sorted(ids)


@pytest.mark.parametrize("package", [outbox, inbox], ids=SIDES)
def test_every_public_name_is_documented_and_no_other(package):
    names = headings(section(page("reference/api.md"), package.__name__), 3)

    assert sorted(names) == sorted(package.__all__)


@pytest.mark.parametrize("module", [outbox.signals, inbox.signals], ids=SIDES)
def test_every_signal_is_documented_and_no_other(module):
    title = module.__name__.partition(".")[0].capitalize()
    documented = re.findall(r"^\| `(\w+)` \|", section(page("reference/signals.md"), title), re.MULTILINE)

    assert sorted(documented) == sorted(name for name, value in vars(module).items() if isinstance(value, Signal))


def every_page():
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("path", every_page(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_and_page_that_is_named_exists(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    tests = re.findall(r"`(tests/[\w/]+(?:\.\w+)?)/?`", text)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]

    missing = [name for name in tests if not (ROOT / name).exists()]
    missing += [link for link in links if not (path.parent / link).exists()]

    assert missing == []


def features():
    return re.findall(r"^\| ([A-H]\d+) \| (.+?) \| (\w+) \| (.*?) ?\| (.*?) ?\|$", page("features.md"), re.MULTILINE)


def test_every_feature_has_one_row():
    gaps = {"D": {1, 2, 4, 12, 15, 20, 23}, "E": {9}, "F": {4, 10, 11}}
    last = {"A": 16, "B": 9, "C": 28, "D": 31, "E": 13, "F": 16, "G": 16, "H": 10}
    expected = [f"{group}{n}" for group, end in last.items() for n in range(1, end + 1) if n not in gaps.get(group, ())]

    assert [row[0] for row in features()] == expected


@pytest.mark.parametrize("row", features(), ids=lambda row: row[0])
def test_a_delivered_feature_names_a_page_a_heading_and_a_test(row):
    _, _, status, link, test = row
    if status == "later":
        assert (link, test) == ("", "")
        return
    assert status in {"delivered", "partly"}
    target, _, anchor = re.fullmatch(r"\[page\]\((.+)\)", link)[1].partition("#")
    found = re.findall(r"^#+ (.+)$", page(target), re.MULTILINE)
    slugs = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in found}
    assert not anchor or anchor in slugs
    assert test == "not tested yet" or (ROOT / test.strip("`")).is_file()
