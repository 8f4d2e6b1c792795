"""The lists of messages of both apps: what a row shows, the search, the filters, and what they leave out."""

import re
import uuid
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from exactly_once.console.admin import acting as acting_admin
from exactly_once.console.admin import message_search
from exactly_once.models import Operation, Process
from exactly_once.process.clock import utcnow
from inbox.models import InboxMessage
from inbox.models import TrailEntry as InboxTrailEntry
from inbox.states import State as InboxState
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import State
from tests.support.admin_names import RESTORE, VIEW
from tests.support.admin_pages import NASTY, Page, a_message, an_inbox_message, listed, previewed, staff_client

pytestmark = pytest.mark.django_db(databases=["default", "other"])

INBOX_VIEW, RETRY = "view_inboxmessage", "retry_inboxmessage"
AGES = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(days=7)}
A_MOMENT = timedelta(minutes=1)


class Outbox:
    page = "admin:outbox_outboxmessage_changelist"
    model, trail = OutboxMessage, TrailEntry
    action, dead, retrying, settled = "restore", State.DEAD, State.RETRYING, State.PUBLISHED
    names = ()
    statements = 6

    def queries(self):
        """Session, user, permissions (2), what is stuck, count, rows; classes of errors, topics and hosts to filter by; and the
        counts by state, on PostgreSQL in a savepoint with settings of its own."""
        return 10 + (5 if connection.vendor == "postgresql" else 1)

    def due_in(self, duration):
        return a_message(State.SCHEDULED, due_ago=-duration)

    def due_at(self, row):
        return row.available_at

    def message(self, state=State.DEAD, *, ago=timedelta(), **columns):
        return a_message(state, ago=ago, **columns)

    def client(self):
        return staff_client(VIEW, RESTORE)

    def attempted(self, row, host):
        process = f"{host}:4711:MainThread"
        values = {"was": "ready", "became": "retrying", "at": utcnow(), "process": process}
        self.trail.objects.create(message_id=row.message_id, **values)


class Inbox(Outbox):
    page = "admin:inbox_inboxmessage_changelist"
    model, trail = InboxMessage, InboxTrailEntry
    action, dead, retrying, settled = "retry", InboxState.DEAD, InboxState.RETRYING, InboxState.DONE
    names = ("shop.reserve_stock",)
    statements = 4 + len(InboxState)

    def queries(self):
        """Session, user, permissions (2), count, rows; classes of errors and hosts to filter by; counts by state, and one of
        deferred messages."""
        return 9 + len(InboxState)

    def due_in(self, duration):
        return an_inbox_message(InboxState.RETRYING, next_ago=-duration)

    def due_at(self, row):
        return row.next_attempt_at

    def message(self, state=InboxState.DEAD, *, ago=timedelta(), **columns):
        return an_inbox_message(state, received_ago=ago, **columns)

    def client(self):
        return staff_client(INBOX_VIEW, RETRY)

    def attempted(self, row, host, handler=None):
        process = f"{host}:4711:runner"
        values = {"was": "received", "became": "retrying", "at": utcnow(), "process": process}
        self.trail.objects.create(message_id=row.message_id, handler=handler or row.handler, **values)


@pytest.fixture(params=[Outbox, Inbox], ids=["outbox", "inbox"])
def app(request):
    return request.param()


def found(app, **query):
    return set(listed(app.client(), app.page, **query))


def page(app, **query):
    return Page(app.client().get(reverse(app.page), query))


