"""The statistics of each minute; see `exactly_once.operators.minutes`."""

from exactly_once.operators.minutes import Minutes, MinuteWriter
from exactly_once.telemetry.statistics import Tally
from outbox.models import MinuteStatistics

minutes = Minutes(MinuteStatistics)


def writer(alias: str, tally: Tally) -> MinuteWriter:
    return MinuteWriter(MinuteStatistics, alias, tally)
