"""The functions of `outbox.testing` and `inbox.testing` as pytest fixtures."""

from importlib import import_module
from typing import Any


def fixtures(app: str, *names: str) -> dict[str, Any]:
    """A fixture `{app}_{name}` for each of `names`: it returns the function `{app}.testing.{name}`."""
    return {f"{app}_{name}": _fixture(f"{app}.testing", name) for name in names}


def _fixture(module: str, name: str) -> Any:
    import pytest  # noqa: PLC0415 - the helpers are also for projects that have other test runners

    def function() -> Any:
        # pytest imports plugins before Django is set up.
        return getattr(import_module(module), name)

    function.__doc__ = f"The function `{module}.{name}`."
    return pytest.fixture(function)
