"""Idempotent views: whatever is repeated, and however the view ends, there is one effect and one answer, or none."""

import asyncio
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection, connections, transaction
from django.http.request import RawPostDataException
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import reverse
from django.utils.functional import SimpleLazyObject
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactly_once.contrib.views import NotStorable, TransactionBroken, by_user, idempotent_view
from exactly_once.contrib.views.checks import check_views
from exactly_once.contrib.views.decorators import declared
from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.problems import Problem
from exactly_once.process.clock import utcnow
from tests.support.admin_pages import Page, staff_client
from tests.support.apps.effects.models import Effect
from tests.support.commands import output_of
from tests.support.deliveries import at_once
from tests.support.idempotent_views import BREAKS, PATHS, plan

pytestmark = [pytest.mark.every_database, pytest.mark.django_db]

BODY = {"amount": 10}
REPLAYED = "Idempotency-Replayed"
ASYNC = ["/async/", "/async-class/", "/ninja/apay"]


@pytest.fixture(autouse=True)
def _urls():
    plan.how = "ok"
    plan.begun.clear()
    plan.go_on.clear()
    with override_settings(ROOT_URLCONF="tests.support.idempotent_views"):
        yield
    plan.go_on.set()


def post(path="/function/", body=BODY, key="k-1", client="shop", method="POST", host="testserver", kind="application/json"):
    headers = {"Client": client, "Host": host, **({} if key is None else {"Idempotency-Key": key})}
    return Client(raise_request_exception=False).generic(method, path, json.dumps(body), kind, headers=headers)


def effects():
    return Effect.objects.count()


def is_problem(response, status):
    assert response.status_code == status
    assert response["Content-Type"] == "application/problem+json"
    assert response.json()["status"] == status
    return True


