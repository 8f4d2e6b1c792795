"""The statistics of each minute; see `outbox.database.minutes`."""

from outbox.database.minutes import Minutes, MinuteWriter
from outbox.kernel.statistics import Tally
from outbox.models import MinuteStatistics

minutes = Minutes(MinuteStatistics)


def writer(alias: str, tally: Tally) -> MinuteWriter:
    return MinuteWriter(MinuteStatistics, alias, tally)
