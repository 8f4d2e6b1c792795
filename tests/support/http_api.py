"""Clients of the HTTP API: their tokens, and their requests.

In this process (`Api`, through Django's test client), or by Node in a process of its own (`node`).
"""

import hashlib
import json
import subprocess
from pathlib import Path

from django.test import Client

from tests.support import ROOT
from tests.support.servers.binaries import node

SHOP, PARTNER, AUDITOR = "token-of-the-shop", "token-of-a-partner", "token-of-the-auditor"
NEXT_SHOP = "next-token-of-the-shop"
CLIENT = ROOT / "tests" / "integration" / "http" / "client.mjs"


def digest(token):
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = {
    "shop": {"DIGESTS": [digest(SHOP), digest(NEXT_SHOP)], "SCOPES": ["publish:shop.*", "manage:shop.*", "read:shop.*"]},
    "partner": {"DIGESTS": [digest(PARTNER)], "SCOPES": ["publish:partner.news", "manage:partner.news", "read:partner.*"]},
    "auditor": {"DIGESTS": [digest(AUDITOR)], "SCOPES": ["publish:*", "manage:*", "read:*"]},
}
HTTP = {"TOKENS": TOKENS, "MAX_WAITING": 20}
"""Django's test client looks like a server with a single thread, where no request waits by default."""


class Api:
    """A client with a token. Every answer is checked: an error is a problem, and nothing may be cached."""

    def __init__(self, token=SHOP, base="/api/"):
        self._client = Client(raise_request_exception=False, enforce_csrf_checks=True)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._base = base

    def post(self, where, body=None, content_type="application/json", **headers):
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else body)
        return self._checked(
            self._client.post(self._base + where, content, content_type=content_type, headers={**self._headers, **headers})
        )

    def get(self, where, **query):
        return self._checked(self._client.get(self._base + where, query, headers=self._headers))

    def ask(self, method, where):
        return self._checked(self._client.generic(method, self._base + where, headers=self._headers))

    @staticmethod
    def _checked(response):
        assert "no-store" in response["Cache-Control"]
        if response.status_code >= 400:
            assert response["Content-Type"] == "application/problem+json"
            problem = response.json()
            assert problem["status"] == response.status_code
            assert problem["title"]
            assert problem["detail"]
        return response


class NodeClient:
    """A Node process that works with the API at `base`. It writes one line of JSON for each thing that it has done."""

    def __init__(self, base, *words, token=SHOP):
        self._process = subprocess.Popen(
            [node(), CLIENT, base, token, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def says(self):
        """Its next line."""
        line = self._process.stdout.readline()
        assert line.startswith("{"), line + self._process.stdout.read()
        return json.loads(line)

    def ends(self):
        """What is left of its lines, once it has ended."""
        said, _ = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, said
        return [json.loads(line) for line in said.splitlines()]

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.kill()


def documents():
    """The committed OpenAPI documents, by the module of their API."""
    reference = Path(ROOT, "docs", "reference")
    return {
        "outbox.contrib.http.urls": reference / "outbox-openapi.json",
        "inbox.contrib.http.urls": reference / "inbox-openapi.json",
    }


def rendered(api):
    text = json.dumps(api.get_openapi_schema(path_prefix=""), indent=2) + "\n"
    # Python 3.13 has the names of RFC 9110.
    return text.replace("Content Too Large", "Request Entity Too Large").replace(
        "Unprocessable Content", "Unprocessable Entity"
    )
