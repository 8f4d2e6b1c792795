"""Entries of DATABASES that only one test has."""

from __future__ import annotations

from contextlib import contextmanager

from django.db import connection, connections


@contextmanager
def an_alias(name, **settings):
    """Another entry, like the default one but for `settings`."""
    connections.databases[name] = {**connection.settings_dict, **settings}
    try:
        yield name
    finally:
        connections[name].close()
        del connections[name]
        del connections.databases[name]


@contextmanager
def the_default_at(**settings):
    """The default alias, led to another server: every connection of any thread that is made during the block."""
    before = {name: connection.settings_dict[name] for name in settings}
    connection.close()
    connection.settings_dict.update(settings)
    try:
        yield
    finally:
        connection.close()
        connection.settings_dict.update(before)
