"""Take the screenshots of the admin for README and docs, into docs/images: `make screenshots`.

The rows are those of `shop_day`. The pages are served from a private PostgreSQL and photographed in headless Chromium.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.servers import PostgresServer

DIRECTORY = ROOT / "docs" / "images"
WIDE, NARROW = 1280, 390
COLOURS = 224
_PALETTE = Path(__file__).with_name("palette.js")
LARGEST_BYTES = 150_000


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One page.

    Attributes:
        page: the name of its URL, and the arguments of that.
        prepare: what is clicked before.
        height: of the window; the picture ends there.
    """

    name: str
    page: Callable[[], str]
    height: int
    width: int = WIDE
    dark: bool = False
    prepare: Callable[[Any], None] = lambda page: None


def pictures() -> Iterator[Picture]:
    from django.contrib import admin  # noqa: PLC0415 - Django is set up by `main`
    from django.urls import reverse  # noqa: PLC0415

    from exactly_once.console.admin.failure_groups import group_url  # noqa: PLC0415
    from exactly_once.models import Operation  # noqa: PLC0415
    from inbox.models import InboxMessage  # noqa: PLC0415
    from tests.support.shop_day import TIMEOUT  # noqa: PLC0415

    def of(name: str, query: str = "") -> Callable[[], str]:
        return lambda: f"{reverse(f'admin:{name}')}{query}"

    def life() -> str:
        row = InboxMessage.objects.get(biz_id="order-10299", state="dead")
        return reverse("admin:inbox_inboxmessage_change", args=[row.pk])

    def operation() -> str:
        return reverse("admin:exactly_once_operation_change", args=[Operation.objects.get(state="running").pk])

    def group() -> str:
        return group_url(admin.site, "inbox", *TIMEOUT[:2])

    def correct(page: Any) -> None:
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Payload").fill(page.get_by_label("Payload").input_value().replace('"12,50"', '"12.50"'))
        page.get_by_role("button", name="Show the changes").click()
        page.locator(".message-del").wait_for()

    def charts(page: Any) -> None:
        page.locator(".overview-charts canvas").nth(3).wait_for()

    overview = of("exactly_once_overview_changelist")
    yield Picture(name="overview", page=overview, height=1180, prepare=charts)
    yield Picture(name="overview-dark", page=overview, height=1180, dark=True, prepare=charts)
    yield Picture(name="overview-phone", page=overview, width=NARROW, height=1000, prepare=charts)
    yield Picture(name="dead-letters", page=of("inbox_inboxmessage_changelist", "?stuck=any"), height=860)
    yield Picture(name="message-life", page=life, height=1500)
    yield Picture(name="message-phone", page=life, width=NARROW, height=1000)
    yield Picture(name="correction-dark", page=life, height=900, dark=True, prepare=correct)
    yield Picture(name="failure-group", page=group, height=900)
    yield Picture(name="operation", page=operation, height=760)
    yield Picture(name="processes", page=of("exactly_once_process_changelist"), height=560)


def main() -> None:
    with PostgresServer() as server:
        os.environ.update(DATABASE_URL=server.url, DJANGO_SETTINGS_MODULE="tests.settings")
        _set_up()
        from tests.support.browser import chromium  # noqa: PLC0415
        from tests.support.shop_day import a_busy_day  # noqa: PLC0415

        a_busy_day(history=2_800)
        with _served() as address, chromium() as browser:
            _take_all(browser, address)


def _set_up() -> None:
    import django  # noqa: PLC0415
    from django.conf import settings  # noqa: PLC0415
    from django.core.management import call_command  # noqa: PLC0415

    settings.TIME_ZONE = "UTC"
    settings.ALLOWED_HOSTS = ["*"]
    settings.DATABASES.pop("other")
    django.setup()
    call_command("migrate", verbosity=0)
    _register_handlers()


def _register_handlers() -> None:
    from inbox import idempotent_handler  # noqa: PLC0415
    from tests.support.shop_day import TOPIC_OF  # noqa: PLC0415

    for name, topic in TOPIC_OF.items():
        idempotent_handler(topic, name=name)(lambda message: None)


@contextmanager
def _served() -> Iterator[str]:
    from django.contrib.staticfiles.handlers import StaticFilesHandler  # noqa: PLC0415
    from django.test.testcases import LiveServerThread  # noqa: PLC0415

    thread = LiveServerThread("127.0.0.1", StaticFilesHandler)
    thread.daemon = True
    thread.start()
    thread.is_ready.wait()
    if thread.error:
        raise thread.error
    try:
        yield f"http://127.0.0.1:{thread.port}"
    finally:
        thread.terminate()


def _take_all(browser: Any, address: str) -> None:
    from django.conf import settings  # noqa: PLC0415
    from django.contrib.auth.models import User  # noqa: PLC0415
    from django.test import Client  # noqa: PLC0415

    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    cookie = client.cookies[settings.SESSION_COOKIE_NAME].value
    DIRECTORY.mkdir(exist_ok=True)
    for picture in pictures():
        size = {"width": picture.width, "height": picture.height}
        scheme = "dark" if picture.dark else "light"
        with browser.new_context(viewport=size, color_scheme=scheme, timezone_id="UTC", locale="en-GB") as context:
            context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": cookie, "url": address}])
            context.add_init_script("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
            page = context.new_page()
            _beat()
            page.goto(address + picture.page())
            picture.prepare(page)
            page.wait_for_timeout(500)  # the script has drawn the charts
            taken = page.screenshot()
            page.goto("about:blank")  # without a policy, so that a script may read the picture
            _write(picture.name, _reduced(page, taken))


def _beat() -> None:
    """The processes of the shop send a heartbeat; the recent starts are set to now."""
    from exactly_once.models import Process  # noqa: PLC0415
    from exactly_once.sql.now import DatabaseTime  # noqa: PLC0415

    Process.objects.filter(app="inbox").update(beat_at=DatabaseTime())
    relays = Process.objects.filter(app="outbox").exclude(host="shop-web-0")
    relays.update(beat_at=DatabaseTime(), last_pass_at=DatabaseTime())


def _reduced(page: Any, picture: bytes) -> bytes:
    """The picture with a palette, which needs a third of the bytes. The browser computes it."""
    url = f"data:image/png;base64,{b64encode(picture).decode()}"
    found = page.evaluate(_PALETTE.read_text(encoding="utf-8"), [url, COLOURS])
    header = struct.pack(">IIBBBBB", found["width"], found["height"], 8, 3, 0, 0, 0)
    parts = {
        b"IHDR": header,
        b"PLTE": bytes(found["palette"]),
        b"IDAT": zlib.compress(b64decode(found["rows"]), 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts.items()
    )


def _write(name: str, picture: bytes) -> None:
    file = DIRECTORY / f"{name}.png"
    if len(picture) > LARGEST_BYTES:
        raise SystemExit(f"{file} would have {len(picture):,} bytes; the limit is {LARGEST_BYTES:,}. Make the picture lower.")
    file.write_bytes(picture)
    sys.stdout.write(f"{file.relative_to(ROOT)}: {len(picture):,} bytes\n")


if __name__ == "__main__":
    main()
