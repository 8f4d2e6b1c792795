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


def test_list_shows_open_runs_and_what_they_wait_for(waiting):
    text = the_list().text

    for words in ("tests.report", "monday", TOPICS[1], TOPICS[2], "Waiting"):
        assert words in text
    assert TOPICS[0] not in text


def test_list_shows_finished_runs_only_on_request(waiting):
    for topic in TOPICS[1:]:
        comes(topic)
    drain()

    assert "No run is open." in the_list().text
    assert "monday" in the_list("?state=all").text
    assert "monday" not in the_list("?state=dead").text


def test_list_finds_a_run_by_its_id_and_by_its_join(waiting):
    for term in ("monday", "tests.report"):
        assert TOPICS[1] in the_list(f"?q={term}").text
    assert TOPICS[1] not in the_list("?q=tuesday").text


def test_number_of_statements_of_the_list_does_not_depend_on_the_number_of_runs(waiting, django_assert_max_num_queries):
    client = staff_client(VIEW)
    for number in range(10):
        comes(TOPICS[0], f"run-{number}")
    with django_assert_max_num_queries(9):
        client.get(reverse(RUNS))


def test_page_of_a_run_shows_the_messages_that_have_come(waiting):
    text = Page(staff_client(VIEW, VIEW_MESSAGES).get(reverse(RUN, args=[waiting.pk]))).text

    for words in (TOPICS[0], '"rows": 7', TOPICS[1], TOPICS[2]):
        assert words in text


def test_page_of_a_run_shows_payloads_only_with_the_permission_to_view_messages(waiting):
    text = Page(staff_client(VIEW).get(reverse(RUN, args=[waiting.pk]))).text

    assert '"rows"' not in text
    for topic in TOPICS:
        assert topic in text


def test_payloads_are_folded_and_redacted(waiting, settings):
    settings.INBOX = {"REDACT": "tests.support.redactors.mask"}
    page = Page(staff_client(VIEW, VIEW_MESSAGES).get(reverse(RUN, args=[waiting.pk])))

    assert '"rows": "masked"' in page.text
    assert any("message-folded" in attributes.get("class", "") for attributes in page.all("details"))


def test_audit_log_has_the_same_kind_in_every_language(dead, settings):
    settings.LANGUAGE_CODE = "de"
    on_the_list(staff_client(VIEW, EXTEND), "extend", dead, minutes=30, **CONFIRMED)

    assert AuditEntry.objects.get().kind == "run"


def test_page_shows_the_run_of_a_join_that_is_not_registered(waiting):
    registry.remove("tests.report")
    assert "monday" in the_list().text


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


@pytest.mark.parametrize("payloads", ["{", "[]", "{}", '"text"'])
def test_payloads_that_are_not_a_json_object_are_refused(dead, payloads):
    page = Page(on_the_list(staff_client(VIEW, COMPLETE), "complete", dead, payloads=payloads, **CONFIRMED))

    assert "JSON" in page.text
    assert Part.objects.count() == 1


def test_message_of_another_topic_is_refused_with_the_topics_that_the_run_waits_for(dead):
    response = on_the_list(staff_client(VIEW, COMPLETE), "complete", dead, payloads='{"other": {}}', **CONFIRMED)

    ((level, words),) = said(response)
    assert level == "error"
    assert "It does not wait for other. It waits for: stock.exported, prices.exported." in words
    assert not AuditEntry.objects.exists()


def test_operator_extends_the_deadline(dead):
    on_the_list(staff_client(VIEW, EXTEND), "extend", dead, minutes=30, **CONFIRMED)

    run = Run.objects.select_related("row").get()
    assert run.row.state == "retrying"
    assert run.row.next_attempt_at == run.deadline_at
    assert "Waiting" in the_list().text


def test_operator_starts_a_run_without_the_missing_messages(dead):
    on_the_list(staff_client(VIEW, START), "start", dead, **CONFIRMED)
    drain()

    assert effects() == [("monday", f"{TOPICS[0]},-{TOPICS[1]},-{TOPICS[2]}")]
    assert "by staff0 in the admin: the export failed" in Page(staff_client(VIEW).get(reverse(RUN, args=[dead.pk]))).text


def test_action_on_a_finished_run_reports_its_state(dead):
    on_the_list(staff_client(VIEW, START), "start", dead, **CONFIRMED)
    drain()

    response = on_the_list(staff_client(VIEW, EXTEND), "extend", dead, minutes=30, **CONFIRMED)
    assert [(level, "it is done now" in words) for level, words in said(response)] == [("warning", True)]
