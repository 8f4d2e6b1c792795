"""The check of the wording can fail: it reads what people read, and nothing else."""

import pytest

from tools import wording

WORD = "twin"
"""A word of the list. The texts below have `@` in its place, because this file is read, too."""


def found_in(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text.replace("@", WORD))
    return [(one.line, one.text.lower()) for one in wording.findings([path], tmp_path)]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("docstring.py", '"""Stores it.\n\nThe @ waits."""\n', 3),
        ("comment.py", "x = 1\n# The\n# @ waits.\n", 3),
        ("error.py", 'raise ValueError(f"{1} is the @ of {2}")\n', 1),
        ("name_of_a_test.py", "def test_@_is_stored():\n    pass\n", 1),
        ("page.md", "# Duplicates\n\nThe @ waits.\n", 3),
        ("texts.po", 'msgid ""\nmsgstr ""\n\nmsgid "The @ waits."\nmsgstr "Der Zwilling"\n', 4),
    ],
)
def test_word_is_found_with_its_line_in_every_text_that_people_read(tmp_path, name, text, line):
    assert found_in(tmp_path, name, text) == [(line, WORD)]


def test_phrase_is_found_across_lines(tmp_path):
    assert [line for line, _ in found_in(tmp_path, "comment.py", "# Put\n# off\n")] == [1]


def test_files_of_this_project_are_read():
    names = {str(path.relative_to(wording.ROOT)) for path in wording.read_by_people()}

    assert {"README.md", "CHANGELOG.md", "outbox/api.py", "inbox/locale/de/LC_MESSAGES/django.po"} <= names
