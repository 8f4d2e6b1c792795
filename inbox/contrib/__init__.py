"""Optional products: each is an app or an option of its own, and the core imports none of them."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured


def require_app(package: str) -> None:
    """Before the models of an optional app: Django would take them for those of the app "inbox", and add them there.

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
