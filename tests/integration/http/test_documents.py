"""The OpenAPI documents: they are what the code says, describe every answer, and a client can be generated from them."""

import importlib
import json
import os
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
from django.test import override_settings

from inbox.contrib.http import subscribe
from outbox.models import OutboxMessage
from tests.support.commands import ran
from tests.support.http_api import AUDITOR, HTTP, Api, documents, rendered

TOPIC = "shop.order.placed"
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("negative_data_rejection", "missing_required_header", "unsupported_method", "ignored_auth"),
)
"""All but that valid data is accepted: a schema cannot say that a priority and a key exclude each other, for example."""


@pytest.fixture
def served(live_server, own_handlers, monkeypatch):
    """The URL of both APIs."""
    subscribe(TOPIC)
    monkeypatch.setattr("inbox.contrib.http.urls._MAX_WAIT", timedelta(seconds=0.05))
    with override_settings(ROOT_URLCONF="tests.support.http_urls", OUTBOX={"HTTP": HTTP}):
        yield f"{live_server.url}/api"


@pytest.mark.parametrize("module", documents())
def test_committed_document_is_that_of_the_code(module):
    assert documents()[module].read_text() == rendered(import_module(module).api), "run python -m tests.support.openapi"


@pytest.mark.parametrize("module", documents())
def test_every_error_is_documented_as_a_problem(module):
    document = json.loads(documents()[module].read_text())

    assert document["openapi"] == "3.1.0"
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                expected = "application/problem+json" if int(status) >= 400 else "application/json"
                assert [*answer["content"]] == [expected]
            assert {"401", "403", "413", "422", "500", "503"} < {*operation["responses"]}
            assert operation["security"] == [{"BearerToken": []}]


@pytest.mark.django_db
@override_settings(ROOT_URLCONF="tests.support.http_urls")
def test_document_is_served_without_a_token_and_names_the_addresses():
    response = Api("").get("outbox/openapi.json")

    assert response.status_code == 200
    assert "/api/outbox/messages" in response.json()["paths"]


@pytest.mark.long
@pytest.mark.timeout(400)  # hundreds of requests
@pytest.mark.parametrize("side", ["outbox", "inbox"])
def test_schemathesis_finds_no_answer_that_the_document_does_not_describe(side, served, tmp_path):
    (tmp_path / "schemathesis.toml").write_text(f'[parameters]\nname = "{TOPIC}"\n')
    done = ran(
        *(Path(sys.executable).with_name("schemathesis"), "run", f"{served}/{side}/openapi.json"),
        *("--header", f"Authorization: Bearer {AUDITOR}", "--checks", ",".join(CHECKS)),
        *("--max-examples", "10", "--phases", "examples,coverage,fuzzing", "--seed", "1", "--generation-database", "none"),
        *("--no-color", "--request-timeout", "60"),
        directory=tmp_path,
        environment={**os.environ, "COLUMNS": "200"},
    )

    assert done.returncode == 0, done.stdout


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
def test_generated_client_publishes_and_gets_typed_answers(served, tmp_path, monkeypatch):
    config = tmp_path / "config.yml"
    config.write_text("post_hooks: []")  # it would format what it has written
    generated = ran(
        *(sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none", "--fail-on-warning"),
        *("--config", config, "--path", documents()["outbox.contrib.http.urls"], "--output-path", tmp_path / "generated"),
        directory=tmp_path,
    )
    assert generated.returncode == 0, generated.stdout
    monkeypatch.syspath_prepend(tmp_path)
    of = importlib.import_module
    message = of("generated.models").NewMessage(topic=TOPIC, payload={"order": "17"})
    publish, cancel = of("generated.api.default.publish"), of("generated.api.default.cancel")

    with of("generated").AuthenticatedClient(base_url=f"{served}/outbox", token=AUDITOR) as client:
        published = publish.sync(client=client, body=message, idempotency_key="k-1")
        cancelled = cancel.sync(client=client, body=of("generated.models").Chosen(id=published.id))

    assert (published.created, cancelled.outcome) == (True, "cancelled")
    assert OutboxMessage.objects.get().state == "cancelled"
