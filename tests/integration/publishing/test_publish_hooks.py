"""`OUTBOX["PUBLISH_HOOKS"]`: functions that add headers to each message when it is published."""

from functools import partial

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import override_settings

from outbox import Draft, InvalidMessage, apublish, apublish_many, checker, prepare, publish, publish_many
from outbox import request as ask
from outbox.callbacks import checkers
from outbox.models import OutboxMessage
from tests.support import hooks
from tests.support.relaying import TOPIC, row_of

pytestmark = pytest.mark.django_db(transaction=True)


def hooked_by(*names):
    return override_settings(OUTBOX={"PUBLISH_HOOKS": [f"tests.support.hooks.{name}" for name in names]})


@pytest.mark.parametrize(
    "publishing",
    [
        lambda: publish(TOPIC, 1),
        lambda: ask(TOPIC, 1),
        lambda: publish_many([Draft(TOPIC, 1)])[0],
        lambda: publish_many([Draft(TOPIC, 1)] * 20)[19],
        lambda: async_to_sync(apublish)(TOPIC, 1),
        lambda: async_to_sync(apublish_many)([Draft(TOPIC, 1)])[0],
    ],
    ids=["publish", "request", "publish_many", "publish_many by COPY", "apublish", "apublish_many"],
)
def test_headers_of_hooks_are_added_in_every_form_of_publishing(publishing):
    token = hooks.TENANT.set("globex")
    hooks.in_transaction.clear()
    try:
        with hooked_by("tenant"), transaction.atomic():
            message = publishing()
    finally:
        hooks.TENANT.reset(token)

    assert row_of(message).headers == {"tenant": "globex", "about": TOPIC}
    assert set(hooks.in_transaction) == {True}


def test_headers_of_hooks_are_added_to_a_prepared_message(request):
    request.addfinalizer(partial(checkers.remove, TOPIC))
    checker(TOPIC)(lambda message: None)

    with hooked_by("tenant"):
        message = prepare(TOPIC, 1)

    assert OutboxMessage.objects.get(message_id=message.id).headers == {"tenant": "acme", "about": TOPIC}


def test_hook_sees_the_headers_so_far_and_replaces_none():
    with hooked_by("tenant", "nothing", "seen"), transaction.atomic():
        message = publish(TOPIC, 1, headers={"about": "ours", "language": "de"})

    assert row_of(message).headers == {"tenant": "acme", "about": "ours", "language": "de", "seen": "about,language,tenant"}


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("failing", LookupError, "no such tenant"),
        ("reserved", InvalidMessage, "hooks.reserved returned .* 'x-tenant' is reserved"),
        ("nested", InvalidMessage, "hooks.nested returned .* 'tenant' is"),
        ("no_headers", InvalidMessage, "hooks.no_headers returned .* it must be a dict"),
    ],
)
@pytest.mark.parametrize("publishing", [lambda: publish(TOPIC, 1), lambda: publish_many([Draft(TOPIC, 1)])])
def test_error_of_a_hook_reaches_the_caller_and_nothing_is_written(publishing, name, error, reason):
    with hooked_by(name), transaction.atomic(), pytest.raises(error, match=reason):
        publishing()

    assert not OutboxMessage.objects.exists()


def test_headers_of_the_call_must_be_a_dict_as_without_hooks():
    with hooked_by("tenant"), transaction.atomic(), pytest.raises(InvalidMessage, match="headers is"):
        publish(TOPIC, 1, headers=["tenant"])
