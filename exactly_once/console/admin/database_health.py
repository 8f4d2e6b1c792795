"""Database health in the admin: what pins the vacuum horizon, and what to do about it.

Vacuum removes no row version that the oldest open snapshot may see. While a transaction, a replica, a replication slot or a
prepared transaction pins this horizon, the versions of published messages pile up, and relays read past them. Everything is
read from PostgreSQL's views; no table of messages is read.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.contrib import admin
from django.db import connections
from django.http import HttpRequest
from django.utils.translation import gettext as _

from exactly_once.console.admin.pages import PageAdmin
from exactly_once.console.display import duration, ngettext, number, visible
from exactly_once.models import DatabaseHealth
from exactly_once.sql.connections import is_postgresql

_MOST_PINS = 20
_LONG = timedelta(minutes=10)
_MANY_TRANSACTIONS = 1_000_000
_SEES_ALL_SESSIONS = "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"
_PINS = f"""
SELECT CASE backend_type WHEN 'walsender' THEN 'replica' WHEN 'client backend' THEN 'session' ELSE backend_type END,
  CAST(pid AS text),
  greatest(age(backend_xmin), age(backend_xid)), concat_ws(', ', nullif(application_name, ''), usename), coalesce(state, ''),
  CASE WHEN xact_start IS NOT NULL THEN greatest(statement_timestamp() - xact_start, '0') END,
  CASE WHEN query_start IS NOT NULL THEN greatest(statement_timestamp() - query_start, '0') END
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
  AND (datname = current_database() OR datname IS NULL)
UNION ALL
SELECT 'replication slot', slot_name::text, age(xmin), coalesce(plugin::text, ''),
  CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL, NULL
FROM pg_replication_slots WHERE xmin IS NOT NULL
UNION ALL
SELECT 'prepared transaction', gid, age(transaction), owner::text, 'prepared',
  greatest(statement_timestamp() - prepared, '0'), NULL
FROM pg_prepared_xacts WHERE database = current_database()
ORDER BY 3 DESC LIMIT {_MOST_PINS}
"""  # noqa: S608 - our own number


class Pin(NamedTuple):
    """What keeps the vacuum horizon.

    Attributes:
        kind: "session", "replica", "replication slot" or "prepared transaction"; of another process of the server its type.
        name: the process id, the slot's name or the transaction's identifier.
        age: how many transactions ago its snapshot is.
        who: the application and the user.
        open_for: how long its transaction has been open; None if that is unknown.
        query_for: how long its last statement has been running, or ago; None if there is none.
    """

    kind: str
    name: str
    age: int
    who: str = ""
    state: str = ""
    open_for: timedelta | None = None
    query_for: timedelta | None = None

    def __str__(self) -> str:
        kinds = {
            "session": _("Session %(name)s"),
            "replica": _("Replica of the session %(name)s"),
            "replication slot": _("Replication slot %(name)s"),
            "prepared transaction": _("Prepared transaction %(name)s"),
        }
        name = kinds.get(self.kind, _("Server process %(name)s, %(kind)s")) % {"name": self.name, "kind": self.kind}
        return visible(f"{name} ({self.who})" if self.who else name)

    @property
    def remedy(self) -> tuple[str, str]:
        """What to do about it, and the statement for it; "" if there is none, as for a worker that ends with its work."""
        name = "'" + self.name.replace("'", "''") + "'"
        remedies = {
            "session": (_("If its work may be lost, end it:"), f"SELECT pg_terminate_backend({self.name});"),
            "replica": (_("End the long queries on the replica, or set there:"), "hot_standby_feedback = off"),
            "replication slot": (_("If no replica needs it any more, drop it:"), f"SELECT pg_drop_replication_slot({name});"),
            "prepared transaction": (
                _("Ask its transaction manager, and commit it or roll it back:"),
                f"COMMIT PREPARED {name} or ROLLBACK PREPARED {name}",
            ),
        }
        return remedies.get(self.kind, (_("It ends when its work is done. If it does not, read the log of the server."), ""))


def pins(alias: str) -> list[Pin] | None:
    """What keeps the vacuum horizon of this database, the oldest first; None on a database without one."""
    rows = _read(alias, _PINS)
    return None if rows is None else [Pin(*row) for row in rows]


def _read(alias: str, statement: str) -> list[tuple[Any, ...]] | None:
    """The rows of a statement for PostgreSQL; None on another database."""
    if not is_postgresql(connections[alias]):
        return None
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


def horizon_warnings(pins: Sequence[Pin] | None) -> Iterator[str]:
    """What has held back the vacuum horizon for long: one sentence for all sessions."""
    opened = [(pin.open_for, pin) for pin in pins or () if pin.open_for is not None and pin.open_for >= _LONG]
    if opened:
        yield ngettext(
            "%(what)s has held back the vacuum horizon for %(duration)s: dead rows are not removed, and relays read past them.",
            "%(what)s have held back the vacuum horizon, the first for %(duration)s: dead rows are not removed, and relays "
            "read past them.",
            len(opened),
            what=", ".join(str(pin) for _for, pin in opened),
            duration=duration(max(lasted for lasted, _pin in opened)),
        )
    for pin in pins or ():
        if pin.open_for is None and pin.age >= _MANY_TRANSACTIONS:
            words = _("%(what)s has held back the vacuum horizon for %(count)s transactions: dead rows are not removed.")
            yield words % {"what": pin, "count": number(pin.age)}


@admin.register(DatabaseHealth)
class DatabaseHealthAdmin(PageAdmin):
    """What holds back the vacuum of a database."""

    template = "exactly_once/health.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        found = pins(self.using)
        return {
            "database": self.using,
            "pins": found,
            "warnings": list(horizon_warnings(found)),
            "sees_all_sessions": _read(self.using, _SEES_ALL_SESSIONS) == [(True,)],
            "hidden": False,
        }
