"""The handlers of the inbox on the page of topics and handlers, and their runs under leases on the page of what runs now."""

from collections.abc import Mapping
from functools import cache, partial

from django.utils.translation import gettext_lazy as _

from exactly_once.admin.busy import LeasedRun, register_leased
from exactly_once.admin.traffic import Traffic, register_traffic
from exactly_once.management_api import QueueDepths
from exactly_once.operators.minutes import Minutes
from exactly_once.sql.connections import with_table
from inbox.conf import inbox_options
from inbox.consumer.topology import queues_of
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, PausedHandler, State
from inbox.operators import accounting

_BACKLOG = (State.RECEIVED, State.WAITING, State.RUNNING)
_read_depths = cache(QueueDepths)


def _names(alias: str, most: int) -> list[str]:
    known = [handler.name for handler in registry.all() if handler.using == alias]
    return [*known, *(name for name, _topic in accounting.handlers_with_topics(alias, most))]


def _depths() -> Mapping[str, int] | None:
    """The messages in the queues of each handler of this process; one whose queues do not exist is left out."""
    options = inbox_options()
    known = _read_depths(options.broker_url, options.MANAGEMENT_URL).known()
    if known is None:
        return None
    queues = {handler.name: [queue.name for queue in queues_of(handler, options)] for handler in registry.all()}
    return {name: sum(known.get(queue, 0) for queue in of) for name, of in queues.items() if known.keys() & {*of}}


def _leased(alias: str, most: int) -> list[LeasedRun]:
    if not with_table(InboxMessage, [alias])[0]:
        return []
    running = InboxMessage.objects.using(alias).filter(state=State.RUNNING, next_attempt_at__isnull=False)
    columns = running.order_by("next_attempt_at").values_list("handler", "message_id", "next_attempt_at")
    return [LeasedRun(*columns) for columns in columns[:most]]


register_leased("inbox", _leased)
register_traffic(
    Traffic(
        app="inbox",
        kind="handler",
        title=_("Handlers"),
        backlog=_BACKLOG,
        counts=partial(accounting.counts_by_handler, states=(*_BACKLOG, State.RETRYING, State.DEAD)),
        names=_names,
        minutes=Minutes("inbox"),
        done="handled",
        lag="to_effect",
        paused=PausedHandler.objects,
        depths=_depths,
    )
)
