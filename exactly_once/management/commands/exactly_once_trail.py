import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from itertools import product
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import connections
from django.utils import timezone
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import TranslatedCommand
from exactly_once.console.cli.terminal import BOLD, Line, Table, show
from exactly_once.console.display import exact, ngettext
from exactly_once.console.operators.message_history import MessageHistory, history_of, ids_of, searched
from exactly_once.console.operators.trail import HistoryEvent, PresentState
from exactly_once.packages import registered
from exactly_once.process.clock import utcnow
from exactly_once.sql.schema import require_alias, why_unmigrated

_MOST_OF_A_REASON = 300
"""Characters; `--json` and the admin show all of it."""


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
            require_alias(alias)
        places = product(connections if aliases is None else aliases, registered())
        if problems := [problem for place in places if (problem := why_unmigrated(*place, begun=aliases is None))]:
            raise CommandError(" ".join(problems))
        histories = [history_of(name, aliases) for name in _named(options, aliases)]
        for history in histories:
            if not history.is_known:
                words = _("Message %(message)s was not found. Searched: %(places)s.")
                said = words % {"message": repr(history.message_id), "places": searched(aliases)}
                raise CommandError(" ".join([said, *history.unknown]))
        if options["json"]:
            self.stdout.write("\n".join(json.dumps(_as_json(history), default=datetime.isoformat) for history in histories))
        else:
            show([table for history in histories for table in _drawn(history)], self.stdout)


def _named(options: dict[str, Any], aliases: list[str] | None) -> list[str]:
    message_ids, topic, biz_id = (options[name] for name in ("message_ids", "topic", "biz_id"))
    if message_ids and topic is None and biz_id is None:
        return list(message_ids)
    if message_ids or topic is None or biz_id is None:
        raise CommandError(_("Say which messages: MESSAGE_ID …, or --topic TOPIC and --biz-id BIZ_ID together."))
    found = ids_of(topic, biz_id, aliases)
    if not found:
        words = _(
            "No message has topic %(topic)s and biz-id %(biz_id)s. Searched: %(places)s. Check the spelling of both. If the "
            "message was purged, give its id in place of them."
        )
        raise CommandError(words % {"topic": repr(topic), "biz_id": repr(biz_id), "places": searched(aliases)})
    return found


def _as_json(history: MessageHistory) -> dict[str, Any]:
    return {
        "message_id": history.message_id,
        "life": [asdict(moment) for moment in history.moments],
        "now": [asdict(standing) for standing in history.standings],
        "unknown": list(history.unknown),
        "namesakes": list(history.namesakes),
    }


def _drawn(history: MessageHistory) -> Iterator[Table]:
    head = [Line([_("message"), history.message_id])]
    for topic, biz_id in dict.fromkeys((standing.topic, standing.biz_id) for standing in history.standings):
        head += [Line([_("topic"), topic]), Line(["biz-id", biz_id])]
    yield Table(head, texts=1)
    if history.moments:
        time = _("Time (%(zone)s)") % {"zone": timezone.get_current_timezone_name()}
        lines = [Line([exact(moment.at)[:23], _transition(moment), _about(moment)]) for moment in history.moments]
        yield Table([Line([time, _("Transition"), _("Where")], BOLD), *lines], texts=2)
    if history.standings:
        yield Table([Line([_("Now")], BOLD), *(Line([_standing(standing)]) for standing in history.standings)], texts=1)
    notes = list(history.unknown)
    if history.namesakes:
        words = _("Other messages with this topic and biz-id, of which a handler runs one: %(messages)s.")
        notes.append(words % {"messages": ", ".join(history.namesakes)})
    if notes:
        yield Table([Line([note]) for note in notes], texts=1)


def _about(moment: HistoryEvent) -> str:
    """Where it was, in which process and why."""
    reason = Truncator(" ".join(moment.reason.split())).chars(_MOST_OF_A_REASON)
    return ", ".join(filter(None, [moment.place, moment.process, reason]))


def _transition(moment: HistoryEvent) -> str:
    return f"{moment.was} → {moment.became}" if moment.was else f"→ {moment.became}"


def _standing(standing: PresentState) -> str:
    count = standing.attempts
    words = [standing.state, ngettext("%(count)s attempt", "%(count)s attempts", count)]
    if standing.due is not None:
        seconds = int((standing.due - utcnow()).total_seconds())
        due = _("due since %(time)s") if seconds < 0 else _("due at %(time)s, in %(seconds)s s")
        words.append(due % {"time": exact(standing.due)[:19], "seconds": seconds})
    if standing.also:
        words.append(standing.also)
    said = f"{standing.place}: {', '.join(words)}"
    return f"{said}: {' '.join(standing.error.split())}" if standing.error else said
