"""Loads of deliveries without a broker: what a worker of the consumer gets from its lane, and what it answers."""

import kombu

from exactly_once.process.clock import monotonic
from inbox.consumer.answers import Acks, Delivery
from inbox.consumer.reception import Reception
from inbox.consumer.runner import Runner
from tests.support.deliveries import OPTIONS, an_envelope


def a_delivery(handler, envelope=None, *, redelivered=False, waited=0.0):
    """A delivery as kombu hands it over, which arrived `waited` seconds ago."""
    envelope = an_envelope(topic=handler.topics[0]) if envelope is None else envelope
    message = kombu.Message(
        body=envelope.body,
        headers=envelope.to_headers(),
        properties={"message_id": envelope.id},
        content_type=envelope.content_type,
        content_encoding="utf-8",
        delivery_info={"routing_key": handler.topics[0], "redelivered": redelivered},
    )
    return Delivery(Acks(None, multiple=False), handler, message, monotonic() - waited)


def receive_load(load, given=OPTIONS, *, by=Reception.receive):
    """What a worker answers to each delivery of a load, in the load's order; None to those it leaves with the broker."""
    answers = {}

    def answer(outcomes):
        for delivery, received in outcomes:
            answers.setdefault(id(delivery), []).append(received)

    reception = Reception(given, Runner(given), answer)
    by(reception, load)
    assert all(len(given) == 1 for given in answers.values()), "answered twice"
    assert sum(reception.outcomes.values()) == len(answers)
    return [answers.get(id(delivery), [None])[0] for delivery in load]


def receive_together(handler, envelopes, given=OPTIONS):
    """`receive_load` of fresh deliveries."""
    return receive_load([a_delivery(handler, envelope) for envelope in envelopes], given)
