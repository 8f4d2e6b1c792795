"""The tests of a project: `TestCase`, `serialized_rollback`, pytest-django's `--reuse-db`, and pytest-xdist's `-n`"""

from tests.projects.settings.plain import *

tests = ("--create-db", "--reuse-db", "--reuse-db --numprocesses 2")