@pytest.fixture(params=[False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
def _atomic_requests(request, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", request.param)


@pytest.mark.parametrize("path", PATHS)
def test_repeated_request_has_one_effect_and_one_answer(path):
    first, second, third = (post(path) for _ in range(3))

    assert first.status_code in {200, 201}
    assert REPLAYED not in first
    for again in (second, third):
        assert (again.status_code, again.content, again[REPLAYED]) == (first.status_code, first.content, "true")
        assert {name: again.get(name) for name in ("Location", "Content-Type")} == {
            name: first.get(name) for name in ("Location", "Content-Type")
        }
        assert again.cookies == {}
        assert "Set-Cookie" not in again
    assert effects() == 1


@pytest.mark.usefixtures("_atomic_requests")
@pytest.mark.parametrize("how", ["409", "error"])
@pytest.mark.parametrize("path", [path for path in PATHS if path not in ASYNC])
def test_error_leaves_no_effect_and_is_not_stored(path, how):
    plan.how = how
    failed = post(path)
    assert failed.status_code >= 400
    assert effects() == 0

    plan.how = "ok"
    assert post(path).status_code in {200, 201}
    assert post(path)[REPLAYED] == "true"
    assert effects() == 1


@pytest.mark.parametrize("how", ["409", "error"])
@pytest.mark.parametrize("path", ASYNC)
def test_error_of_an_asynchronous_view_leaves_no_effect_and_is_not_stored(path, how):
    plan.how = how
    assert post(path).status_code >= 400
    assert effects() == 0

    plan.how = "ok"
    assert post(path).status_code in {200, 201}
    assert effects() == 1


@pytest.mark.parametrize("how", ["404 raised", "500", "503"])
def test_exception_of_django_and_error_of_the_server_are_not_stored(how):
    plan.how = how
    assert post().status_code == int(how[:3])
    assert effects() == IdempotentRequest.objects.count() == 0


@pytest.mark.parametrize("path", ["/function/", "/rest/"])
def test_answer_without_a_content_type_is_repeated_without_one(path):
    plan.how = "204"
    first, second = post(path), post(path)

    assert (first.status_code, second.status_code, second[REPLAYED]) == (204, 204, "true")
    assert "Content-Type" not in first
    assert "Content-Type" not in second


@pytest.mark.usefixtures("_atomic_requests")
def test_idempotent_view_inside_of_another_is_named():
    with pytest.raises(TransactionBroken, match="calls another idempotent view"):
        Client().post("/nested/", headers={"Idempotency-Key": "k-1", "Client": "shop"})
    assert effects() == IdempotentRequest.objects.count() == 0


@pytest.mark.usefixtures("_atomic_requests")
def test_error_that_is_a_result_is_committed_and_stored():
    plan.how = "402"
    first = post()
    plan.how = "ok"
    second = post()

    assert (first.status_code, second.status_code, second.content) == (402, 402, b"402")
    assert effects() == 1


@pytest.mark.parametrize(
    "other",
    [
        *({"body": {"amount": 11}}, {"path": "/function/?a=1"}, {"path": "/class/"}, {"method": "PUT"}),
        {"host": "another-tenant.testserver"},
    ],
    ids=str,
)
def test_another_request_with_the_same_key_is_answered_with_422(settings, other):
    settings.ALLOWED_HOSTS = [".testserver"]
    post()

    assert is_problem(post(**other), 422)
    assert effects() == 1


@pytest.mark.parametrize("key", [None, "", '""', "  ", "k" * 256, "schlüssel", "k\x7f"])
def test_request_without_a_usable_key_is_answered_with_400(key):
    assert is_problem(post(key=key), 400)
    assert effects() == 0


def test_request_without_a_key_that_is_not_required_runs_each_time():
    answers = [post("/optional/", key=None) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [201, 201]
    assert effects() == 2
    assert IdempotentRequest.objects.count() == 0


def test_host_is_the_same_whatever_its_port_is():
    assert [REPLAYED in post(host=f"testserver:{port}") for port in (8001, 8002)] == [False, True]


def test_key_is_the_same_with_and_without_quotes():
    assert post(key="k-1").content == post(key='"k-1"').content
    assert effects() == 1


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_safe_methods_pass(method):
    assert post("/class/", method=method).status_code in {200, 201}
    assert IdempotentRequest.objects.count() == 0


def test_key_is_that_of_its_scope():
    answers = [post(client=client) for client in ("shop", "partner", "shop")]

    assert [REPLAYED in answer for answer in answers] == [False, False, True]
    assert effects() == 2


@pytest.mark.parametrize("path", ["/users/", "/rest-users/"])
def test_by_default_a_key_is_that_of_an_authenticated_user(path):
    users = [get_user_model().objects.create_user(name) for name in ("ada", "bob")]
    answers = []
    for user in (*users, users[0]):
        client = Client()
        client.force_login(user)
        answers.append(client.post(path, BODY, content_type="application/json", headers={"Idempotency-Key": "k-1"}))

    assert [REPLAYED in answer for answer in answers] == [False, False, True]
    assert post(path).status_code == 403
    assert effects() == 2


def test_users_without_a_primary_key_do_not_share_a_key():
    unsaved = RequestFactory().post("/users/")
    unsaved.user = get_user_model()()

    with pytest.raises(Problem, match="must be authenticated"):
        by_user(unsaved)


def test_users_of_two_models_and_of_none_do_not_share_a_key():
    class Merchant:
        is_authenticated, pk = True, 7

    class Guest(Merchant):
        pass

    def scope(user):
        request = RequestFactory().post("/users/")
        request.user = SimpleLazyObject(lambda: user)
        return by_user(request)

    scopes = [scope(user) for user in (get_user_model()(pk=7), Merchant(), Guest(), get_user_model()(pk=7))]
    assert scopes[0] == scopes[3] == "user:auth.user:7"
    assert len({*scopes}) == 3


def test_csrf_token_is_checked_before_a_stored_answer_is_given():
    user, client = get_user_model().objects.create_user("ada"), Client(enforce_csrf_checks=True)
    client.force_login(user)
    IdempotentRequest.objects.create(
        scope=f"user:auth.user:{user.pk}", key="k-1", at=utcnow(), expires_at=utcnow() + timedelta(days=1), status=201
    )

    assert client.post("/users/", BODY, headers={"Idempotency-Key": "k-1"}).status_code == 403


def test_key_of_a_token():
    def ask(token):
        headers = {"Idempotency-Key": "k-1", "Authorization": f"Bearer {token}"}
        return Client().post("/tokens/", BODY, content_type="application/json", headers=headers)

    assert [REPLAYED in ask(token) for token in ("a", "b", "a")] == [False, False, True]
    assert "Bearer" not in "".join(IdempotentRequest.objects.values_list("scope", flat=True))


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("path", ["/function/", "/rest-class/"])
def test_form_is_the_same_whatever_its_boundary_is_and_another_with_another_file(path, method):
    def send(content, boundary):
        file = SimpleUploadedFile("a.txt", content)
        headers = {"Idempotency-Key": "k-1", "Client": "shop"}
        body = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="amount"\r\n\r\n10\r\n--{boundary}\r\nContent-Disposition: '
        )
        body += f'form-data; name="file"; filename="a.txt"\r\n\r\n{file.read().decode()}\r\n--{boundary}--\r\n'
        return Client().generic(method, path, body, f"multipart/form-data; boundary={boundary}", headers=headers)

    answers = [send(*given) for given in ((b"a", "one"), (b"a", "two"), (b"b", "one"))]
    assert [answer.status_code for answer in answers] == [201, 201, 422]
    assert path == "/function/" or answers[0].json()["given"]["amount"] == "10"
    assert effects() == 1


def form(content="10"):
    return {"amount": content, "file": SimpleUploadedFile("a.txt", b"a")}


def post_form(path, content="10"):
    return Client().post(path, form(content), headers={"Idempotency-Key": "k-1", "Client": "shop"})


def test_parser_of_a_view_of_rest_framework_reads_a_form_once():
    answers = [post_form("/rest-own-form/", content) for content in ("10", "10", "11")]

    assert [answer.status_code for answer in answers] == [201, 201, 422]
    assert answers[0].json()["given"]["amount"] == "own 10"
    assert effects() == 1


def test_form_for_which_a_view_of_rest_framework_has_no_parser_is_answered_with_415():
    assert post_form("/rest-json/").status_code == 415
    assert effects() == IdempotentRequest.objects.count() == 0


def test_body_that_a_permission_of_rest_framework_has_parsed_counts():
    answers = [post("/rest-own-parser/", body=body, kind="text/own") for body in (10, 10, 11)]

    assert [answer.status_code for answer in answers] == [201, 201, 422]
    assert effects() == 1


def test_uploaded_file_that_a_permission_of_rest_framework_has_parsed_counts():
    headers = {"Idempotency-Key": "k-1", "Client": "shop", "Content-Disposition": "attachment; filename=a.txt"}
    answers = [Client().post("/rest-file/", body, "text/plain", headers=headers) for body in (b"a", b"a", b"b")]

    assert [answer.status_code for answer in answers] == [201, 201, 422]
    assert answers[0].json() == {"content": "a"}
    assert effects() == 1


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
def test_body_that_was_read_as_a_stream_is_an_error_that_names_the_remedy(kind):
    with pytest.raises(RawPostDataException, match=r"let middleware and decorators read request\.body"):
        Client().generic("POST", "/streamed/", "{}", kind, headers={"Idempotency-Key": "k-1", "Client": "shop"})
    assert effects() == 0


def test_answer_is_the_one_that_rendering_a_template_returns():
    plan.how = "template"

    assert [post().content for _ in range(2)] == [b"first, then changed"] * 2


def test_answer_is_stored_for_its_time_from_the_end_of_the_view():
    plan.how = "slow"

    assert [REPLAYED in post() for _ in range(2)] == [False, True]
    assert effects() == 1


@pytest.mark.parametrize(("method", "content_type"), [("POST", "application/json"), ("PUT", "multipart/form-data; boundary=x")])
def test_body_that_is_too_large_is_answered_with_413(settings, method, content_type):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    headers = {"Client": "shop", "Idempotency-Key": "k-1"}

    assert is_problem(Client().generic(method, "/function/", "x" * 200, content_type, headers=headers), 413)


@pytest.mark.parametrize("how", ["stream", "large"])
def test_response_that_cannot_be_stored_is_an_error_without_an_effect(how):
    plan.how = how
    with pytest.raises(NotStorable):
        Client().post("/function/", headers={"Idempotency-Key": "k-1"})
    assert effects() == IdempotentRequest.objects.count() == 0


@pytest.mark.usefixtures("_atomic_requests")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("how", BREAKS)
def test_answer_of_a_view_whose_transaction_cannot_commit_is_not_given(how):
    if connection.vendor == "sqlite" and how == "swallows an error of a statement":
        how = "asks for a rollback"  # SQLite's transaction goes on
    plan.how = how
    assert post(client="").status_code == 500
    connection.close()
    committed = effects()
    assert committed == (how == "commits")

    plan.how = "ok"
    again = post(client="")
    assert effects() == 1
    assert again.status_code == (500 if committed else 201)


@pytest.mark.django_db(transaction=True)
def test_answer_belongs_to_the_transaction_around_it():
    with suppress(ZeroDivisionError), transaction.atomic():
        assert post().status_code == 201
        raise ZeroDivisionError

    assert effects() == IdempotentRequest.objects.count() == 0
    assert REPLAYED not in post()
    assert effects() == 1


@pytest.mark.django_db(databases=["default", "other"])
def test_answer_is_stored_in_the_database_of_the_effect():
    answers = [post("/elsewhere/") for _ in range(2)]

    assert answers[0].content == answers[1].content
    assert Effect.objects.using("other").count() == IdempotentRequest.objects.using("other").count() == 1
    assert effects() == IdempotentRequest.objects.count() == 0


def test_expired_key_runs_again_and_is_stored_again():
    post()
    IdempotentRequest.objects.update(expires_at=utcnow() - timedelta(seconds=1))

    assert [REPLAYED in post(body={"amount": 11}) for _ in range(2)] == [False, True]
    assert effects() == 2


@pytest.mark.django_db(transaction=True)
def test_expired_answers_are_purged():
    post(key="old")
    post(key="new")
    IdempotentRequest.objects.filter(key="old").update(expires_at=utcnow() - timedelta(seconds=1))

    assert "idempotent requests" in output_of("exactly_once_purge")
    assert IdempotentRequest.objects.get().key == "new"


@pytest.mark.django_db(transaction=True)
def test_second_request_does_not_wait_for_the_first_and_gets_its_answer_later():
    """On SQLite, where nothing runs beside a transaction that writes, it waits."""
    plan.how = "wait"

    def ask():
        try:
            return post()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask)
        assert plan.begun.wait(60)
        second = threads.submit(ask)
        if connection.vendor == "postgresql":
            assert is_problem(second.result(60), 409)
            assert second.result()["Retry-After"] == "1"
        plan.go_on.set()
        assert first.result(60).status_code == 201
    again = post()
    assert (again.content, again[REPLAYED]) == (first.result().content, "true")
    assert effects() == 1


@pytest.mark.django_db(transaction=True)
def test_clients_that_repeat_until_they_are_answered_get_one_answer(live_server):
    address = urlsplit(live_server.url)

    def answer():
        with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=60)) as client:
            client.request("POST", "/function/", b"{}", {"Idempotency-Key": "k-1", "Client": "shop"})
            found = client.getresponse()
            return found.status, found.read()

    def persistent():
        while (found := answer())[0] == 409:
            pass
        return found

    answers = at_once([persistent] * 8)

    assert {status for status, _ in answers} == {201}
    assert len(set(answers)) == 1
    assert effects() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("path", ["/function/", *ASYNC])
