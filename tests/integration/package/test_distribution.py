"""What is released: the source distribution, the wheel that is built from it, and its page on the package index."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes

import pytest

from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The directory of both, made as for a release."""
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(directory), str(ROOT)], check=True, timeout=110)
    return directory


@pytest.fixture(scope="module")
def source_files(built):
    (path,) = built.glob("django_exactly_once-*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("django_exactly_once-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture
def metadata(wheel):
    return message_from_bytes(wheel.read(about(wheel) + "METADATA"))


def about(wheel):
    (directory,) = {name.partition("/")[0] + "/" for name in wheel.namelist() if ".dist-info/" in name}
    return directory


def tracked(*places):
    return set(
        subprocess.run(["git", "ls-files", *places], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    )


def test_source_distribution_has_every_file_but_those_of_the_repository_itself(source_files):
    of_the_repository = {name for name in tracked() if name.startswith(".")}

    assert source_files == (tracked() - of_the_repository) | {".gitignore", "PKG-INFO"}


def test_wheel_has_every_file_of_the_three_packages_and_no_other(wheel):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert packed == tracked("exactly_once", "outbox", "inbox")
    assert {"exactly_once/py.typed", "outbox/py.typed", "inbox/py.typed"} <= packed


def test_wheel_has_the_licence(wheel, metadata):
    assert wheel.read(about(wheel) + "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert (metadata["License-Expression"], metadata.get_all("License-File")) == ("MIT", ["LICENSE"])


def test_extras_are_those_that_a_project_needs(metadata):
    extras = {"postgres", "redis", "celery", "prometheus", "opentelemetry", "http", "recurring", "tasks", "terminal"}

    assert set(metadata.get_all("Provides-Extra")) == extras


def test_page_of_the_package_has_no_link_to_a_file_that_is_not_there(metadata):
    page = metadata.get_payload(decode=True).decode()

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "## Use it" in page
    assert re.findall(r"\]\((?!https?://)[^)]*\)", page) == []


def test_page_of_the_package_says_where_the_documentation_is(metadata):
    """At the address, or in the source distribution while there is none."""
    page = metadata.get_payload(decode=True).decode()

    assert PROJECT["urls"].get("Documentation", "The documentation is in the source distribution, in `docs`") in page
    assert metadata.get_all("Project-URL", []) == [f"{label}, {address}" for label, address in PROJECT["urls"].items()]
