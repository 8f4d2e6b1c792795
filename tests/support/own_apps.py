"""The apps of this project that the settings of the tests install: the three, and the optional ones."""

from django.apps import apps

OWN_APPS = tuple(
    config.label for config in apps.get_app_configs() if config.name.partition(".")[0] in {"exactly_once", "outbox", "inbox"}
)
"""Their labels."""