class TestList:
    def test_list_shows_state_names_age_attempts_first_line_of_the_error_and_when_a_message_is_due(self, app):
        app.message(app.retrying, ago=timedelta(minutes=3), attempts=17, last_error="no answer\nsecond line")
        row = app.due_in(timedelta(minutes=50, seconds=50))

        shown = page(app)

        expected = ("Retrying", "shop.order.placed", "order-0", "3 min ago", "17", "no answer", "due in 50 min", *app.names)
        assert [words for words in expected if words not in shown.text] == []
        assert "second line" not in shown.text
        assert app.due_at(row).isoformat() in [found["datetime"] for found in shown.all("time")]

    @pytest.mark.every_database
    def test_list_query_count_does_not_grow_with_rows_and_bodies_are_not_read(self, app, django_assert_num_queries):
        for _ in range(60):
            app.message()
        client = app.client()
        client.get(reverse(app.page))

        with django_assert_num_queries(app.queries()) as queries:
            client.get(reverse(app.page))

        statements = [query["sql"] for query in queries if app.model._meta.db_table in query["sql"]]
        assert len(statements) == app.statements
        assert all("LIMIT" in statement for statement in statements)
        assert not any(re.search(r'"(body|headers|traceback)"', statement) for statement in statements)

    def test_list_stops_counting_at_its_limit_and_says_that_there_are_more(self, app, monkeypatch):
        monkeypatch.setattr(acting_admin.BoundedPaginator, "LIMIT", 3)
        for _ in range(3):
            app.message()
        assert "There are more" not in page(app).text

        app.message()

        text = page(app).text
        assert "There are more: only the first 3" in text
        assert re.search(r"3\+ (out|in)box messages", text)

    def test_list_links_to_each_state_with_its_number_of_messages(self, app):
        for state in (app.dead, app.dead, app.retrying):
            app.message(state)

        shown = page(app)

        for state, number in ((app.dead, 2), (app.retrying, 1), (app.settled, 0)):
            assert f"{state.label} ({number})" in shown.text
            assert shown.all("a", href=f"?state={state}")
            assert len(found(app, state=state)) == number


class TestSearch:
    @pytest.mark.parametrize(
        "form",
        [str, lambda found: found.hex, lambda found: f" {str(found).upper()} "],
        ids=["dashes", "no dashes", "upper case with spaces"],
    )
    def test_search_finds_a_message_id_with_or_without_dashes(self, app, form):
        row, _ = app.message(), app.message()

        assert found(app, q=form(uuid.UUID(str(row.message_id)))) == {row.pk}

    def test_search_matches_biz_ids_and_topics_exactly(self, app):
        one, ten = app.message(biz_id="order-1"), app.message(biz_id="order-10", topic="shop.order")
        like_an_id = app.message(biz_id=str(uuid.uuid4()))

        assert found(app, q="order-1") == {one.pk}
        assert found(app, q="shop.order") == {ten.pk}
        assert found(app, q="order") == set()
        assert found(app, q=like_an_id.biz_id) == {like_an_id.pk}
        assert "Null characters are not allowed" in page(app, q="a\x00b").text

    @pytest.mark.every_database
    def test_search_term_that_ends_with_a_star_matches_a_prefix(self, app):
        one, ten, other = app.message(biz_id="order-1"), app.message(biz_id="order-10"), app.message(topic="a", biz_id="b")

        assert found(app, q="order-1*") == {one.pk, ten.pk}
        assert found(app, q="shop.order*") == {one.pk, ten.pk}
        assert found(app, q="") == {one.pk, ten.pk, other.pk}

    @pytest.mark.every_database
    @pytest.mark.parametrize(
        "odd",
        [
            *("%", "_", "*", "**", "'", '"', "\\", "\\*", NASTY, "{0}", "😀", "\u202e", "\x01", "\x01*"),
            pytest.param("x" * 10_000, id="10,000 characters"),
            pytest.param("x" * 10_000 + "*", id="10,000 characters and a star"),
            *("0" * 32, "\u0660" * 32, "urn:uuid:1", b"\xff", b"\xed\xa0\x80"),
        ],
    )
    def test_search_for_unusual_input_finds_nothing_and_does_not_fail(self, app, odd):
        app.message()

        assert found(app, q=odd) == set()


