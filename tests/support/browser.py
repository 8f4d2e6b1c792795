"""A real browser for tests of the admin: headless Chromium, driven by Playwright, on a live server with the test's database.

    def test_something(operator):
        page = operator.visit("admin:exactly_once_overview_changelist")
        page.get_by_text("Outbox").click()

Import the fixtures into the `conftest.py` of a directory. At the end of a test the fixture requires that no page has logged an
error or violated the Content-Security-Policy, and that no request left the live server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from tests.support.content_policy import POLICY
from tests.support.servers import binaries
from tests.support.waiting import A_WHILE

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
LONGEST_MS = 1000 * A_WHILE


class Operator:
    """A member of staff with a browser.

    Attributes:
        page: Playwright's page.
        address: of the live server.
        errors: what the console has reported, exceptions of scripts, and dialogs that a script has opened.
        requests: the URLs of all requests.
        posted: the forms that were posted, as (path, body).
    """

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.posted: list[tuple[str, str]] = []
        self.address = address
        page.set_default_timeout(LONGEST_MS)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dismiss)
        page.on("request", self._record)

    def _note(self, message: Any) -> None:
        # A browser asks every site for its icon.
        if message.type in {"error", "warning"} and not message.location["url"].endswith("/favicon.ico"):
            self.errors.append(message.text)

    def _dismiss(self, dialog: Any) -> None:
        self.errors.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _record(self, request: Any) -> None:
        self.requests.append(request.url)
        if request.method != "GET":
            self.posted.append((urlsplit(request.url).path, request.post_data or ""))

    def visit(self, name: str, query: str = "", **arguments: Any) -> Any:
        """Open the page with this URL name."""
        return self.open(reverse(name, **arguments) + query)

    def open(self, path: str) -> Any:
        """Open the page at this path."""
        response = self.page.goto(f"{self.address}{path}")
        assert response.ok, (path, response.status)
        assert response.headers["content-security-policy"] == POLICY
        return self.page

    def require_no_complaint(self) -> None:
        assert not self.errors, self.errors
        left = [url for url in self.requests if not url.startswith((self.address, "data:", "blob:", "about:"))]
        assert not left, left


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - tests without a browser need not have it

    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        # Playwright's event loop runs in this thread, which uses the database.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        # Root may not have Chromium's sandbox. The pages are our own.
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        running = playwright.chromium.launch(executable_path=binaries.chromium(), args=options)
        yield running
        running.close()


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One browser for the tests of a directory."""
    with chromium() as running:
        yield running


@pytest.fixture
def operator(browser: Any, live_server: Any) -> Iterator[Operator]:
    """An operator with all permissions. The live server sees committed rows."""
    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    cookie = client.cookies[settings.SESSION_COOKIE_NAME].value
    with browser.new_context(viewport=DESKTOP) as context:
        host = urlsplit(live_server.url).hostname
        context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": cookie, "domain": host, "path": "/"}])
        found = Operator(context.new_page(), live_server.url)
        yield found
        found.require_no_complaint()
