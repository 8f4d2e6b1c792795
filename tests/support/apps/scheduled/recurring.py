from outbox import Draft
from outbox.contrib.recurring import Tick, recurring
from tests.support.apps.scheduled import EVERY, NAME, TOPIC


@recurring(every=EVERY, missed="all", name=NAME)
def recount(tick: Tick) -> Draft:
    return Draft(TOPIC, {"at": tick.at})