class TestErrors:
    @pytest.mark.every_database
    def test_search_finds_a_part_of_the_error_of_messages_that_are_retrying_or_dead(self, app):
        failing = [app.message(state, last_error="Timeout: no answer\nwithin 10 s") for state in (app.dead, app.retrying)]
        app.message(app.dead, last_error="KeyError: 'amount'")
        app.message(app.settled, last_error="Timeout: no answer")

        assert found(app, q="NO ANSWER") == {row.pk for row in failing}

    def test_message_that_has_the_name_is_found_and_not_the_errors_that_mention_it(self, app):
        row = app.message(biz_id="order-17")
        app.message(app.dead, last_error="no order-17")

        assert found(app, q="order-17") == {row.pk}

    def test_list_links_to_the_same_search_in_the_other_app(self, app):
        there = {Outbox: "inbox_inboxmessage", Inbox: "outbox_outboxmessage"}[type(app)]
        url = f"{reverse(f'admin:{there}_changelist')}?q=no+answer"
        both = staff_client("view_outboxmessage", "view_inboxmessage")

        assert Page(both.get(reverse(app.page), {"q": "no answer"})).all("a", href=url)
        assert not Page(both.get(reverse(app.page))).all("a", href=url)
        assert not page(app, q="no answer").all("a", href=url), "without the permission to view them"


class TestHeaders:
    @pytest.mark.parametrize(
        "form", ["headers.tenant:acme", "headers.tenant=acme", "header tenant=acme", " HEADERS.tenant : acme "]
    )
    def test_search_finds_a_value_at_a_path_in_the_headers(self, app, form):
        row, _, _ = (app.message(headers=headers) for headers in ({"tenant": "acme"}, {"tenant": "acme 2"}, {}))

        assert found(app, q=form) == {row.pk}

    @pytest.mark.every_database
    @pytest.mark.parametrize(
        ("headers", "term"),
        [
            ({"shop": {"tenant": "acme"}}, "headers.shop.tenant:acme"),
            ({"shop.tenant": "acme"}, "headers.shop.tenant:acme"),
            ({"tries": 5}, "headers.tries:5"),
            ({"ratio": 1.5}, "headers.ratio:1.5"),
            ({"vip": True}, "headers.vip:true"),
            ({"größe": "mittel, groß"}, "headers.größe:mittel, groß"),
            ({"x-y_z": "a:b=c"}, "headers.x-y_z:a:b=c"),
            ({"contains": "100%"}, "headers.contains:100%"),
            ({"tenant": "x' OR '1'='1"}, "headers.tenant:x' OR '1'='1"),
        ],
    )
    def test_search_finds_nested_names_with_dots_numbers_and_signs(self, app, headers, term):
        row, _ = app.message(headers=headers), app.message(headers={"tenant": "x"})

        assert found(app, q=term) == {row.pk}

    @pytest.mark.parametrize(
        "term",
        [
            *("headers.tenant:", "headers.:acme", "headers..tenant:acme", "headers.a b:acme", "header =x", "key:"),
            *("headers.a'b:x", 'headers.a"b:x', "headers.a[0]:x", "headers.$.a:x", f"headers.{'a.' * 20}b:x", "*"),
            pytest.param("headers.tenant:" + "x" * 2_000, id="long value"),
        ],
    )
    def test_search_that_cannot_be_read_selects_nothing_and_says_why(self, app, term):
        app.message(headers={"tenant": "acme"})

        answer = page(app, q=term)

        assert "This search was not understood." in answer.text
        assert not answer.all("input", name="_selected_action")

    @pytest.mark.every_database
    def test_search_in_damaged_headers_finds_nothing_and_does_not_fail(self, app):
        for headers in (5, "tenant", ["tenant"], None):
            app.message(headers=headers if headers is not None else {})

        assert found(app, q="headers.tenant:acme") == set()


def test_search_finds_an_ordering_key_and_a_topic_that_begins_with_headers(app):
    row, other = app.message(key="customer-4"), app.message(key="customer-40", topic="headers.changed")

    assert found(app, q="key:customer-4") == {row.pk}
    assert found(app, q="key=customer-4") == {row.pk}
    assert found(app, q="headers.changed") == {other.pk}


