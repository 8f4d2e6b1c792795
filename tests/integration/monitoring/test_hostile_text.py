"""Text of others in log lines and in what commands print: it cannot begin a line, reorder one, or control a terminal."""

import io
import json
import logging
import pickle
import re
from datetime import datetime

import pytest
from django.core.management import CommandError, call_command
from django.urls import reverse

from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import StopRequest
from inbox.consumer.runner import Runner
from inbox.contrib.http import subscribe
from inbox.contrib.outgoing_webhooks import Endpoint, send_webhooks
from inbox.contrib.outgoing_webhooks.service import EndpointHandlers
from inbox.models import InboxMessage
from inbox.testing import deliver as deliver_and_drain
from inbox.testing import make_message
from tests.support.admin_pages import Page, act, staff_client
from tests.support.commands import output_of
from tests.support.deliveries import OPTIONS, an_envelope, deliver, options
from tests.support.fakes.receiver import Receiver, Reply
from tests.support.http_api import HTTP, Api
from tests.support.inbox_rows import delete_messages

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

FORGED = "2026-03-01 10:00:00,000 CRITICAL shop: money is lost"
HOSTILE = f"boom\r\n{FORGED}\n{FORGED}\x1b[2J\x9b1m\x08"
TOPIC = "shop.\u2028order\u0085.\u202eplaced\u2066\u061c"
ONE_ATTEMPT = options(MAX_ATTEMPTS=1)
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture
def log():
    """What a project's log handler writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    yield stream
    root.removeHandler(handler)


@pytest.fixture(autouse=True)
def registered(settings, own_handlers):
    settings.INBOX = {"WEBHOOK_NETWORKS": ["127.0.0.0/8"], "MAX_ATTEMPTS": 1}


def fail(message):
    raise ValueError(HOSTILE)


def is_harmless(text, *, quotes):
    assert quotes in text
    assert not FORBIDDEN.search(text)
    return not [line for line in text.split("\n") if line.startswith(FORGED)]


def test_error_traceback_and_topic_of_a_handler_forge_no_log_line(log, handles, caplog):
    def fail_with_its_topic(message):
        raise ValueError(f"no place for {message.topic}")

    deliver(handles(fail), an_envelope(), given=ONE_ATTEMPT)
    deliver(handles(fail_with_its_topic, topic=TOPIC), an_envelope(topic=TOPIC), given=ONE_ATTEMPT)
    escaping_logger("inbox.tests").error("for the test", exc_info=a_chain())
    assert is_harmless(log.getvalue(), quotes="The above exception was the direct cause")
    assert "is a dead letter" in log.getvalue()
    assert "no place for shop." in log.getvalue()
    record, _ = [record for record in caplog.records if "dead letter" in record.getMessage()]
    assert "%s" in record.msg, "a handler of the project can still group records by their template"
    assert any("boom" in str(value) for value in record.args)


def a_chain():
    error = RuntimeError(f"outer {HOSTILE}")
    error.__cause__ = ValueError(HOSTILE)
    return error


def test_error_that_a_client_reports_forges_no_log_line(log, settings):
    settings.OUTBOX, settings.ROOT_URLCONF = {"HTTP": HTTP}, "tests.support.http_urls"
    subscribe("shop.order.placed")
    deliver_and_drain(make_message("shop.order.placed", {}))
    path = "inbox/subscriptions/shop.order.placed"
    [message] = Api().post(f"{path}/read", {"lease": 60}).json()["messages"]
    Api().post(f"{path}/release", {"leases": [message["lease"]], "error": HOSTILE})
    assert is_harmless(log.getvalue(), quotes="boom")


def test_answer_of_an_endpoint_forges_no_log_line(log):
    send_webhooks("shop.order.placed")
    with Receiver() as receiver:
        receiver.answer = lambda request: Reply(500, body=HOSTILE.encode())
        Endpoint.objects.create(name="partner", url=receiver.url)
        deliver_and_drain(make_message("shop.order.placed", {}))
        known = EndpointHandlers(["default"])
        known.refresh()
        Runner(OPTIONS, handlers=known.all, reports_unknown=False).drain(StopRequest())
    assert is_harmless(log.getvalue(), quotes="boom")


def test_record_from_another_process_is_handled_again(log):
    """As by a QueueHandler, whose listener gives the record to the logger of its name."""
    logger = escaping_logger("inbox.tests")
    record = logger.makeRecord("inbox.tests", logging.ERROR, __file__, 1, "for the test: %s", (HOSTILE,), None)
    logger.handle(record)
    logger.handle(pickle.loads(pickle.dumps(record)))
    assert log.getvalue().count("for the test") == 2
    assert is_harmless(log.getvalue(), quotes="boom")


class RecordOfTheProject(logging.LogRecord):
    pass


def test_record_of_the_projects_own_class_keeps_it_and_is_escaped(log, caplog):
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(RecordOfTheProject)
    try:
        escaping_logger("inbox.tests").error("for the test: %s", HOSTILE)
        logging.getLogger("shop").error("of the project: %s", "a\x08")
    finally:
        logging.setLogRecordFactory(before)
    assert all(isinstance(record, RecordOfTheProject) for record in caplog.records)
    assert log.getvalue().endswith("shop: of the project: a\x08\n")
    assert is_harmless(log.getvalue().removesuffix("\x08\n"), quotes="boom")


def test_commands_print_no_control_characters_of_a_message(handles):
    deliver(handles(fail, topic=TOPIC, name="tests.hostile"), an_envelope(topic=TOPIC), given=ONE_ATTEMPT)
    for command in (["exactly_once_trail", InboxMessage.objects.get().message_id], ["exactly_once_status"]):
        assert is_harmless(output_of(*command), quotes="tests.hostile")


def test_error_of_a_command_prints_no_control_characters(capsys):
    from exactly_once.management.commands.exactly_once_trail import Command  # noqa: PLC0415

    with pytest.raises(SystemExit):
        Command().run_from_argv(["manage.py", "exactly_once_trail", "--topic", TOPIC, "--biz-id", "x\x1b[2J"])
    assert is_harmless(capsys.readouterr().err, quotes="No message has topic")


@pytest.mark.every_database
@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Pacific/Kiritimati"])
@pytest.mark.parametrize("day", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
def test_message_of_the_calendars_first_or_last_day_is_listed_shown_exported_and_imported(
    day, zone, settings, handles, tmp_path
):
    settings.TIME_ZONE = zone
    instant = datetime.fromisoformat(day)
    deliver(handles(fail, name="tests.fails"), an_envelope(created_at=instant), given=ONE_ATTEMPT)
    row = InboxMessage.objects.get()
    assert row.created_at == instant
    client = staff_client("view_inboxmessage", "export_inboxmessage", "view_trailentry")
    page = "admin:inbox_inboxmessage_changelist"
    assert client.get(reverse(page)).status_code == 200
    assert day[:10] in Page(client.get(reverse("admin:inbox_inboxmessage_change", args=[row.pk]))).text
    file = tmp_path / "dead.jsonl"
    file.write_bytes(b"".join(act(client, "export", row, page=page).streaming_content))
    delete_messages()
    call_command("exactly_once_import", str(file), verbosity=0)
    assert InboxMessage.objects.get().created_at == instant
    call_command("exactly_once_trail", row.message_id, stdout=io.StringIO())


def test_instant_beyond_the_calendar_is_refused_by_an_import_and_the_other_lines_are_imported(handles, tmp_path):
    deliver(handles(fail), an_envelope(), given=ONE_ATTEMPT)
    line = json.loads(output_of("exactly_once_export", stderr=io.StringIO()))
    delete_messages()
    file = tmp_path / "dead.jsonl"
    instants = ["9999-12-31T23:59:59-14:00", line["created_at"]]
    file.write_text("".join(json.dumps({**line, "created_at": at}) + "\n" for at in instants))
    out = io.StringIO()
    with pytest.raises(CommandError, match="1 imported, 0 here already, 1 refused"):
        call_command("exactly_once_import", str(file), stdout=out)
    assert "created_at is" in out.getvalue()
