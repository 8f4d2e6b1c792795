"""Finds `transaction.on_commit(lambda: task.delay())` in a project's source, where the task goes through the outbox.

Such a call waits for a commit that it could be a part of, and is lost when the process dies right after it. Nothing is imported
or run here: a name is looked up in the modules that are imported already, so what is found is certain, and not everything is.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.apps import AppConfig

_CALLS = {"delay", "apply_async"}
_CALLS_BY_THEMSELVES = {"delay_on_commit", "apply_async_on_commit"}
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class HookedCall:
    """A line of source that calls `task` in a hook."""

    path: Path
    line: int
    task: Any


def hooked_calls(configs: Iterable[AppConfig], task_class: type) -> Iterator[HookedCall]:
    """Calls of tasks of this class in the project's own apps; not in what is installed, nor in tests."""
    for config in configs:
        root = Path(config.path)
        if _INSTALLED & set(root.parts):
            continue
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if not any(part.startswith("test") for part in inside.parts):
                yield from _calls_in(path, _module_name(config.name, inside), task_class)


def _calls_in(path: Path, module: str, task_class: type) -> Iterator[HookedCall]:
    try:
        source = path.read_bytes()
    except OSError:  # such as the link by which Emacs locks a file
        return
    if b"on_commit" not in source or not (b"delay" in source or b"apply_async" in source):
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    names = _Names(tree, module, is_package=path.name == "__init__.py")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := _called_in_a_hook(node)) is not None:
            task = names.find(called)
            if isinstance(task, task_class):
                yield HookedCall(path, node.lineno, task)


def _called_in_a_hook(call: ast.Call) -> ast.expr | None:
    """The `task` of `on_commit(lambda: task.delay())`, `on_commit(partial(task.delay, …))` and `task.delay_on_commit()`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _CALLS_BY_THEMSELVES:
        return call.func.value
    if _last_name(call.func) != "on_commit" or not call.args:
        return None
    hook = call.args[0]
    if isinstance(hook, ast.Lambda) and isinstance(hook.body, ast.Call):
        hook = hook.body.func
    elif isinstance(hook, ast.Call) and _last_name(hook.func) == "partial" and hook.args:
        hook = hook.args[0]
    return hook.value if isinstance(hook, ast.Attribute) and hook.attr in _CALLS else None


class _Names:
    """What the names in a module stand for, as far as that is imported."""

    def __init__(self, tree: ast.Module, module: str, *, is_package: bool) -> None:
        self._module = module
        self._package = module if is_package else module.rpartition(".")[0]
        self._imported: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                self._imported |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                self._imported |= {alias.asname: (alias.name, "") for alias in node.names if alias.asname}
                self._imported |= {
                    root: (root, "") for alias in node.names if not alias.asname and (root := alias.name.partition(".")[0])
                }

    def find(self, expression: ast.expr) -> Any:
        """The object, or None."""
        if isinstance(expression, ast.Attribute):
            return getattr(self.find(expression.value), expression.attr, None)
        if not isinstance(expression, ast.Name):
            return None
        source, name = self._imported.get(expression.id, (self._module, expression.id))
        module = sys.modules.get(source)
        return getattr(module, name, None) or sys.modules.get(f"{source}.{name}") if name else module

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        above = self._package.split(".")[: len(self._package.split(".")) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


def _last_name(expression: ast.expr) -> str:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def _module_name(app: str, inside: Path) -> str:
    parts = inside.with_suffix("").parts
    return ".".join([app, *(parts[:-1] if parts[-1] == "__init__" else parts)])