def test_concurrent_requests_of_one_event_loop_have_one_effect(path):
    async def ask():
        client, headers = AsyncClient(), {"Idempotency-Key": "k-1", "Client": "shop"}
        asking = (client.post(path, BODY, content_type="application/json", headers=headers) for _ in range(4))
        answers = await asyncio.gather(*asking)
        await sync_to_async(connections.close_all)()
        return answers

    answers = asyncio.run(ask())

    assert {answer.status_code for answer in answers} <= {200, 201, 409}
    assert effects() == 1


REQUESTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.sampled_from(["ok", "402", "409", "500", "error", "expire"])),
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=REQUESTS)
def test_whatever_is_repeated_each_key_has_one_effect_and_equal_answers(history):
    stored, count = {}, 0
    with transaction.atomic():
        for key, amount, how in history:
            if how == "expire":
                stored.pop(key, None)
                IdempotentRequest.objects.filter(key=key).update(expires_at=utcnow() - timedelta(seconds=1))
                continue
            plan.how = how
            response = post(body=amount, key=key)
            answer = (response.status_code, response.content)
            if key in stored:
                first_amount, first_answer = stored[key]
                assert answer == first_answer if amount == first_amount else response.status_code == 422
            elif how in {"ok", "402"}:
                stored[key], count = (amount, answer), count + 1
            assert effects() == count
        transaction.set_rollback(True)


