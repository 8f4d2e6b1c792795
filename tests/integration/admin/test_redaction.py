"""Payloads that a function of the project redacts, on every page of the console that shows one."""

import json
import logging

import pytest
from django.core.checks import run_checks
from django.urls import reverse

from exactly_once.console.operators.redaction import Redaction, RedactionFailed
from exactly_once.process.clock import utcnow
from inbox.models import InboxMessage
from outbox import publish
from tests.support.admin_names import VIEW
from tests.support.admin_pages import Page, a_message, act, an_inbox_message, staff_client
from tests.support.deliveries import an_envelope, deliver, fails, options, the_effect, the_row

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

REDACTORS = "tests.support.redactors"
INBOX_VIEW, EDIT, DRY_RUN, UNREDACTED = (f"{may}_inboxmessage" for may in ("view", "edit", "dry_run", "unredacted"))
INBOX_LIST, INBOX_DETAIL = "admin:inbox_inboxmessage_changelist", "admin:inbox_inboxmessage_change"
SECRET = "DE02120300000000202051"
PAYLOAD = {"iban": SECRET}


@pytest.fixture
def redacting(settings):
    """Set the function of both apps."""

    def use(name, option="REDACT"):
        settings.OUTBOX = {**getattr(settings, "OUTBOX", {}), option: f"{REDACTORS}.{name}"}

    return use


def outbox_page(**columns):
    row = a_message(payload=PAYLOAD, **columns)
    return Page(staff_client(VIEW).get(reverse("admin:outbox_outboxmessage_change", args=[row.pk])))


def inbox_page(**columns):
    row = an_inbox_message(payload=PAYLOAD, **columns)
    return Page(staff_client(INBOX_VIEW).get(reverse(INBOX_DETAIL, args=[row.pk])))


PAGES = pytest.mark.parametrize("page_of", [outbox_page, inbox_page], ids=["outbox", "inbox"])


@PAGES
def test_payload_is_hidden_until_the_operator_asks_for_it_and_shown_as_the_function_returns_it(page_of, redacting):
    page = page_of()
    assert SECRET in page.text
    (details,) = (attributes for attributes in page.all("details") if "message-folded" in attributes.get("class", ""))
    assert "open" not in details
    redacting("mask")

    page = page_of(headers={"tenant": "acme", "argsrepr": f"('{SECRET}',)", "kwargsrepr": f"{PAYLOAD}", "task": "shop.pay"})
    undecodable = page_of(body=f"{SECRET}, not JSON".encode())

    assert SECRET not in page.text
    for expected in ('"iban": "masked"', '"of": "shop.order.placed"', '"for": "acme"'):
        assert expected in page.text
    assert "shop.pay" in page.text, "of the headers of a Celery task only the copies of its arguments are removed"
    assert SECRET not in undecodable.text
    assert "The body cannot be decoded, so it cannot be redacted." in undecodable.text


@PAGES
@pytest.mark.parametrize("name", ["change_and_fail", "return_no_json", "missing", "NOT_CALLABLE"])
def test_function_that_fails_shows_nothing_of_the_payload_and_the_page_says_so(page_of, redacting, name, caplog):
    redacting(name)

    with caplog.at_level(logging.CRITICAL, logger="exactly_once.console.operators.redaction"):
        page = page_of()

    assert SECRET not in page.text
    assert f"The function {REDACTORS}.{name} failed to redact the payload" in page.text


def test_every_stored_copy_of_a_payload_is_redacted(redacting):
    """In the stored form of a Celery message, in the body of a webhook, and beside a conflicting one."""
    redacting("mask")
    wire = json.dumps({"exchange": "", "headers": {"argsrepr": SECRET, "task": "shop.tasks.pay"}})
    body = json.dumps({"type": "shop.order.placed", "timestamp": "2026-01-01T00:00:00Z", "data": PAYLOAD}).encode()
    other = {"conflicting_id": "m-2", "conflicting_body": json.dumps(PAYLOAD).encode(), "conflicting_at": utcnow()}

    celery, webhook = outbox_page(wire=wire), inbox_page(handler="webhook/partner", body=body)
    conflict = inbox_page(state="done", duplicates=1, conflicts=1, **other)

    for page in (celery, webhook, conflict):
        assert SECRET not in page.text
    assert "shop.tasks.pay" in celery.text
    for expected in ('"iban": "masked"', '"of": "shop.order.placed"', '"timestamp": "2026-01-01T00:00:00Z"'):
        assert expected in webhook.text
    assert conflict.text.count('"iban": "masked"') == 2


def test_dry_run_shows_redacted_payloads_and_statements_without_parameters(redacting, handles):
    failing = [True]

    def work(message):
        if failing:
            raise ValueError
        the_effect(message)
        publish("shop.reserved", PAYLOAD, biz_id="reserved-7", headers={"tenant": "acme"})

    deliver(handles(work), an_envelope({**PAYLOAD, "order_id": 7}), given=options(MAX_ATTEMPTS=1))
    failing.clear()
    redacting("mask")
    client = staff_client(INBOX_VIEW, DRY_RUN)

    page = Page(act(client, "dry_run", the_row(), page=INBOX_LIST, confirmed="yes", seconds="10"))

    assert SECRET not in page.text
    for expected in ("It would be handled", "INSERT INTO", '"of": "shop.reserved"', '"for": "acme"'):
        assert expected in page.text


