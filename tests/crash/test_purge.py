"""History and receipts are deleted while their messages are redelivered and consumers are killed."""

import json
import logging
import random
import re
from dataclasses import replace
from datetime import timedelta

from inbox.models import InboxMessage
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.commands import output_of
from tests.support.crash.nemesis import Nemesis
from tests.support.crash.world import CONSUMER
from tests.support.sql import executed
from tests.support.waiting import wait_until

logger = logging.getLogger(__name__)


HISTORY, RETENTION = timedelta(seconds=6), timedelta(seconds=16)
"""A message is not run once it is 12 s old. Few are under way at any time, so only a stalled machine delivers one so late."""
MESSAGES_AT_ONCE, COPIES_AT_ONCE, MOST_UNDER_WAY = 3, 20, 20
ENOUGH_PURGED, ENOUGH_KILLS = 100, 10


def send_again(choice, number):
    """Make published messages ready again, with their age, as if a relay had died before it could settle them."""
    sent = list(OutboxMessage.objects.filter(state="published").values_list("pk", flat=True))
    copied = choice.sample(sent, min(number, len(sent)))
    OutboxMessage.objects.filter(pk__in=copied, state="published").update(state="ready", settled_at=None, day=0)


def purge():
    """Purge the inbox; return the number of deleted receipts."""
    said = output_of("exactly_once_purge", app="inbox")
    return int(re.search(r"^receipts +([\d,]+)$", said, re.MULTILINE)[1].replace(",", ""))


def held_back():
    return InboxMessage.objects.filter(state="dead")


def handled_without_effect():
    """In one statement, so that it sees both or neither. A receipt without effect would look like a late message later."""
    return executed(
        "SELECT message_id FROM inbox_inboxmessage WHERE state = 'done' AND NOT EXISTS "
        f"(SELECT FROM {Effect._meta.db_table} WHERE name = convert_from(body, 'UTF8')::json->>'operation')"
    )


def test_purging_during_repeated_deliveries_doubles_and_loses_no_effect(world, handles, settings):
    handles(print, topic="crash.done", name="crash.apply")  # a command of another service would leave its messages
    settings.INBOX = {"KEEP_HISTORY": HISTORY, "RETENTION": RETENTION}
    world.inbox_options.update({name: value.total_seconds() for name, value in settings.INBOX.items()})
    choice = random.Random(world.seed)
    operated = purged = 0
    world.listening()  # this one lives: what is delivered for the first time is in time
    relay = world.relay()
    world.wait_until(lambda: relay.is_ready, "the relay publishes at once")
    nemesis = Nemesis(world, [world.listening(), world.listening()])

    with nemesis.at_work():
        while purged < ENOUGH_PURGED or nemesis.kills[CONSUMER] < ENOUGH_KILLS:
            world.operate(MESSAGES_AT_ONCE)
            operated += MESSAGES_AT_ONCE
            wait_until(lambda enough=operated - MOST_UNDER_WAY: Effect.objects.count() >= enough)
            send_again(choice, COPIES_AT_ONCE)
            assert handled_without_effect() == []
            purged += purge()
    send_again(choice, operated)
    found = world.drain()
    late = found.lost.intersection(json.loads(bytes(body))["operation"] for body in held_back().values_list("body", flat=True))

    figures = {
        "seed": world.seed,
        "operations": operated,
        "purged": purged,
        "held back": held_back().count(),
        "late": len(late),
        "deliveries": world.deliveries().total(),
        "suppressed": world.suppressed(),
        "kills": dict(nemesis.kills),
        "verdict": str(found),
    }
    logger.info("%s", figures)
    assert not nemesis.own_ends, nemesis.own_ends
    assert found.committed == operated
    assert replace(found, lost=found.lost - late).is_clean, f"{found}, seed {world.seed}\n{world.tails()}"
    assert world.suppressed()
    assert set(world.inbox()) == {"done", "dead"}
    # Only copies that arrive after their receipt was deleted are held back, and what a stalled machine has delivered late.
    assert all("past the deduplication window" in reason for reason in held_back().values_list("last_error", flat=True))
