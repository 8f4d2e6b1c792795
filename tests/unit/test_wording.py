"""The check of the wording can fail: it reads what people read, and nothing else."""

from __future__ import annotations

import pytest

from tests.support import wording


def found_in(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return [(one.line, one.text) for one in wording.findings([path], tmp_path)]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("docstring.py", '"""Stores it.\n\nThe twin waits."""\n', 3),
        ("comment.py", "x = 1\n# The twin\n# waits.\n", 2),
        ("error.py", 'raise ValueError(f"{1} is the twin of {2}")\n', 1),
        ("test_name.py", "def test_twin_is_stored():\n    pass\n", 1),
        ("TestName.py", "class TestTwin:\n    pass\n", 1),
        ("page.md", "# Duplicates\n\nThe twin waits.\n", 3),
        ("texts.po", 'msgid ""\nmsgstr ""\n\nmsgid "The twin waits."\nmsgstr "Der Zwilling"\n', 4),
    ],
)
def test_word_is_found_with_its_line_in_every_text_that_people_read(tmp_path, name, text, line):
    assert [(at, word.lower()) for at, word in found_in(tmp_path, name, text)] == [(line, "twin")]


def test_phrase_is_found_across_lines(tmp_path):
    assert found_in(tmp_path, "comment.py", "# It is skipped for a\n# while.\n") == [(1, "a while")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("name.py", "twin = 1\ndef gone(away):\n    return {'twin': away}\n"),
        ("quoted.py", '"""The column `twin`."""\n'),
        ("page.md", "Call it:\n\n```python\ntwin()\n```\n\n    `gone`\n"),
        ("texts.po", 'msgid "Duplicates"\nmsgstr "twin"\n'),
        ("terms.md", "The note of a group, the spans of OpenTelemetry, 410 Gone, and the rest.\n"),
    ],
)
def test_names_code_and_terms_of_the_field_are_not_found(tmp_path, name, text):
    assert found_in(tmp_path, name, text) == []


def test_every_pattern_says_what_to_write_instead():
    assert [word for word in wording.words() if not word.instead] == []


def test_files_of_this_project_are_read():
    names = {str(path.relative_to(wording.ROOT)) for path in wording.read_by_people()}

    assert {"README.md", "CHANGELOG.md", "outbox/api.py", "inbox/locale/de/LC_MESSAGES/django.po"} <= names
