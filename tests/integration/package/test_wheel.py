"""The wheel that users install: its files, its metadata and its page on the package index."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.proof  # pip installs the build backend


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    subprocess.run(command, check=True, timeout=110)
    (path,) = directory.glob("django_exactly_once-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture
def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def test_wheel_has_every_file_of_both_packages_and_no_other(wheel):
    listed = subprocess.run(
        ["git", "ls-files", "exactly_once", "outbox", "inbox"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    packed = [name for name in wheel.namelist() if ".dist-info/" not in name]

    assert sorted(packed) == sorted(listed)
    assert {"outbox/py.typed", "inbox/py.typed"} <= set(packed)


def test_page_of_the_package_has_no_link_to_a_file_that_is_not_there(metadata):
    page = metadata.get_payload(decode=True).decode()

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "## Use it" in page
    assert re.findall(r"\]\((?!https?://)[^)]*\)", page) == []