def test_arguments_that_make_no_sense_are_refused():
    for arguments in ({"expires_in": timedelta()}, {"store_errors": [500]}, {"store_errors": [200]}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            idempotent_view(**arguments)


def test_user_of_rest_framework_is_not_known_outside_of_it():
    answer = post("/outside/")

    assert is_problem(answer, 403)
    assert "below @api_view" in answer.json()["detail"]


def test_check_names_a_database_that_does_not_exist(monkeypatch):
    assert check_views(None) == []

    with monkeypatch.context() as patch:
        patch.setattr("exactly_once.contrib.views.checks.declared", {*declared, "nowhere"})
        [error] = check_views(None)
    assert "uses the database 'nowhere', which is not in DATABASES" in error.msg
    assert error.id == "exactly_once_views.E001"

    monkeypatch.setattr("django.db.router.allow_migrate_model", lambda alias, model: alias == "default")
    [error] = check_views(None)
    assert (error.id, "'other'" in error.msg) == ("exactly_once_views.E001", True)


def test_page_shows_keys_and_statuses_and_neither_headers_nor_bodies():
    for key in ("k-1", "k-2"):
        post(key=key)
    stored = IdempotentRequest.objects.get(key="k-1")
    pages = ("changelist", []), ("change", [stored.pk])
    with override_settings(ROOT_URLCONF="tests.urls"):
        url_of_list, url_of_row = (
            reverse(f"admin:exactly_once_views_idempotentrequest_{page}", args=args) for page, args in pages
        )
        client = staff_client("view_idempotentrequest")
        found, row = Page(client.get(url_of_list, {"q": "k-1"})).text, Page(client.get(url_of_row)).text
        assert staff_client("view_alert").get(url_of_list).status_code == 403

    for text in (found, row):
        assert all(shown in text for shown in ("k-1", "shop", "function", "201"))
        assert "/payments/" not in text + found
        assert "k-2" not in text
