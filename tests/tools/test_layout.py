"""Where tests are: each directory has its line in the README, and no test module imports another."""

import ast

from tests.support import ROOT
from tests.support.lower_bounds import at_least

TESTS = ROOT / "tests"


def imported_by(path):
    """The modules that a file imports, and the names that it imports from them as modules would be."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_module_is_imported():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in at_least(200, TESTS.rglob("test_*.py"))}

    assert [(path.name, name) for path in TESTS.rglob("*.py") for name in imported_by(path) if name in modules] == []


def test_readme_names_every_directory_with_tests():
    readme = (TESTS / "README.md").read_text()
    directories = {path.parent.relative_to(TESTS).parts[:2] for path in at_least(200, TESTS.rglob("test_*.py"))}

    assert sorted("/".join(parts) for parts in directories if f"`{'/'.join(parts)}/`" not in readme) == []
