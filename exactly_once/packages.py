"""The packages of the installed halves, and the labels of their apps.

A project that has another app with the label "outbox" installs a subclass of `outbox.apps.OutboxConfig` with its own `label`.
Django derives from it the names of tables, permissions, URLs of the admin and migrations. The package keeps its name, so both
apps name themselves and each other by package, and convert it to the label where Django asks for one.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

_halves: dict[str, str] = {}


def register(app: str, name: str) -> None:
    """Register the half of an app by its dotted name, when Django is ready. A second call for an app replaces the first."""
    _halves[app] = name


def registered() -> Mapping[str, str]:
    """The dotted names of the registered halves by package, in the order of INSTALLED_APPS."""
    return _halves


def label_of(app: str) -> str:
    """The label of an installed app.

    Args:
        app: its package, "outbox" or "inbox". A label, or a package that is not installed, is returned as it is.
    """
    return next((config.label for config in apps.get_app_configs() if config.name == app), app)


def package_of(model: Any) -> str:
    """The half that a model belongs to, "outbox" or "inbox", also for the models of its optional packages."""
    return str(model._meta.app_config.name.partition(".")[0])


def name_of(function: Callable[..., Any], kind: str) -> str:
    """The default name of a callback or a handler: the label of its app, and its own name.

    Raises:
        ValueError: it has no name.
    """
    if not hasattr(function, "__name__"):
        raise ValueError(f"{function!r} has no __name__, which is the default name of its {kind}: set name=.")
    config = apps.get_containing_app_config(function.__module__)
    return f"{config.label if config else function.__module__}.{function.__name__}"


def require_app(package: str) -> None:
    """Before the models of an optional app: Django would take them for those of the app around it, and add them there.

    Raises:
        ImproperlyConfigured: it is not installed.
    """
    if not apps.is_installed(package):
        raise ImproperlyConfigured(f"{package} is an app of its own: add {package!r} to INSTALLED_APPS and run migrate.")


def looked_up(package: str, modules: Mapping[str, str], name: str) -> Any:
    """A public name of an optional app, on first use, because Django imports the package before its models can be.

    Args:
        modules: of the package, by public name.

    Raises:
        AttributeError: it has no such name.
        ImproperlyConfigured: the app is not installed.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    require_app(package)
    return getattr(import_module(f"{package}.{modules[name]}"), name)
