"""The life of messages from end to end, in the project that DJANGO_SETTINGS_MODULE names: `python -m tests.projects.cycle`.

Commands are processes of their own. The module of the settings may say more about the project, in names that Django ignores:

    before = "CREATE PUBLICATION …"     SQL for the empty database
    tenants = ("blue", "red")           schemas of `django_tenants`, which share one outbox and one inbox
    using = "main"                      the alias of the database with the messages
    broker = True                       RabbitMQ and a consumer, in place of `local://`
    def after(): …                      called when everything is published
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from io import StringIO
from typing import Any

import django

PROJECT = import_module(os.environ["DJANGO_SETTINGS_MODULE"])
USING: str = getattr(PROJECT, "using", "default")
DATABASE = () if USING == "default" else ("--database", USING)
TENANTS: tuple[str, ...] = getattr(PROJECT, "tenants", ())
COMMANDS = (
    *(["exactly_once_status"], ["exactly_once_status", "--json"], ["exactly_once_processes", "--all"]),
    *(["exactly_once_alerts", "--once"], ["exactly_once_export"], ["exactly_once_roles"]),
    *(["exactly_once_trail", "--topic", "projects.order", "--biz-id", f"{(*TENANTS, '')[0]}fails once"],),
    *(["outbox_pause", "projects.order"], ["outbox_resume", "projects.order"]),
    *(["inbox_pause", "projects.book"], ["inbox_resume", "projects.book"]),
    *(["outbox_replay", "--all", "--yes"], ["outbox_restore", "--all", "--state", "retrying"]),
)
LONGEST_SECONDS = 60


def run(*arguments: str) -> None:
    """Run a command as a process; what it prints is shown if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "django", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False
    )
    assert not done.returncode, f"{' '.join(arguments)}: exit status {done.returncode}\n{done.stdout.decode()}"
    assert b"Traceback" not in done.stdout, f"{' '.join(arguments)}:\n{done.stdout.decode()}"


