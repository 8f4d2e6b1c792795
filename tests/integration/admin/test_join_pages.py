"""The runs of joins in the admin: what they wait for, and the operators' decisions."""

import json
from datetime import timedelta
from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from exactly_once.models import AuditEntry
from inbox.contrib.joins.models import Part, Run
from inbox.handlers.registry import registry
from inbox.testing import travel
from tests.support.admin_pages import Page, act, said, staff_client
from tests.support.deliveries import drain
from tests.support.joins import TOPICS, comes, effects, report

pytestmark = pytest.mark.django_db(databases=["default", "other"])

RUNS, RUN = (f"admin:inbox_joins_run_{page}" for page in ("changelist", "change"))
VIEW, COMPLETE, EXTEND, START = "view_run", "complete_run", "extend_run", "start_run"
VIEW_MESSAGES = "view_inboxmessage"
CONFIRMED = {"confirmed": "yes", "reason": "the export failed"}

on_the_list = partial(act, page=RUNS)


@pytest.fixture
def waiting(joins):
    joins(report)
    comes(TOPICS[0], "monday", rows=7)
    return Run.objects.get()


@pytest.fixture
def dead(waiting):
    travel(timedelta(hours=3))
    drain()
    return Run.objects.get()


def the_list(query=""):
    return Page(staff_client(VIEW).get(reverse(RUNS) + query))


def test_list_shows_open_runs_and_what_they_wait_for_and_finds_them_by_id_and_join(waiting):
    text = the_list().text

    for words in ("tests.report", "monday", TOPICS[1], TOPICS[2], "Waiting"):
        assert words in text
    assert TOPICS[0] not in text
    for term in ("monday", "tests.report"):
        assert TOPICS[1] in the_list(f"?q={term}").text
    assert TOPICS[1] not in the_list("?q=tuesday").text
    registry.remove("tests.report")
    assert "monday" in the_list().text


def test_list_shows_finished_runs_only_on_request(waiting):
    for topic in TOPICS[1:]:
        comes(topic)
    drain()

    assert "No run is open." in the_list().text
    assert "monday" in the_list("?state=all").text
    assert "monday" not in the_list("?state=dead").text


def test_number_of_statements_of_the_list_does_not_depend_on_the_number_of_runs(waiting, django_assert_max_num_queries):
    client = staff_client(VIEW)
    for number in range(10):
        comes(TOPICS[0], f"run-{number}")
    with django_assert_max_num_queries(9):
        client.get(reverse(RUNS))


def test_page_of_a_run_shows_payloads_folded_and_redacted_and_only_with_the_permission_to_view_messages(waiting, settings):
    url = reverse(RUN, args=[waiting.pk])
    page, without = Page(staff_client(VIEW, VIEW_MESSAGES).get(url)), Page(staff_client(VIEW).get(url))
    settings.INBOX = {"REDACT": "tests.support.redactors.mask"}
    redacted = Page(staff_client(VIEW, VIEW_MESSAGES).get(url))

    for topic in TOPICS:
        assert topic in page.text
        assert topic in without.text
    assert '"rows": 7' in page.text
    assert '"rows"' not in without.text
    assert '"rows": "masked"' in redacted.text
    assert any("message-folded" in attributes.get("class", "") for attributes in redacted.all("details"))


@pytest.mark.every_database
def test_operator_enters_the_missing_messages(dead):
    payloads = json.dumps({topic: {"rows": 0} for topic in TOPICS[1:]})
    client = staff_client(VIEW, COMPLETE)
    assert "Enter the missing messages of these runs?" in Page(on_the_list(client, "complete", dead)).text
    on_the_list(client, "complete", dead, payloads=payloads, **CONFIRMED)
    drain()

    assert effects() == [("monday", ",".join(TOPICS))]
    assert {part.entered_by for part in Part.objects.exclude(topic=TOPICS[0])} == {"by staff0 in the admin: the export failed"}
    entry = AuditEntry.objects.get()
    assert (entry.actor, entry.action, entry.kind, entry.name) == ("staff0", "complete", "run", "monday (tests.report)")
    assert entry.parameters["payloads"].endswith("characters")
    assert "the export failed" in LogEntry.objects.get().change_message


def test_messages_that_the_run_does_not_wait_for_are_refused(dead):
    client = staff_client(VIEW, COMPLETE)
    for payloads in ("{", "[]", "{}", '"text"'):
        assert "JSON" in Page(on_the_list(client, "complete", dead, payloads=payloads, **CONFIRMED)).text

    ((level, words),) = said(on_the_list(client, "complete", dead, payloads='{"other": {}}', **CONFIRMED))

    assert level == "error"
    assert "It does not wait for other. It waits for: stock.exported, prices.exported." in words
    assert Part.objects.count() == 1
    assert not AuditEntry.objects.exists()


def test_operator_extends_the_deadline(dead, settings):
    settings.LANGUAGE_CODE = "de"
    on_the_list(staff_client(VIEW, EXTEND), "extend", dead, minutes=30, **CONFIRMED)
    settings.LANGUAGE_CODE = "en"

    run = Run.objects.select_related("row").get()
    assert run.row.state == "retrying"
    assert run.row.next_attempt_at == run.deadline_at
    assert "Waiting" in the_list().text
    assert AuditEntry.objects.get().kind == "run", "in every language"


def test_operator_starts_a_run_without_the_missing_messages_and_it_cannot_be_extended_then(dead):
    on_the_list(staff_client(VIEW, START), "start", dead, **CONFIRMED)
    drain()

    assert effects() == [("monday", f"{TOPICS[0]},-{TOPICS[1]},-{TOPICS[2]}")]
    assert "by staff0 in the admin: the export failed" in Page(staff_client(VIEW).get(reverse(RUN, args=[dead.pk]))).text
    response = on_the_list(staff_client(VIEW, EXTEND), "extend", dead, minutes=30, **CONFIRMED)
    assert [(level, "it is done now" in words) for level, words in said(response)] == [("warning", True)]