class TestFilters:
    def test_filters_select_by_state_topic_and_attempts(self, app):
        dead, retrying = app.message(app.dead, attempts=5, topic="shop.one"), app.message(app.retrying, attempts=7)
        settled, few = app.message(app.settled, attempts=6), app.message(app.dead, attempts=4)
        expected = [
            ({"state": "dead"}, {dead.pk, few.pk}),
            ({"topic": "shop.one"}, {dead.pk}),
            ({"attempts": "5"}, {dead.pk, retrying.pk}),
            ({"attempts": "5", "state": app.settled}, {settled.pk}),
            ({"state": "no such state\x00"}, set()),
            ({"topic": "unknown\x00"}, set()),
        ]

        assert [found(app, **query) for query, _ in expected] == [selected for _, selected in expected]
        for lookup in ("biz_id", "body__contains", "last_error__regex"):
            assert app.client().get(reverse(app.page), {lookup: "a\x00"}).status_code == 400

    def test_error_class_filter_offers_the_classes_of_failures_and_selects_one(self, app):
        failing = {"failing_since": utcnow()}
        place = {"error_place": "shop/handlers.py:f:1"} if app.model is InboxMessage else {}
        row = app.message(error_class="shop.CardDeclined", **failing, **place)
        app.message(error_class="shop.NoStock", **failing, **place)

        assert page(app).all("a", href="?error=shop.CardDeclined")
        assert found(app, error="shop.CardDeclined") == {row.pk}

    @pytest.mark.parametrize("name", ["hour", "day", "week"])
    def test_age_filter_selects_recent_messages_and_those_that_have_not_been_settled_for_long(self, app, name):
        recent = app.message(app.retrying, ago=AGES[name] - A_MOMENT)
        late = app.message(app.retrying, ago=AGES[name] + A_MOMENT)
        app.message(app.settled, ago=AGES[name] + A_MOMENT)

        assert found(app, age=f"open-{name}") == {late.pk}
        if name != "week":
            assert found(app, age=name) == {recent.pk}

    @pytest.mark.every_database
    def test_host_filter_selects_messages_with_a_failed_attempt_on_the_host(self, app):
        rows = [app.message(app.retrying) for _ in range(3)]
        app.attempted(rows[0], "worker-1")
        app.attempted(rows[0], "worker-2")
        app.attempted(rows[1], "worker-10")
        if isinstance(app, Inbox):
            app.attempted(rows[2], "worker-1", handler="another")
        at = utcnow()
        Process.objects.create(app="outbox", id=uuid.uuid4(), host="web-7", pid=1, started_at=at, beat_at=at)

        assert found(app, host="worker-1") == {rows[0].pk}
        assert found(app, host="worker-2") == {rows[0].pk}
        assert found(app, host="worker") == set()
        assert isinstance(app, Inbox) or page(app).all("a", href="?host=web-7")

    def test_unknown_value_of_a_filter_selects_nothing_and_says_so(self, app):
        app.message()

        for name in ("state", "stuck", "age", "attempts"):
            answer = page(app, **{name: "bogus"})
            assert "has no value “bogus”. Nothing is selected." in answer.text
            assert not answer.all("input", name="_selected_action")

    def test_filters_and_search_are_kept_in_the_links_of_the_page(self, app):
        app.message(topic="shop.one", headers={"tenant": "acme"})

        hrefs = [link.get("href", "") for link in page(app, topic="shop.one", q="headers.tenant:acme").all("a")]

        (other,) = (href for href in hrefs if "state=dead" in href)
        assert "topic=shop.one" in other
        assert "q=headers.tenant%3Aacme" in other