@contextlib.contextmanager
def consuming() -> Iterator[None]:
    """While a consumer runs, which has declared its queues; with `local://` a relay runs the handlers."""
    if not getattr(PROJECT, "broker", False):
        yield
        return
    command = [sys.executable, "-m", "django", "inbox_consume"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "receiving from" in line:
                break
        try:
            yield
        finally:
            process.terminate()
            said.append(process.communicate(timeout=60)[0])
    assert not process.returncode, "".join(said)
    assert "Traceback" not in "".join(said), "".join(said)


def create() -> None:
    from django.db import connections

    if before := getattr(PROJECT, "before", ""):
        with connections[USING].cursor() as cursor:
            cursor.execute(before)
    if TENANTS:
        run("migrate_schemas", "--shared", "--verbosity", "0")
        for tenant in ("public", *TENANTS):
            create_tenant(tenant)
    else:
        for alias in connections:
            if connections[alias].settings_dict["ENGINE"] != "django.db.backends.dummy":
                run("migrate", "--verbosity", "0", "--database", alias)
    run("check", "--database", USING)


def create_tenant(name: str) -> None:
    from django_tenants.utils import get_tenant_domain_model, get_tenant_model

    tenant = get_tenant_model()(schema_name=name, name=name)
    tenant.save(verbosity=0)
    get_tenant_domain_model()(domain=f"{name}.localhost", tenant=tenant, is_primary=True).save()


@contextlib.contextmanager
def at_home(tenant: str) -> Iterator[None]:
    if not tenant:
        yield
        return
    from django_tenants.utils import schema_context

    with schema_context(tenant):
        yield


@contextlib.contextmanager
def a_request() -> Iterator[None]:
    """What Django does with its connections around a request: some go back to their pool."""
    from django.core import signals

    signals.request_started.send(None)
    yield
    signals.request_finished.send(None)


def write(tenant: str) -> None:
    """Publish in every way, on one connection: the sixth publish of a session takes another way than the first."""
    from django.db import transaction

    from outbox import Draft, cancel, prepare, publish, publish_many, reschedule

    def send(name: str, payload: str = "", **options: Any) -> None:
        publish("projects.order", payload, biz_id=f"{tenant}{name}", using=USING, **options)

    for number in range(20):
        with transaction.atomic(using=USING):
            transaction.get_connection(USING).savepoint()
            send(f"plain {number}", key=f"key {number % 3}")
    for number in range(7):
        with transaction.atomic(using=USING):
            send(f"first {number}")
    for number in range(7):
        with a_request(), transaction.atomic(using=USING):
            send(f"request {number}")
    with transaction.atomic(using=USING):
        publish_many((Draft("projects.order", "", biz_id=f"{tenant}many {number}") for number in range(10)), using=USING)
    for _ in range(2):
        with transaction.atomic(using=USING):
            send("published twice")
    with transaction.atomic(using=USING):
        send("unique", unique=True)
        send("unique", unique=True)
        send("delayed", delay=timedelta(milliseconds=500))
        send("fails once", "fails once")
        send("dead letter", "fails")
        send("rescheduled", delay=timedelta(hours=1))
        send("restored", delay=timedelta(hours=1))
        send("cancelled")
    with prepare("projects.order", "", biz_id=f"{tenant}prepared", using=USING):
        pass
    with contextlib.suppress(ZeroDivisionError), prepare("projects.order", "", biz_id=f"{tenant}rolled back", using=USING):
        raise ZeroDivisionError
    for name in ("cancelled", "restored"):
        assert cancel(topic="projects.order", biz_id=f"{tenant}{name}", using=USING), name
    assert reschedule(topic="projects.order", biz_id=f"{tenant}rescheduled", delay=timedelta(), using=USING)


def expected() -> Counter[str]:
    names = [f"plain {n}" for n in range(20)] + [f"many {n}" for n in range(10)]
    names += [f"{kind} {n}" for kind in ("first", "request") for n in range(7)]
    return Counter([*names, *("published twice", "unique", "delayed", "fails once", "rescheduled", "prepared")])


def effects(tenant: str) -> Counter[str]:
    from tests.projects.shop.models import Effect

    with at_home(tenant):
        return Counter(name.removeprefix(tenant) for name in Effect.objects.using(USING).values_list("name", flat=True))


def receipts(tenant: str) -> dict[str, Any]:
    """The state of the message whose handler fails, and how many copies of another one have been counted."""
    from inbox.models import InboxMessage

    def value(name: str, field: str) -> Any:
        return InboxMessage.objects.using(USING).values_list(field, flat=True).filter(biz_id=f"{tenant}{name}").first()

    return {"state": value("dead letter", "state"), "duplicates": value("published twice", "duplicates")}


def handled(wanted: Counter[str], **receipt: Any) -> None:
    """Run relays until every effect and receipt is there; more than one effect of a kind, or another one, is an error.

    Args:
        wanted: the effects of each tenant.
        **receipt: what `receipts` is to give.
    """
    deadline = time.monotonic() + LONGEST_SECONDS
    while True:
        run("outbox_relay", "--drain", *DATABASE)
        found = {tenant: effects(tenant) for tenant in TENANTS or ("",)}
        for tenant, names in found.items():
            assert not names - wanted, f"too much in {tenant or USING}: {names - wanted}"
        stored = {tenant: receipts(tenant) for tenant in found}
        if all(found[tenant] == wanted and stored[tenant] == receipt for tenant in found):
            return
        time.sleep(0.2)
        missing = {tenant: wanted - names for tenant, names in found.items()}
        assert time.monotonic() < deadline, f"missing: {missing}; stored: {stored}"


def operate() -> None:
    """What an operator does: restore, retry, all commands, all pages."""
    from django.core.management import call_command

    from outbox import publish_now, restore
    from tests.projects.shop.models import Effect

    for tenant in TENANTS or ("",):
        assert restore(topic="projects.order", biz_id=f"{tenant}restored", using=USING)
        assert publish_now(topic="projects.order", biz_id=f"{tenant}restored", using=USING)
        with at_home(tenant):
            Effect.objects.using(USING).create(name="repaired")
    call_command("inbox_retry", "--all", *DATABASE, stdout=StringIO())
    for command in COMMANDS:
        call_command(*command, *DATABASE, stdout=StringIO())
    pages()


def purge() -> None:
    """Delete everything that is settled: the messages are in history, by day."""
    from django.core.management import call_command

    from inbox.models import InboxMessage
    from outbox.models import OutboxMessage

    call_command("exactly_once_purge", "--older-than-days", "0", *DATABASE, stdout=StringIO())
    for model in (OutboxMessage, InboxMessage):
        assert not model.objects.using(USING).exclude(settled_at=None).exists(), model


def pages() -> None:
    """Open every list and the form of one row of each, as a superuser."""
    from django.contrib import admin, auth
    from django.test import Client
    from django.urls import NoReverseMatch, reverse

    user = auth.get_user_model().objects.create_superuser(**getattr(PROJECT, "superuser", {"username": "admin"}))
    client = Client(HTTP_HOST=getattr(PROJECT, "host", "localhost"))
    client.force_login(user)
    opened = 0
    for model in admin.site._registry:
        if not model.__module__.startswith(("outbox", "inbox", "exactly_once")):
            continue
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}"
        paths = [reverse(f"{name}_changelist")]
        if model._meta.managed and (row := model._default_manager.using(USING).first()):
            with contextlib.suppress(NoReverseMatch):  # a page without rows
                paths.append(reverse(f"{name}_change", args=[row.pk]))
        for path in paths:
            answer = client.get(path, follow=True)
            assert answer.status_code == 200, f"{path}: {answer.status_code}"
            opened += 1
    assert opened > 25, opened
    assert client.get("/health/live/").status_code == 200
    # No relay is running.
    assert "database" in client.get("/health/ready/outbox/").json()["checks"]["outbox"]


def main() -> None:
    django.setup()
    from django.conf import settings

    settings.ALLOWED_HOSTS = ["*"]
    create()
    for tenant in TENANTS or ("",):
        with at_home(tenant):
            write(tenant)
    getattr(PROJECT, "after", lambda: None)()
    with consuming():
        handled(expected(), state="dead", duplicates=1)
    operate()
    with consuming():
        # Both copies were replayed.
        handled(expected() + Counter(["repaired", "restored", "dead letter"]), state="done", duplicates=3)
    purge()


if __name__ == "__main__":
    main()
