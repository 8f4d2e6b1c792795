"""A password in a mistyped setting is printed by no check and no command."""

import io
import json
import re
from itertools import cycle

import hypothesis
import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings
from hypothesis import strategies as st

from tests.support.servers.private import free_port
from tests.support.waiting import wait_until

SECRET = "Xy7secret7yX"

MISTYPED = [
    *(["amqp://user:{secret}@host"], [["amqp://user:{secret}@host"]], {"url": "amqp://user:{secret}@host"}),
    *("amqp:/user:{secret}@host", "user:{secret}@host", "{secret}", "amqp://user:{secret}", "ampq://user:{secret}@host"),
    *(f"amqp://user:a{sign}{{secret}}@host" for sign in "/?#;"),
    *("amqp://user:{secret}@host;", "amqp://user:{secret}@host;redis://host"),
    *("http://user:{secret}@host:15x", "user:{secret}@host:15672"),
]
"""What people write instead of a URL."""
ODD = ["redis://host?password={secret}", "redis://{secret}@host", "redis://:12/{secret}@host"]
"""URLs that can be read, if not as they are meant."""


def filled(value, secret=SECRET):
    return json.loads(json.dumps(value).replace("{secret}", json.dumps(secret)[1:-1]))


OPTIONS = [("OUTBOX", "BROKER_URL"), *(("INBOX", name) for name in ("BROKER_URL", "LEASE_STORE", "MANAGEMENT_URL"))]
OTHER_OPTIONS = [
    *(("OUTBOX", name) for name in ("EXCHANGE", "LISTEN_ALIAS", "BATCH_SIZE", "TRAIL", "BROKER")),
    *(("INBOX", name) for name in ("EXCHANGE", "GROUP", "QUEUE_TYPE", "KEEP_HISTORY", "broker_url")),
]


def checked(**settings):
    """Everything that `manage.py check --deploy` prints."""
    out, err = io.StringIO(), io.StringIO()
    with override_settings(**{"OUTBOX": {}, "INBOX": {}, **settings}):
        try:
            call_command("check", deploy=True, stdout=out, stderr=err)
        except CommandError as error:
            print(error, file=err)
    return out.getvalue() + err.getvalue()


EACH = [(*option, value) for option, value in zip(cycle(OPTIONS), MISTYPED, strict=False)]


@pytest.mark.parametrize(("setting", "option", "value"), EACH, ids=json.dumps)
def test_check_reports_a_mistyped_url_without_its_password(setting, option, value):
    said = checked(**{setting: {option: filled(value)}})

    assert SECRET not in said
    assert re.search(r"(outbox|inbox)\.E\d", said)


@pytest.mark.parametrize("value", MISTYPED, ids=json.dumps)
def test_check_reports_a_setting_that_is_not_a_dict_without_its_password(value):
    for setting in ("OUTBOX", "INBOX"):
        said = checked(**{setting: [filled(value)]})

        assert SECRET not in said
        assert f"{setting} must be a dict, not a list." in said


MARKS = st.text(alphabet="/?#@:;&=%+ []\\'\"\n\t\x00é℀a1", max_size=5)


VALUES = st.sampled_from([*MISTYPED, *ODD, "amqp://user:{secret}@host//"])


@pytest.mark.long
@hypothesis.given(st.sampled_from([*OPTIONS, *OTHER_OPTIONS]), VALUES, MARKS, MARKS, st.booleans())
@hypothesis.settings(max_examples=100)
def test_check_prints_no_password_whatever_its_characters_and_wherever_it_is_written(option, value, before, after, repeated):
    """Also as the name of an option, and in both settings at once."""
    setting, name = option
    hypothesis.assume(value != "{secret}" or option in OPTIONS)
    # What follows the '@' is the host.
    hypothesis.assume(value != "amqp://user:{secret}" or "@" not in before)
    given = filled(value, f"{before}{SECRET}{after}")
    # A name alone must be shown, so that the user can correct it.
    settings = {setting: {name: given, given: name} if isinstance(given, str) and value != "{secret}" else {name: given}}
    if repeated:
        settings = {"OUTBOX": {"BROKER_URL": given}, "INBOX": {"BROKER_URL": given, "LEASE_STORE": given}}

    assert SECRET not in checked(**settings)


@pytest.mark.parametrize("value", MISTYPED[::5], ids=json.dumps)
def test_commands_refuse_a_mistyped_broker_without_printing_its_password(command, value):
    settings = {"OUTBOX": {"BROKER_URL": filled(value)}, "INBOX": {}}
    for name in ("outbox_relay", "inbox_consume"):
        with command(name, "--skip-checks", "--drain", **settings) as process:
            wait_until(process.has_ended)

        assert process.ends() != 0
        assert SECRET not in process.said()


@pytest.mark.parametrize("name", ["outbox_relay", "inbox_consume"])
def test_log_of_a_process_whose_broker_is_unavailable_shows_no_password(command, name):
    url = f"amqp://user:{SECRET}@127.0.0.1:{free_port()}//;amqp://user:{SECRET}@127.0.0.1:{free_port()}//"
    with command(name, OUTBOX={"BROKER_URL": url}) as process:
        process.until(lambda: "The broker is" in process.said())
        with command("exactly_once_status", OUTBOX={"BROKER_URL": url}) as shown:
            assert shown.ends() == 0
        assert process.end() == 0

    assert SECRET not in process.said()
