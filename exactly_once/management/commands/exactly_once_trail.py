from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from datetime import datetime
from itertools import product
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import connections
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.display import exact, visible
from exactly_once.operators.trail import Life, Moment, Standing, apps_asked, ids_of, life_of
from exactly_once.plurals import ngettext
from exactly_once.process.clock import utcnow
from exactly_once.sql.schema import why_unmigrated

_NARROWEST, _WIDEST = 60, 200
_MOST_LINES = 4
"""Maximum lines of one reason; `--json` and the admin show all of it."""
_GAP = "  "


class Command(TranslatedCommand):
    help = gettext_lazy(
        "Show what happened to one message, from its transaction to its handlers: when, where, in which process and why."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_ids", nargs="*", metavar="MESSAGE_ID", help=_("these messages"))
        parser.add_argument("--topic", help=_("with --biz-id: every message with this topic and biz-id"))
        parser.add_argument("--biz-id", help=_("see --topic"))
        parser.add_argument("--database", help=_("search only this alias (default: all that have the tables)"))
        parser.add_argument("--json", action="store_true", help=_("print one JSON object per message"))

    def handle(self, *args: Any, **options: Any) -> None:
        aliases = None if options["database"] is None else [options["database"]]
        for alias in aliases or ():
            if alias not in connections:
                words = _("There is no database %(alias)s. DATABASES has: %(known)s.")
                raise CommandError(words % {"alias": repr(alias), "known": ", ".join(connections)})
        for alias, app in product(connections if aliases is None else aliases, apps_asked()):
            if problem := why_unmigrated(alias, app, begun=aliases is None):
                raise CommandError(problem)
        lives = [life_of(name, aliases) for name in _named(options, aliases)]
        for life in lives:
            if not life.is_known:
                words = _("Message %(message)s was not found. %(searched)s")
                raise CommandError(words % {"message": repr(life.message_id), "searched": _unknown(life)})
        if options["json"]:
            self.stdout.write("\n".join(json.dumps(_as_json(life)) for life in lives))
        else:
            width = max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST))
            self.stdout.write("\n\n".join("\n".join(_drawn(life, width)) for life in lives))


def _named(options: dict[str, Any], aliases: list[str] | None) -> list[str]:
    message_ids, topic, biz_id = (options[name] for name in ("message_ids", "topic", "biz_id"))
    if message_ids and topic is None and biz_id is None:
        return list(message_ids)
    if message_ids or topic is None or biz_id is None:
        raise CommandError(_("Say which messages: MESSAGE_ID …, or --topic TOPIC and --biz-id BIZ_ID together."))
    found = ids_of(topic, biz_id, aliases)
    if not found:
        words = _("No row has topic %(topic)s and biz-id %(biz_id)s. A purged message can be found by its id only.")
        raise CommandError(words % {"topic": repr(topic), "biz_id": repr(biz_id)})
    return found


def _unknown(life: Life) -> str:
    return " ".join([_("Searched: %(places)s.") % {"places": "; ".join(life.searched)}, *life.unknown])


def _as_json(life: Life) -> dict[str, Any]:
    return {
        "message_id": life.message_id,
        "life": [
            {
                "at": moment.at.isoformat(),
                "where": moment.where,
                "from": moment.was,
                "to": moment.became,
                "process": moment.process,
                "reason": moment.reason,
                "database": moment.database,
            }
            for moment in life.moments
        ],
        "now": [
            {
                "where": standing.where,
                "state": standing.state,
                "topic": standing.topic,
                "biz_id": standing.biz_id,
                "attempts": standing.attempts,
                "due": standing.due and standing.due.isoformat(),
                "error": standing.error,
                "database": standing.database,
            }
            for standing in life.standings
        ],
        "unknown": list(life.unknown),
        "namesakes": list(life.namesakes),
    }


def _drawn(life: Life, width: int) -> Iterator[str]:
    yield _("message %(message)s") % {"message": life.message_id}
    for topic, biz_id in dict.fromkeys((standing.topic, standing.biz_id) for standing in life.standings):
        yield visible(f"topic   {topic}")
        yield visible(f"biz-id  {biz_id}")
    if life.moments:
        yield ""
        yield from _moments(life, width)
    if life.standings:
        yield ""
        yield _("Now")
        for standing in life.standings:
            yield from _wrapped(_standing(standing), width, indent=2)
    notes = list(life.unknown)
    if life.namesakes:
        words = _("Other messages with this topic and biz-id, of which a handler runs one: %(messages)s.")
        notes.append(words % {"messages": ", ".join(life.namesakes)})
    if notes:
        yield ""
        for note in notes:
            yield from _wrapped(note, width)


def _moments(life: Life, width: int) -> Iterator[str]:
    """One line per moment: instant, transition, where, and the process if the line has room; the reason below."""
    rows = [(_instant(moment.at), _transition(moment), _where(moment), moment.process) for moment in life.moments]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    indent = widths[0] + len(_GAP)
    in_a_row = sum(widths) + 3 * len(_GAP) <= width
    time = _("Time (%(zone)s)") % {"zone": timezone.get_current_timezone_name()}
    transition, where = _("Transition"), _("Where")
    yield f"{time:{widths[0]}}{_GAP}{transition:{widths[1]}}{_GAP}{where}"
    for moment, (at, transition, where, process) in zip(life.moments, rows, strict=True):
        begun = f"{at}{_GAP}{transition:{widths[1]}}{_GAP}"
        if in_a_row:
            yield visible(f"{begun}{where:{widths[2]}}{_GAP}{process}".rstrip())
        elif len(begun) + len(where) <= width:
            yield visible(f"{begun}{where}")
        else:
            yield begun.rstrip()
            yield from _wrapped(where, width, indent=indent)
        if process and not in_a_row:
            yield from _wrapped(process, width, indent=indent)
        if moment.reason:
            yield from _wrapped(moment.reason, width, indent=indent, lines=_MOST_LINES)


def _instant(at: datetime) -> str:
    return exact(at)[:23]


def _transition(moment: Moment) -> str:
    return f"{moment.was} → {moment.became}" if moment.was else f"→ {moment.became}"


def _where(moment: Moment | Standing) -> str:
    return moment.where if moment.database == "default" else f"{moment.where} ({moment.database})"


def _standing(standing: Standing) -> str:
    count = standing.attempts
    words = [standing.state, ngettext("%(count)s attempt", "%(count)s attempts", count)]
    if standing.due is not None:
        seconds = int((standing.due - utcnow()).total_seconds())
        due = _("due since %(time)s") if seconds < 0 else _("due at %(time)s, in %(seconds)s s")
        words.append(due % {"time": exact(standing.due)[:19], "seconds": seconds})
    if standing.also:
        words.append(standing.also)
    said = f"{_where(standing)}: {', '.join(words)}"
    return f"{said}: {standing.error}" if standing.error else said


def _wrapped(text: str, width: int, *, indent: int = 0, lines: int | None = None) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        visible(" ".join(text.split())),
        width,
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
        max_lines=lines,
        placeholder=" …",
    )
