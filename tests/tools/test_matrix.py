"""What is said about versions is what `make matrix` has run: the page, the classifiers, and the jobs of the workflow."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import yaml

from tests.support import ROOT
from tools import matrix

CELLS = json.loads(matrix.RESULTS.read_text())
PAGE = (ROOT / "docs" / "reference" / "upgrade-policy.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPONENTS = {"python": "Python", "django": "Django", "postgresql": "PostgreSQL", "rabbitmq": "RabbitMQ", "redis": "Redis"}


def series(component, version):
    """What a page calls this version: PostgreSQL has one number, the others have two."""
    return ".".join(version.split(".")[: 1 if component == "postgresql" else 2])


def run_with(component):
    found = {series(component, versions[component]) for versions in CELLS.values()}
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def test_every_cell_that_was_run_has_passed():
    assert {*CELLS} <= {*matrix.CELLS}
    assert [cell for cell, found in CELLS.items() if not matrix.has_passed(found)] == []


@pytest.mark.parametrize(("component", "name"), COMPONENTS.items())
def test_page_names_the_versions_of_each_component(component, name):
    assert re.search(rf"^\| {name} \|.*\| (.+) \|$", PAGE, re.MULTILINE)[1].split(", ") == run_with(component)


def test_page_has_a_row_for_each_cell():
    rows = [
        f"| {' | '.join([cell, *(series(component, found[component]) for component in COMPONENTS)])} |"
        for cell, found in CELLS.items()
    ]

    assert [line for line in PAGE.splitlines() if re.match(r"\| [a-z]+-\d", line)] == rows


@pytest.mark.parametrize(
    ("component", "prefix"), [("python", "Programming Language :: Python"), ("django", "Framework :: Django")]
)
def test_classifiers_name_the_versions(component, prefix):
    found = [version[1] for text in PROJECT["classifiers"] if (version := re.fullmatch(rf"{prefix} :: (\d+\.\d+)", text))]

    assert found == run_with(component)


def test_workflow_tests_each_release_with_each_django():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    combinations = {f"{job['debian']}-{job['django']}" for job in jobs["test"]["strategy"]["matrix"]["include"]}

    assert combinations == {cell.removesuffix("-wheels") for cell in matrix.CELLS}
