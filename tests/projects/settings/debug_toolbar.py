"""`CursorWrapper.execute` and the `cursor` of each connection replaced, as debug toolbars and Sentry do"""

from django.db.backends import utils
from django.db.backends.signals import connection_created

from tests.projects.settings.plain import *

_execute = utils.CursorWrapper.execute
seen = []


def _watch(self, sql, params=None):
    seen.append(str(sql))
    return _execute(self, sql, params)


def _replace_cursor(connection, **given):
    cursor = connection.cursor

    def watched():
        return cursor()

    connection.cursor = watched


utils.CursorWrapper.execute = _watch
connection_created.connect(_replace_cursor, weak=False)


def after():
    """Every row of the outbox came by a statement that was seen."""
    inserts = sum(sql.startswith("INSERT INTO outbox_outboxmessage") for sql in seen)
    assert inserts > 30, inserts