class TestAllMatching:
    QUERIES = (
        *({"q": "headers.tenant:acme"}, {"q": "key:customer-4"}, {"state": "dead", "q": "shop.o*"}),
        *({"topic": "shop.one"}, {"age": "open-hour"}, {"attempts": "3"}, {"host": "worker-1"}),
    )

    @pytest.mark.parametrize("query", QUERIES, ids=lambda query: " ".join(query.values()))
    def test_operation_on_all_matching_takes_what_the_list_shows_and_previews_their_number(self, app, query):
        columns = {"headers": {"tenant": "acme"}, "key": "customer-4", "topic": "shop.one", "attempts": 3}
        row, _ = app.message(ago=timedelta(hours=2), **columns), app.message(topic="two")
        app.attempted(row, "worker-1")
        client, url = app.client(), reverse(app.page, query=query)
        data = {"action": app.action, "_selected_action": [row.pk], "select_across": "1"}

        preview = client.post(url, data)
        client.post(url, {**data, **previewed(preview), "reason": "broker was down"})

        assert "applies to 1 of 1" in " ".join(Page(preview).text.split())
        assert (Operation.objects.get().total, Operation.objects.get().state) == (1, "planned")

    @pytest.mark.parametrize("query", [{"state": "bogus"}, {"q": "headers.tenant:"}, {"q": "a\x00b"}], ids=str)
    def test_operation_is_not_planned_if_a_filter_or_the_search_is_not_understood(self, app, query):
        row = app.message()
        data = {"action": app.action, "_selected_action": [row.pk], "select_across": "1", "plan_confirmed": "1"}

        app.client().post(reverse(app.page, query=query), data)

        assert not Operation.objects.exists()


class TestLimit:
    """Conditions without an index read a limited number of messages."""

    @pytest.fixture(autouse=True)
    def limit(self, monkeypatch):
        monkeypatch.setattr(message_search, "MOST_SEARCHED", 2)

    @pytest.mark.parametrize("term", ["headers.tenant:acme", "key:customer-4", "shop.*"])
    def test_search_without_an_index_reads_the_newest_messages_and_says_so(self, app, term):
        old, *new = (app.message(headers={"tenant": "acme"}, key="customer-4", topic="shop.one") for _ in range(3))

        assert found(app, q=term) == {row.pk for row in new}
        assert "Only 2 messages were searched" in page(app, q=term).text
        assert old.pk in found(app)
        assert "messages were searched" not in page(app).text

    def test_search_in_headers_reads_the_newest_of_those_that_the_filters_select(self, app):
        row = app.message(app.dead, headers={"tenant": "acme"})
        for _ in range(3):
            app.message(app.settled)

        assert found(app, q="headers.tenant:acme") == set()
        assert found(app, q="headers.tenant:acme", state="dead") == {row.pk}

    def test_filter_by_age_of_unsettled_messages_reads_the_oldest(self, app):
        rows = [app.message(app.retrying, ago=AGES["day"] + timedelta(minutes=9 - number)) for number in range(4)]

        assert found(app, age="open-day") == {row.pk for row in rows[:2]}

    def test_operation_on_all_matching_names_the_limit(self, app):
        for _ in range(3):
            row = app.message(headers={"tenant": "acme"})
        data = {"action": app.action, "_selected_action": [row.pk], "select_across": "1"}

        preview = Page(app.client().post(reverse(app.page, query={"q": "headers.tenant:acme"}), data))

        assert "of the 2 messages that were searched" in preview.text


@pytest.mark.parametrize("query", [{}, {"q": "headers.tenant:acme"}, {"topic": "shop.one"}, {"age": "open-day"}], ids=str)
def test_no_page_counts_more_than_its_limit(app, query):
    app.message()
    client = app.client()

    with CaptureQueriesContext(connection) as queries:
        client.get(reverse(app.page), query)

    counts = [query["sql"] for query in queries if "COUNT(" in query["sql"] and f'"{app.model._meta.db_table}"' in query["sql"]]
    assert counts
    # The outbox counts its states by their indexes, see `store.history`.
    assert all("LIMIT" in statement or "GROUP BY" in statement for statement in counts)