@pytest.mark.parametrize(("may", "is_shown"), [([EDIT], False), ([EDIT, UNREDACTED], True)])
def test_correction_shows_the_stored_payload_and_needs_the_permission_to_see_payloads_unredacted(
    handles, redacting, settings, may, is_shown
):
    deliver(handles(fails), an_envelope(PAYLOAD), given=options(MAX_ATTEMPTS=1))
    redacting("mask")
    client = staff_client(INBOX_VIEW, *may)

    def page():
        return act(client, "edit", the_row(), page=INBOX_LIST).content.decode()

    own = Page(client.get(reverse(INBOX_DETAIL, args=[the_row().pk])))
    assert bool(own.all("button", name="action", value="edit")) == is_shown
    assert (SECRET in page()) == is_shown
    assert InboxMessage.objects.count() == 1
    settings.OUTBOX = {}
    assert SECRET in page(), "without a function, no permission is needed"


def refuse(message):
    raise ValueError(f"cannot book {message.payload['iban']}") from LookupError(f"no account {SECRET}")


class TestErrors:
    """`REDACT_ERRORS` changes errors and tracebacks before they are stored, so no page, command or export has to."""

    def test_error_frames_and_traceback_of_a_handler_are_stored_redacted(self, redacting, handles, caplog):
        redacting("mask_ibans", "REDACT_ERRORS")

        deliver(handles(refuse), an_envelope(PAYLOAD), given=options(MAX_ATTEMPTS=1))

        row = the_row()
        assert row.last_error == "ValueError: cannot book DE…"
        assert "LookupError: no account DE…" in row.traceback
        stored = json.dumps([row.last_error, row.traceback, row.failures])
        assert SECRET not in stored
        assert "test_redaction.py" in stored
        assert SECRET not in caplog.text

    @pytest.mark.parametrize("name", ["echo_and_fail", "return_no_text", "missing"])
    def test_function_that_fails_lets_nothing_be_stored_but_class_and_place(self, redacting, handles, name, caplog):
        redacting(name, "REDACT_ERRORS")

        with caplog.at_level(logging.CRITICAL, logger="exactly_once.conf.settings"):
            deliver(handles(refuse), an_envelope(PAYLOAD), given=options(MAX_ATTEMPTS=1))

        row = the_row()
        assert row.last_error.startswith(f"The function {REDACTORS}.{name} failed to redact this error")
        assert (row.error_class, "refuse" in row.error_place) == ("ValueError", True)
        assert SECRET not in json.dumps([row.last_error, row.traceback, row.failures])

    def test_dry_run_shows_the_redacted_error(self, redacting, handles):
        deliver(handles(refuse), an_envelope(PAYLOAD), given=options(MAX_ATTEMPTS=1))
        InboxMessage.objects.update(last_error="", traceback="", failures=None)
        redacting("mask_ibans", "REDACT_ERRORS")

        client = staff_client(INBOX_VIEW, DRY_RUN)
        page = Page(act(client, "dry_run", the_row(), page=INBOX_LIST, confirmed="yes", seconds="10"))

        assert "cannot book DE…" in page.text
        assert f"cannot book {SECRET}" not in page.text

    def test_inbox_has_a_function_of_its_own_if_it_names_one(self, settings, redacting, handles):
        redacting("missing", "REDACT_ERRORS")
        settings.INBOX = own = {"REDACT_ERRORS": f"{REDACTORS}.mask_ibans"}

        deliver(handles(refuse), an_envelope(PAYLOAD), given=options(MAX_ATTEMPTS=1, **own))

        assert the_row().last_error == "ValueError: cannot book DE…"


def test_inbox_has_a_function_of_its_own_if_it_names_one(settings):
    settings.OUTBOX, settings.INBOX = {"REDACT": f"{REDACTORS}.change_and_fail"}, {"REDACT": f"{REDACTORS}.mask"}

    assert '"iban": "masked"' in inbox_page().text
    assert "failed to redact" in outbox_page().text


def test_export_gets_the_redacted_payload_or_an_error():
    assert Redaction(f"{REDACTORS}.mask").payload("t", PAYLOAD, {}) == {"iban": "masked", "of": "t", "for": ""}
    assert Redaction("").payload("t", PAYLOAD, {}) == PAYLOAD
    with pytest.raises(RedactionFailed) as failed:
        Redaction(f"{REDACTORS}.change_and_fail").payload("t", dict(PAYLOAD), {})
    assert SECRET not in str(failed.value)


@pytest.mark.parametrize("option", ["REDACT", "REDACT_ERRORS"])
@pytest.mark.parametrize("setting", ["OUTBOX", "INBOX"])
def test_check_names_a_function_that_cannot_be_loaded_once(settings, option, setting):
    for path, said in {
        f"{REDACTORS}.maks": f"has no function 'maks'; did you mean '{REDACTORS}.mask'?",
        f"{REDACTORS}.NOT_CALLABLE": "has no function 'NOT_CALLABLE'",
        "tests.support.nowhere.mask": "No module named 'tests.support.nowhere'",
        "mask": "is not a dotted path",
        f"{REDACTORS}.mask": "",
    }.items():
        settings.OUTBOX, settings.INBOX = ({option: path} if name == setting else {} for name in ("OUTBOX", "INBOX"))
        problems = [found for found in run_checks() if "REDACT" in found.msg]
        assert [(problem.id, said in problem.msg) for problem in problems] == [("exactly_once.E003", True)] * bool(said)
