"""The topics of the outbox on the page of topics and handlers."""

from functools import partial

from django.utils.translation import gettext_lazy as _

from exactly_once.admin.traffic import Traffic, register_traffic
from outbox.models import PausedTopic
from outbox.states import State
from outbox.store import figures, operating
from outbox.store.statistics import minutes

_BACKLOG = (State.READY, State.WAITING, State.PAUSED)

register_traffic(
    Traffic(
        app="outbox",
        kind="topic",
        title=_("Topics"),
        backlog=_BACKLOG,
        counts=partial(figures.counts_by_topic, states=(*_BACKLOG, State.RETRYING, State.DEAD)),
        names=operating.topics,
        minutes=minutes,
        lag="to_broker",
        paused=PausedTopic.objects,
        depths=lambda: None,
    )
)
