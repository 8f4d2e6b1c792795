"""The topics of the outbox on the page of topics and handlers."""

from functools import partial

from django.utils.translation import gettext_lazy as _

from exactly_once.admin.traffic import Traffic, register_traffic
from exactly_once.operators.minutes import Minutes
from outbox.models import PausedTopic
from outbox.operators import figures
from outbox.states import State
from outbox.store import operating

_BACKLOG = (State.READY, State.WAITING, State.PAUSED)

register_traffic(
    Traffic(
        app="outbox",
        kind="topic",
        title=_("Topics"),
        backlog=_BACKLOG,
        counts=partial(figures.counts_by_topic, states=(*_BACKLOG, State.RETRYING, State.DEAD)),
        names=operating.topics,
        minutes=Minutes("outbox"),
        done="published",
        lag="to_broker",
        paused=PausedTopic.objects,
        depths=lambda: None,
    )
)
