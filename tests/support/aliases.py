"""Entries of DATABASES that only one test has."""

from contextlib import contextmanager

from django.db import connection, connections


@contextmanager
def an_alias(name, **settings):
    """Another entry, equal to the default one except for `settings`."""
    connections.databases[name] = {**connection.settings_dict, **settings}
    try:
        yield name
    finally:
        connections[name].close()
        del connections[name]
        del connections.databases[name]


@contextmanager
def the_default_at(**settings):
    """The default alias refers to another server: for every connection that any thread makes during the block."""
    before = {name: connection.settings_dict[name] for name in settings}
    connection.close()
    connection.settings_dict.update(settings)
    try:
        yield
    finally:
        connection.close()
        connection.settings_dict.update(before)


@contextmanager
def unresolvable(alias="default"):
    """The host name of this database does not resolve: for every connection that is opened during the block."""
    settings = connections[alias].settings_dict
    before, settings["HOST"] = settings["HOST"], "database.invalid"
    try:
        yield
    finally:
        settings["HOST"] = before
